"""A scorer's process: lease requests ahead of need -> score them in batches -> answer.

Three tasks share one event loop: one leases and renews, one scores (the model runs in a thread), one reports. A broker
that is away ends none of them. A scorer that is told to leave finishes its batch and hands the rest back.

A scorer takes only fit requests to its model: any program may hold a worker's password, so no request is trusted.
"""

import asyncio
import logging
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from headway.broker.client.broker import Broker, Outages
from headway.broker.client.scoring import ScoreLease, Scores
from headway.broker.errors import HeadwayError
from headway.broker.schema import ScoreRequest
from headway.broker.schema.status import ScorerInfo
from headway.rollout_workers.health import RunEnd

from . import Runner

LOWEST_TEMPERATURE, HIGHEST_TEMPERATURE = 1e-3, 1e3
"""Those of `sampling.temperature`: logits are divided by it, in float32."""


@dataclass(frozen=True)
class RequestLimits:
    """The bounds of an honest request of the run."""

    most_response_tokens: int
    """`sampling.max_new_tokens`"""
    most_tokens: int
    """The most tokens of prompt and response: `engine.max_model_len`."""
    most_candidates: int = 0
    """`algorithm.distillation.top_k`"""


def rejection_reason(request: ScoreRequest, runner: Runner, limits: RequestLimits, kind: str) -> str:
    """Return why this model is not asked; "" where it can score the request."""
    prompt, response = len(request.prompt_tokens), len(request.response_tokens)
    if not prompt:
        return "it has no prompt tokens, after which a response would have a probability"
    if not LOWEST_TEMPERATURE <= request.temperature <= HIGHEST_TEMPERATURE:
        return f"its temperature is {request.temperature:g}, outside {LOWEST_TEMPERATURE:g} to {HIGHEST_TEMPERATURE:g}"
    highest = max(int(part.max()) for part in (request.prompt_tokens, request.response_tokens))
    if highest >= runner.vocabulary:
        return f"it has token {highest}, and the vocabulary of the {kind} ends at {runner.vocabulary}"
    if prompt + response > runner.longest:
        return f"it has {prompt + response} tokens, and the {kind} reads {runner.longest} at most"
    if response > limits.most_response_tokens:
        return f"its response has {response} tokens, and sampling.max_new_tokens is {limits.most_response_tokens}"
    if prompt + response > limits.most_tokens:
        return f"it has {prompt + response} tokens, and engine.max_model_len is {limits.most_tokens}"
    if request.top_k > min(limits.most_candidates, runner.vocabulary):
        return (
            f"it wants {request.top_k} candidates in each place; algorithm.distillation.top_k is"
            f" {limits.most_candidates}, and the {kind} knows {runner.vocabulary} tokens"
        )
    return ""


def probe() -> ScoreRequest:
    """Return a request that every model can score unless it is broken."""
    token = np.zeros(1, np.int32)
    return ScoreRequest(prompt_tokens=token, response_tokens=token)


BATCHES_AHEAD = 2
"""Batches that a scorer has leased at most, the one that it scores among them."""
MOST_REQUESTS = 1024
FIRST_BATCH_TOKENS = 1024
"""Tokens of the batches before the model's speed is known."""
SHARE_OF_HOLD = 0.25
"""The share of the time for which a process may have a request that all it has leased takes, at its own speed."""
SHORTEST_WAIT_S, LONGEST_WAIT_S = 0.01, 0.2
"""Seconds between two requests for leases: the shortest after a success, up to the longest after refusals."""
MISSED_HEARTBEATS = 5
EXIT_NOTICE_S = 5.0
"""Seconds to hand leases back and leave."""
_BYTES_PER_TOKEN = 3
"""The largest size of a request's frame."""

log = logging.getLogger(__name__)


class ModelFailedError(HeadwayError):
    """The scorer's model fails even at a request that this process makes itself."""


@dataclass(frozen=True, kw_only=True)
class ScorerContext:
    """The facts of its run that a scorer's process works by."""

    scorer: str
    """The scorer whose requests it answers."""
    kind: str
    process: str
    """The name of this process."""
    device: str
    limits: RequestLimits
    batch_tokens: int
    """The most tokens of one batch, with padding; a longer request is a batch of its own."""
    hold_s: float
    """The time for which the askers leave a request to one process: a slow model has smaller batches."""
    lease_ttl_s: float
    heartbeat_s: float
    patience_s: float


