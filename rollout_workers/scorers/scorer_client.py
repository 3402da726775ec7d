"""A process has responses scored by scorers that it asks through the broker, or by a model of its own.

The worker's end: many samples wait at once, and one loop asks and collects for all of them. Commands without a broker
score in their own process.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from headway.broker.client.broker import Outages
from headway.broker.client.scoring import Scores, Scoring, ScoringResult, new_request_name
from headway.broker.errors import HeadwayError
from headway.broker.schema import ScoreRequest

from . import Runner, ScoringError

ASKED_TTL_S = 60.0
"""Seconds for which the server keeps a request whose asker is silent. One that comes back later asks again."""
SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.01, 0.2
"""Seconds between two looks for answers: the shortest after an answer, up to the longest without one."""
EXIT_NOTICE_S = 1.0
"""Seconds to tell the server which requests it may forget."""

log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Asked:
    request: ScoreRequest
    answer: asyncio.Future[Scores]
    is_held: bool = False
    """Whether the server has the request, as far as this process knows."""


class ScorerClient:
    """A scorer whose processes are asked through the broker."""

    def __init__(self, verbs: Scoring, outages: Outages, scorer: str, *, hold_s: float, worker: str = "") -> None:
        """`hold_s`: seconds for which one process may have a request before another one gets it. `worker`: the name of
        the worker that asks; none: the learner."""
        self._verbs = verbs
        self._outages = outages
        self._scorer = scorer
        self._hold_s = hold_s
        self._worker = worker
        self._pending = dict[str, _Asked]()
        self._over = list[str]()
        """Requests that the server may forget."""
        self._exchanging: asyncio.Task[None] | None = None

    async def score(
        self, prompt_tokens: Sequence[int], response_tokens: Sequence[int], temperature: float = 1.0, top_k: int = 0
    ) -> Scores:
        """Ask, and wait for the scores. Raises ScoringError where several processes could not answer."""
        request = _request(prompt_tokens, response_tokens, temperature, top_k)
        name = new_request_name()
        answer: asyncio.Future[Scores] = asyncio.get_running_loop().create_future()
        self._pending[name] = _Asked(request, answer)
        if self._exchanging is None or self._exchanging.done():
            self._exchanging = asyncio.create_task(self._exchange_on())
        try:
            return await answer
        finally:
            del self._pending[name]
            self._over.append(name)

    async def close(self) -> None:
        """Forget all requests."""
        if self._exchanging is not None:
            self._exchanging.cancel()
            await asyncio.wait([self._exchanging])
            self._exchanging = None
        over, self._over = [*self._over, *self._pending], []
        if over:
            with suppress(HeadwayError, TimeoutError):
                async with asyncio.timeout(EXIT_NOTICE_S):
                    await self._verbs.collect(self._scorer, [], ttl_s=ASKED_TTL_S, forget=over)

    async def _exchange_on(self) -> None:
        """Ask and collect while samples wait. An error that no waiting can cure goes to all of them."""
        pause_s = SHORTEST_PAUSE_S
        try:
            while self._pending or self._over:
                answered = 0
                with self._outages:
                    answered = await self._exchange()
                pause_s = SHORTEST_PAUSE_S if answered else min(2 * pause_s, LONGEST_PAUSE_S)
                await asyncio.sleep(pause_s)
        except HeadwayError as error:
            for asked in self._pending.values():
                if not asked.answer.done():
                    asked.answer.set_exception(error)

    async def _exchange(self) -> int:
        """Ask what the server does not have, collect the rest, and return how many requests have ended."""
        await self._ask()
        names = [name for name, asked in self._pending.items() if asked.is_held]
        over, self._over = self._over, []
        try:
            found = await self._verbs.collect(self._scorer, names, ttl_s=ASKED_TTL_S, forget=over)
        except BaseException:
            self._over += over
            raise
        return sum(self._note(self._pending.get(name), one) for name, one in found.items())

    async def _ask(self) -> None:
        unknown = {name: asked.request for name, asked in self._pending.items() if not asked.is_held}
        if unknown:
            held = await self._verbs.ask(
                self._scorer, unknown, ttl_s=ASKED_TTL_S, hold_s=self._hold_s, worker=self._worker
            )
            for name in held & self._pending.keys():
                self._pending[name].is_held = True

    def _note(self, asked: _Asked | None, found: ScoringResult) -> bool:
        """Note what was collected, and return whether the request has ended."""
        if asked is None or asked.answer.done():
            return False
        match found.state:
            case "answered":
                assert found.scores is not None
                _settle(asked, found.scores, self._scorer)
            case "failed":
                asked.answer.set_exception(ScoringError(f"no scorer {self._scorer} could answer: {found.reason}"))
            case "unknown":
                log.info("the server lost a request for scorer %s; it is asked again", self._scorer)
                asked.is_held = False
        return asked.answer.done()


def _settle(asked: _Asked, scores: Scores, scorer: str) -> None:
    """Hand the scores to the sample that waits. Scorers are other processes, so their answers are checked."""
    length, top_k = len(asked.request.response_tokens), asked.request.top_k
    if len(scores) in (1, length * (1 + 2 * top_k)) and np.isfinite(scores).all():
        asked.answer.set_result(scores)
    else:
        asked.answer.set_exception(ScoringError(f"scorer {scorer} answered with {scores[:5]}, which no score can be"))


class InProcessScorer:
    """Scores with a model that this process holds, one request at a time, in a thread."""

    def __init__(self, open_runner: Callable[[], Runner]) -> None:
        """`open_runner` loads the model when the first request comes: a stage that opens an evaluation may measure
        nothing, and the model may not be there yet."""
        self._open_runner = open_runner
        self._runner: Runner | None = None
        self._one_at_a_time = asyncio.Lock()

    async def score(
        self, prompt_tokens: Sequence[int], response_tokens: Sequence[int], temperature: float = 1.0, top_k: int = 0
    ) -> Scores:
        """Return the scores of a response."""
        request = _request(prompt_tokens, response_tokens, temperature, top_k)
        async with self._one_at_a_time:
            if self._runner is None:
                self._runner = await asyncio.to_thread(self._open_runner)
            (scores,) = await asyncio.to_thread(self._runner.score, [request])
        return scores

    async def close(self) -> None:
        """Do nothing: the model goes with the process."""


def _request(
    prompt_tokens: Sequence[int], response_tokens: Sequence[int], temperature: float, top_k: int
) -> ScoreRequest:
    return ScoreRequest(
        prompt_tokens=np.asarray(prompt_tokens, np.int32),
        response_tokens=np.asarray(response_tokens, np.int32),
        temperature=temperature,
        top_k=top_k,
    )
