"""A worker's part in evaluations: it samples held-out prompts with the version that its engine holds.

The worker asks once a version is swapped in. While that version is evaluated the worker keeps it, for at most
`evaluation.hold_s` seconds: no token of an evaluation's sample may come from other weights, and the samples of a worker
that dies need another one that still has them. Samples that are trained go on beside; they get the places in the engine
that the evaluation leaves. A worker that finds nothing to sample swaps as ever.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import msgspec

from headway.broker.client.evaluations import EvaluationLease, EvaluationOutcome, EvaluationResult, Evaluations
from headway.broker.schema import WeightVersion
from headway.rollout_workers.config import EvalConfig, SamplingConfig
from headway.rollout_workers.decoding import Decoding
from headway.rollout_workers.engines.base import GenerationRequest
from headway.rollout_workers.outages import Outages
from headway.rollout_workers.rewards.base import UnscoredError

from .episode import Episodes
from .generation import EngineFailedError
from .held_out import evaluation_sampling, held_out_request, play_held_out
from .recorder import Recorder

RENEW_S = 1.0
"""Seconds between two renewals of the leases of a worker whose engine has no room for more."""

log = logging.getLogger(__name__)


class _Held(msgspec.Struct, eq=False):
    lease: EvaluationLease
    task: asyncio.Task[None]


class Evaluating:
    """The evaluation of one version at a time, from `begin` until all samples are done, by whichever workers."""

    def __init__(
        self,
        verbs: Evaluations,
        outages: Outages,
        episodes: Episodes,
        decoding: Decoding,
        sampling: SamplingConfig,
        config: EvalConfig,
        generate: Callable[[GenerationRequest, Recorder], Awaitable[None]],
        *,
        worker: str,
        lease_ttl_s: float,
        max_model_len: int,
        on_change: Callable[[], None],
    ) -> None:
        """`generate` records one turn. `on_change` is called when the engine has room for another sample."""
        self._verbs = verbs
        self._outages = outages
        self._episodes = episodes
        self._decoding = decoding
        self._sampling = evaluation_sampling(sampling, config)
        self._config = config
        self._generate = generate
        self._worker = worker
        self._lease_ttl_s = lease_ttl_s
        self._max_model_len = max_model_len
        self._on_change = on_change
        self._held: dict[int, _Held] = {}
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
            reply = await self._verbs.lease(self._worker, version, max(0, room), self._lease_ttl_s, held)
            if version != self._version:  # it was given up meanwhile
                await self._verbs.release(reply.leases)
                return
            for sample in reply.lost:
                self._lose(sample)
            for lease in reply.leases:
                self._held[lease.sample] = _Held(lease, start(self._sample(lease)))
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
        recorder = Recorder()
        try:
            result = await self._result(lease, recorder)
        except EngineFailedError:
            self._held.pop(lease.sample, None)
            with self._outages:
                await self._verbs.release([lease])
            self._on_change()
            return
        versions = [span.version for span in recorder.spans]
        outcome = await self._outages.ride_out(lambda: self._verbs.submit(lease, result, versions))
        if outcome is EvaluationOutcome.OTHER_VERSION:
            log.warning("sample %d of the evaluation of %s has tokens of %s", lease.sample, lease.version, versions)
        self._held.pop(lease.sample, None)
        self._on_change()

    async def _result(self, lease: EvaluationLease, recorder: Recorder) -> EvaluationResult:
        """Return the result of a sample. One that no reward function can score has not passed."""
        place, number = divmod(lease.sample, self._config.samples)
        request = held_out_request(place, number, lease.prompt, self._sampling, self._decoding)
        # A worker may lease a lost sample anew while the engine still ends its old request.
        request = msgspec.structs.replace(request, request_id=f"{request.request_id}:{lease.version}:{lease.token}")
        try:
            return await play_held_out(
                self._episodes,
                lease.prompt,
                recorder,
                request,
                lambda: self._generate(request, recorder),
                max_model_len=self._max_model_len,
                pass_reward=self._config.pass_reward,
            )
        except UnscoredError as error:
            log.warning("sample %d of the evaluation of %s has not passed: %s", lease.sample, lease.version, error)
            return EvaluationResult(passed=False, reward=0.0, response_tokens=len(recorder.tokens))