class ScorerServer:
    """Answers the requests of one scorer with one model."""

    def __init__(self, context: ScorerContext, broker: Broker, runner: Runner) -> None:
        self._context = context
        self._scorer = context.scorer
        self._broker = broker
        self._runner = runner
        self._outages = Outages(broker.url)
        self._run_end = RunEnd(context.patience_s)
        self._held = dict[str, ScoreLease]()
        """Leases that are not answered, the longest asked first."""
        self._arrived, self._room = asyncio.Event(), asyncio.Event()
        self._end = ""
        self._last_error = ""
        self.scored = 0
        self._tokens, self._busy_s = 0, 0.0

    async def run(self) -> str:
        """Answer until the scorer is told to leave (returns "drained") or the run is over (returns its state). Raises
        ModelFailedError, and the first error of any task."""
        try:
            async with asyncio.TaskGroup() as tasks:
                background = [tasks.create_task(part) for part in (self._fill(), self._beat())]
                await self._score_on()
                for task in background:
                    task.cancel()
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from group
        finally:
            await self._leave()
        return self._end

    def request_drain(self) -> None:
        """Ask the scorer to answer its batch, hand the rest back and return from `run`. Idempotent."""
        self._stop("drained")

    def info(self) -> ScorerInfo:
        """Return what this scorer reports of itself."""
        return ScorerInfo(
            process=self._context.process,
            scorer=self._scorer,
            kind=self._context.kind,
            host=socket.gethostname(),
            pid=os.getpid(),
            state="draining" if self._end else "ready",
            device=self._context.device,
            held=len(self._held),
            scored=self.scored,
            tokens_per_s=self._tokens / self._busy_s if self._busy_s else 0.0,
            last_error=(self._outages.last_error or self._last_error)[:2000],
        )

    def _batch_tokens(self) -> int:
        """Return how many tokens a batch may have now."""
        if not self._busy_s:
            return min(self._context.batch_tokens, FIRST_BATCH_TOKENS)
        in_time = SHARE_OF_HOLD * self._context.hold_s * self._tokens / self._busy_s / BATCHES_AHEAD
        return max(1, min(self._context.batch_tokens, int(in_time)))

    async def _fill(self) -> None:
        """Keep so many tokens leased, and renew the leases in time."""
        wait_s, renewed_s = SHORTEST_WAIT_S, time.monotonic()
        while True:
            room = BATCHES_AHEAD * self._batch_tokens() - sum(map(_length, self._held.values()))
            is_due = time.monotonic() - renewed_s > self._context.lease_ttl_s / 4
            found = 0
            if room > 0 or is_due:
                with self._outages:
                    found = await self._lease(max(0, room))
                    renewed_s = time.monotonic()
            wait_s = SHORTEST_WAIT_S if found else min(2 * wait_s, LONGEST_WAIT_S)
            await self._pause(wait_s)

    async def _pause(self, wait_s: float) -> None:
        """Wait, or until a batch is answered where there is no room before."""
        self._room.clear()
        try:
            async with asyncio.timeout(wait_s):
                await self._room.wait()
        except TimeoutError:
            return

    async def _lease(self, room: int) -> int:
        most = max(0, MOST_REQUESTS - len(self._held)) if room else 0
        held = list(self._held.values())
        reply = await self._broker.scoring.lease(
            self._scorer, ttl_s=self._context.lease_ttl_s, most=most, most_bytes=_BYTES_PER_TOKEN * room, held=held
        )
        for lease in held:
            if lease.name in reply.lost:
                self._drop(lease)
        unfit = {lease: reason for lease in reply.leases if (reason := self._unfit(lease))}
        self._held |= {lease.name: lease for lease in reply.leases if lease not in unfit}
        if reply.leases:
            self._arrived.set()
        for lease, reason in unfit.items():
            await self._give_up(lease, reason)
        return len(reply.leases)

    def _unfit(self, lease: ScoreLease) -> str:
        return rejection_reason(lease.request, self._runner, self._context.limits, self._context.kind)

    async def _score_on(self) -> None:
        while not self._end:
            self._arrived.clear()
            if batch := next_batch(list(self._held.values()), self._batch_tokens()):
                await self._score(batch)
                self._room.set()
            else:
                await self._arrived.wait()

    async def _score(self, batch: Sequence[ScoreLease]) -> None:
        began_s = time.monotonic()
        try:
            scores = await asyncio.to_thread(self._runner.score, [lease.request for lease in batch])
            _check(scores)
        except Exception as error:  # noqa: BLE001 - a model's code may raise anything; one request may be at fault
            await self._search(batch, error)
            return
        finally:
            self._busy_s += time.monotonic() - began_s
        await self._answer(batch, scores)

    async def _search(self, batch: Sequence[ScoreLease], error: Exception) -> None:
        """Score the requests of a batch that failed one by one; give up the one at fault. Raises ModelFailedError where
        the model is at fault."""
        if len(batch) > 1:
            for lease in batch:
                await self._score([lease])
            return
        log.exception("the model failed at a request", exc_info=error)
        self._last_error = f"{type(error).__name__}: {error}"
        await self._give_up(batch[0], f"the {self._context.kind} failed: {self._last_error}")
        await self._probe()

    async def _probe(self) -> None:
        """Raise ModelFailedError, so that another process takes this one's place, unless the model scores a request
        that this process makes itself. What workers ask for ends no scorer."""
        try:
            _check(await asyncio.to_thread(self._runner.score, [probe()]))
        except Exception as error:
            raise ModelFailedError(
                f"The {self._context.kind} failed at a request ({self._last_error}), and then at a probe of two tokens,"
                f" too: {type(error).__name__}: {error}"
            ) from error

    async def _answer(self, batch: Sequence[ScoreLease], scores: list[Scores]) -> None:
        answers = list(zip(batch, scores, strict=True))
        await self._outages.retry_until_available(lambda: self._broker.scoring.answer(self._scorer, answers))
        self.scored += len(batch)
        self._tokens += sum(map(_length, batch))
        for lease in batch:
            self._drop(lease)

    async def _give_up(self, lease: ScoreLease, reason: str) -> None:
        await self._outages.retry_until_available(lambda: self._broker.scoring.release(self._scorer, [lease], reason))
        self._drop(lease)

    def _drop(self, lease: ScoreLease) -> None:
        """Forget a lease, but not a newer one of the same request."""
        if (held := self._held.get(lease.name)) is not None and held.token == lease.token:
            del self._held[lease.name]

    async def _beat(self) -> None:
        while True:
            with self._outages:
                await self._broker.scoring.report(self.info(), MISSED_HEARTBEATS * self._context.heartbeat_s)
                state = await self._broker.status.state()
                if self._run_end.is_over(state):
                    self._stop(state)
            await asyncio.sleep(self._context.heartbeat_s)

    def _stop(self, reason: str) -> None:
        self._end = self._end or reason
        self._arrived.set()

    async def _leave(self) -> None:
        try:
            async with asyncio.timeout(EXIT_NOTICE_S):
                with self._outages:
                    await self._broker.scoring.release(self._scorer, list(self._held.values()))
                    await self._broker.scoring.leave(self._context.process)
        except TimeoutError:
            log.warning("the server does not answer: leases expire after %g s", self._context.lease_ttl_s)


def _length(lease: ScoreLease) -> int:
    return len(lease.request.prompt_tokens) + len(lease.request.response_tokens)


def next_batch(held: Sequence[ScoreLease], batch_tokens: int) -> list[ScoreLease]:
    """Return the first lease and others of about its length, so that little is padded."""
    if not held:
        return []
    first = _length(held[0])
    batch, longest = list[ScoreLease](), 0
    for lease in sorted(held, key=lambda lease: abs(_length(lease) - first)):
        longest = max(longest, _length(lease))
        if batch and (len(batch) + 1) * longest > batch_tokens:
            break
        batch.append(lease)
    return batch


def _check(scores: Sequence[Scores]) -> None:
    if not all(np.isfinite(one).all() for one in scores):
        raise ValueError("it gave a score that is not finite")
