"""The pass rate on held-out prompts, with the engine, sampling, rewards and environment that training uses.

`evaluate` runs in the process that asks for it. `EvaluationSampler` is a worker's part in evaluations beside training:
it samples held-out prompts with the version that its engine holds. The worker asks once a version is swapped in. While
that version is evaluated the worker keeps it, for at most `evaluation.hold_s` seconds: no token of an evaluation's
sample may come from other weights, and the samples of a worker that dies need another one that still has them. Samples
that are trained go on beside; they get the places in the engine that the evaluation leaves. A worker that finds nothing
to sample swaps as ever.
"""

import asyncio
import logging
import time
import zlib
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from statistics import fmean
from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace

from headway.broker.client.broker import Outages
from headway.broker.client.evaluations import EvaluationLease, EvaluationOutcome, EvaluationResult, Evaluations
from headway.broker.schema import Prompt, WeightVersion

from .config import EvalConfig, SamplingConfig
from .decoding import Decoding
from .engines.base import Engine, GenerationRequest
from .rewards.base import UnscoredError
from .samples.episode import PlayedSample, Player
from .samples.generation import EngineFailedError, generate
from .samples.leased_samples import WorkerContext
from .samples.recorder import Recorder

log = logging.getLogger(__name__)


T = TypeVar("T")


class EvalResult(msgspec.Struct, frozen=True, kw_only=True):
    """Means over the samples of all prompts; all are 0 if there were no prompts."""

    pass_rate: float
    """The share of samples that passed (pass@1)."""
    reward_mean: float
    response_tokens_mean: float
    prompts: int
    samples: int = 1
    """The samples of each prompt: k."""
    pass_at_k: float = 0.0
    """The share of prompts of which at least one sample passed (pass@k)."""
    reward: dict[str, float] = {}
    """The mean of each reward function's own score, of its measures and of the environment's, by name; each over the
    samples that have it."""


async def evaluate(
    engine: Engine,
    prompts: Sequence[Prompt],
    player: Player,
    decoding: Decoding,
    sampling: SamplingConfig,
    pass_reward: float,
    *,
    samples: int = 1,
) -> EvalResult:
    """Have `player` play each prompt `samples` times, with as many requests at a time as the engine can batch."""
    places = asyncio.Semaphore(engine.capacity)

    async def turn(request: GenerationRequest, recorder: Recorder) -> None:
        async with places:
            await generate(engine, request, recorder)

    async def one(place: int, number: int, prompt: Prompt) -> EvaluationResult:
        sample = PlayedSample(
            prompt=prompt,
            number=number,
            recorder=player.recorder(prompt),
            request=held_out_request(place, number, prompt, sampling, decoding),
            generate=turn,
            max_model_len=engine.max_model_len,
        )
        return await play_held_out(player, sample, pass_reward)

    asked = [one(place, number, prompt) for place, prompt in enumerate(prompts) for number in range(samples)]
    return summarize(await gather_or_cancel(asked), samples)


def summarize(results: Sequence[EvaluationResult], samples: int) -> EvalResult:
    """Return the means of results, `samples` of which follow each other for each prompt."""
    if not results:
        return EvalResult(pass_rate=0.0, reward_mean=0.0, response_tokens_mean=0.0, prompts=0, samples=samples)
    by_prompt = [results[first : first + samples] for first in range(0, len(results), samples)]
    names = {name for result in results for name in result.components}
    return EvalResult(
        pass_rate=fmean(result.passed for result in results),
        reward_mean=fmean(result.reward for result in results),
        response_tokens_mean=fmean(result.response_tokens for result in results),
        prompts=len(by_prompt),
        samples=samples,
        pass_at_k=fmean(any(result.passed for result in of_prompt) for of_prompt in by_prompt),
        reward={n: fmean(r.components[n] for r in results if n in r.components) for n in sorted(names)},
    )


async def gather_or_cancel(asked: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Return all results in order. The first error cancels the rest, so that no request outlives the call."""
    tasks = [asyncio.ensure_future(one) for one in asked]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def evaluation_sampling(sampling: SamplingConfig, config: EvalConfig) -> SamplingConfig:
    """Return how evaluations sample; a temperature of 0 decodes greedily."""
    return sampling if config.temperature is None else replace(sampling, temperature=config.temperature)


def held_out_request(
    place: int, number: int, prompt: Prompt, sampling: SamplingConfig, decoding: Decoding
) -> GenerationRequest:
    """Return the request for sample `number` of the prompt at `place` of the held-out ones.

    Its seed depends on nothing else, so the same weights give the same result on an engine that honours seeds.
    """
    name = f"eval:{place}:{prompt.group}" + (f":{number}" if number else "")
    return GenerationRequest(
        request_id=name,
        prompt_tokens=prompt.token_ids,
        max_new_tokens=sampling.max_new_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        stop_token_ids=list(decoding.stop_token_ids),
        seed=zlib.crc32(name.encode()),
    )


async def play_held_out(player: Player, sample: PlayedSample, pass_reward: float) -> EvaluationResult:
    """Play an episode to its end and return its result. Raises as `Player.play` does."""
    scored = await player.play(sample) or await player.score_turn(sample.prompt, sample.recorder, 0)
    reward = sample.recorder.earned + scored.reward
    return EvaluationResult(reward >= pass_reward, reward, len(sample.recorder.tokens), scored.components)


RENEW_S = 1.0
"""Seconds between two renewals of the leases of a worker whose engine has no room for more."""


class _EvaluationSample(msgspec.Struct, eq=False):
    lease: EvaluationLease
    task: asyncio.Task[None]


class EvaluationSampler:
    """The evaluation of one version at a time, from `begin` until its workers have done all samples."""

    def __init__(
        self,
        context: WorkerContext,
        verbs: Evaluations,
        outages: Outages,
        player: Player,
        generate: Callable[[GenerationRequest, Recorder], Awaitable[None]],
        *,
        max_model_len: int,
        on_change: Callable[[], None],
    ) -> None:
        """`generate` records one turn. `on_change` is called when the engine has room for another sample."""
        self._context = context
        self._config = context.evaluation
        self._sampling = evaluation_sampling(context.sampling, context.evaluation)
        self._verbs = verbs
        self._outages = outages
        self._player = player
        self._generate = generate
        self._max_model_len = max_model_len
        self._on_change = on_change
        self._held: dict[int, _EvaluationSample] = {}
        self._version: WeightVersion | None = None
        """The version that is evaluated, as far as this worker knows; None: it takes part in no evaluation."""
        self._is_over = asyncio.Event()
        self._is_over.set()
        self._until_s = self._renewal_s = 0.0

    def __len__(self) -> int:
        """The number of samples under way."""
        return len(self._held)

    def begin(self, version: WeightVersion) -> None:
        """Note that the engine holds `version` now. The next `fill` asks whether it is evaluated."""
        assert not self._held, "the swap waited until the evaluation before was over"
        if self._config.where == "workers":
            self._version = version
            self._is_over.clear()
            self._until_s, self._renewal_s = time.monotonic() + self._config.hold_s, 0.0

    async def fill(self, room: int, start: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]) -> None:
        """Begin as many samples as the engine has room for, by `start`, and renew the leases of the others. Notice when
        the evaluation is over."""
        version = self._version
        if version is None or (room <= 0 and time.monotonic() < self._renewal_s):
            return
        self._renewal_s = time.monotonic() + RENEW_S
        held = [one.lease for one in self._held.values()]
        with self._outages:
            reply = await self._verbs.lease(
                self._context.worker, version, max(0, room), self._context.lease_ttl_s, held
            )
            if version != self._version:  # it was given up meanwhile
                await self._verbs.release(reply.leases)
                return
            for sample in reply.lost:
                self._lose(sample)
            for lease in reply.leases:
                self._held[lease.sample] = _EvaluationSample(lease, start(self._sample(lease)))
            if not reply.left:
                await self.end()

    async def until_over(self) -> bool:
        """Wait until the engine's version is needed no more: until all samples of its evaluation are done, or for the
        rest of `evaluation.hold_s`. Unfinished samples are then handed back. Returns whether it had to wait."""
        if self._is_over.is_set():
            return False
        try:
            async with asyncio.timeout(max(0.0, self._until_s - time.monotonic())):
                await self._is_over.wait()
        except TimeoutError:
            log.warning(
                "the evaluation of %s was not over after evaluation.hold_s=%g s: %d samples are handed back",
                self._version,
                self._config.hold_s,
                len(self._held),
            )
            await self.end()
        return True

    async def end(self) -> None:
        """Take part no longer, and hand unfinished samples back."""
        unfinished, self._held, self._version = list(self._held.values()), {}, None
        self._is_over.set()
        for held in unfinished:
            held.task.cancel()
        if unfinished:
            await asyncio.wait([held.task for held in unfinished])
            with self._outages:
                await self._verbs.release([held.lease for held in unfinished])

    def _lose(self, sample: int) -> None:
        if (held := self._held.pop(sample, None)) is not None:
            held.task.cancel()

    async def _sample(self, lease: EvaluationLease) -> None:
        recorder = self._player.recorder(lease.prompt)
        try:
            result = await self._result(lease, recorder)
        except EngineFailedError:
            self._held.pop(lease.sample, None)
            with self._outages:
                await self._verbs.release([lease])
            self._on_change()
            return
        versions = [span.version for span in recorder.spans]
        outcome = await self._outages.retry_until_available(lambda: self._verbs.submit(lease, result, versions))
        if outcome is EvaluationOutcome.OTHER_VERSION:
            log.warning("sample %d of the evaluation of %s has tokens of %s", lease.sample, lease.version, versions)
        self._held.pop(lease.sample, None)
        self._on_change()

    async def _result(self, lease: EvaluationLease, recorder: Recorder) -> EvaluationResult:
        """Return the result of a sample. One that no reward function can score has not passed."""
        place, number = divmod(lease.sample, self._config.samples)
        request = held_out_request(place, number, lease.prompt, self._sampling, self._context.decoding)
        # A worker may lease a lost sample again while the engine still ends its old request.
        request = msgspec.structs.replace(request, request_id=f"{request.request_id}:{lease.version}:{lease.token}")
        sample = PlayedSample(
            prompt=lease.prompt,
            number=number,
            recorder=recorder,
            request=request,
            generate=self._generate,
            max_model_len=self._max_model_len,
        )
        try:
            return await play_held_out(self._player, sample, self._config.pass_reward)
        except UnscoredError as error:
            log.warning("sample %d of the evaluation of %s has not passed: %s", lease.sample, lease.version, error)
            return EvaluationResult(passed=False, reward=0.0, response_tokens=len(recorder.tokens))
