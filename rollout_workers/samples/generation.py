"""Generates one turn of a sample to its end: it repeats interrupted requests, and continues what another worker
generated. `MonitoredEngine` counts a worker's requests, measures their tokens and notes the engine's failures.
"""

import asyncio
import logging
import time
import zlib
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import cast

import msgspec

from headway.broker.errors import BrokerError, FrameError, HeadwayError
from headway.broker.schema import Lease
from headway.rollout_workers.config import SamplingConfig
from headway.rollout_workers.decoding import Decoding
from headway.rollout_workers.engines.base import Chunk, Engine, FinishReason, GenerationRequest
from headway.rollout_workers.health import EngineHealth, Verdict

from .recorder import EngineOutputError, Recorder

log = logging.getLogger(__name__)


PAUSE_S = 0.1
"""Seconds to wait after a request that was interrupted before a new token: the engine may be busy with the cause."""
MOST_EMPTY_REQUESTS = 3000
"""Requests in a row that may be interrupted before their first token. With `PAUSE_S` they take five minutes, as long as
a swap may."""


class EngineFailedError(HeadwayError):
    """The engine failed at one request; the sample is handed back."""


def _ignore(count: int) -> None:
    """Ignore new tokens."""


async def generate(
    engine: Engine, request: GenerationRequest, recorder: Recorder, on_tokens: Callable[[int], None] = _ignore
) -> None:
    """Record one turn to its end, after the recorded tokens and those of the environment. `on_tokens` gets the number
    of tokens of every chunk.

    An error or a cancellation ends the request. Raises EngineOutputError for impossible output, and if no request gets
    as far as a token.
    """
    requests = empty = 0
    recorder.finish_reason = _ending(request, recorder, engine.max_model_len)
    while recorder.finish_reason is None:
        before = len(recorder.tokens)
        await _record(engine.generate(_rest_of(request, recorder, requests)), recorder, on_tokens)
        recorder.finish_reason = recorder.finish_reason or _ending(request, recorder, engine.max_model_len)
        requests += 1
        empty = 0 if len(recorder.tokens) > before else empty + 1
        if empty > MOST_EMPTY_REQUESTS:
            raise EngineOutputError(f"the engine interrupted {empty} requests in a row before their first token")
        if empty:
            await asyncio.sleep(PAUSE_S)


async def _record(chunks: object, recorder: Recorder, on_tokens: Callable[[int], None]) -> None:
    """Record one request's stream. Its last chunk must say how it ended."""
    reason = None
    async with aclosing(cast(AsyncGenerator[Chunk, None], chunks)) as stream:
        async for chunk in stream:
            recorder.add(chunk)
            on_tokens(len(chunk.token_ids))
            reason = chunk.finish_reason
    if reason != "interrupted":
        recorder.finished()


def request_of(lease: Lease, sampling: SamplingConfig, decoding: Decoding) -> GenerationRequest:
    """Return the request for a whole response to the lease's prompt."""
    return GenerationRequest(
        request_id=f"{lease.tid}:{lease.token}",
        prompt_tokens=lease.prompt.token_ids,
        max_new_tokens=sampling.max_new_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        stop_token_ids=list(decoding.stop_token_ids),
        seed=sample_seed(sampling.seed, lease.tid.group, lease.tid.sample),
    )


def sample_seed(seed: int | None, group: str, sample: int) -> int | None:
    """Return the seed of one sample's own random numbers, from `sampling.seed`; None: the engine draws freely."""
    return None if seed is None else zlib.crc32(f"{seed}:{group}:{sample}".encode())


def room(request: GenerationRequest, recorder: Recorder, max_model_len: int) -> int:
    """Return how many tokens the response may still get, sampled by the model or said by the environment."""
    longest = min(request.max_new_tokens, max_model_len - len(request.prompt_tokens))
    return longest - len(recorder.tokens) - len(recorder.environment_tokens)


def _ending(request: GenerationRequest, recorder: Recorder, max_model_len: int) -> FinishReason | None:
    """Return why the turn is finished, or None if it may go on. A turn without tokens may go on."""
    if not recorder.tokens or recorder.environment_tokens:
        return None
    if recorder.tokens[-1] in request.stop_token_ids:
        return "stop"
    return None if room(request, recorder, max_model_len) > 0 else "length"


def _rest_of(request: GenerationRequest, recorder: Recorder, requests: int) -> GenerationRequest:
    """Return the request for what follows the recorded tokens and the environment's, under a name of its own."""
    tokens, turn = (
        [*recorder.tokens, *recorder.environment_tokens],
        len(recorder.turns) + bool(recorder.environment_tokens),
    )
    name = ":".join([request.request_id, *([f"turn-{turn}"] if turn else []), *([str(requests)] if requests else [])])
    return msgspec.structs.replace(
        request,
        request_id=name,
        prompt_tokens=[*request.prompt_tokens, *tokens],
        max_new_tokens=request.max_new_tokens - len(tokens),
        seed=None if request.seed is None else request.seed + len(tokens),  # not the noise of the first tokens again
        experts_from=recorder.experts_from,
    )


class Throughput:
    """Counts tokens in a sliding window."""

    def __init__(self, window_s: float = 10.0, clock: Callable[[], float] = time.monotonic) -> None:
        self.total = 0
        self._window_s = window_s
        self._clock = clock
        self._began = clock()
        self._last_s = self._began
        self._counts: deque[tuple[float, int]] = deque()
        self._running, self._running_since_s = 0, self._began
        self.busy_s = 0.0
        """Seconds with requests."""
        self.slot_s = 0.0
        """The sum of these seconds over all requests."""

    def add(self, count: int) -> None:
        """Count tokens that were sampled now."""
        self.total += count
        self._last_s = self._clock()
        self._counts.append((self._last_s, count))
        self._forget()

    def expect(self) -> None:
        """The engine gets its first request now: silence counts from here."""
        self._last_s = self._clock()

    def run(self, requests: int) -> None:
        """The engine samples so many requests from now on. Callers repeat it now and then while nothing changes."""
        now = self._clock()
        seconds, self._running_since_s = now - self._running_since_s, now
        self.busy_s += seconds if self._running else 0.0
        self.slot_s += seconds * self._running
        self._running = requests

    def silent_s(self) -> float:
        """Return the seconds since the last token, or since `expect`."""
        return self._clock() - self._last_s

    def per_second(self) -> float:
        """Return tokens per second; 0 if none were counted within the window. Any thread may call it: it looks at a
        copy and forgets nothing."""
        horizon = self._clock() - self._window_s
        seconds = min(self._window_s, self._clock() - self._began)
        counted = sum(count for at, count in tuple(self._counts) if at >= horizon)
        return counted / seconds if seconds > 0 else 0.0

    def _forget(self) -> None:
        horizon = self._last_s - self._window_s
        while self._counts and self._counts[0][0] < horizon:
            self._counts.popleft()


class MonitoredEngine:
    """Generates turns with one engine, of training and of evaluation alike."""

    def __init__(
        self,
        engine: Engine,
        health: EngineHealth,
        may_sample: Callable[[], bool],
        on_verdict: Callable[[Verdict | None], None],
    ) -> None:
        """`may_sample`: whether the engine may sample now, or swaps or sleeps. `on_verdict` gets what the rules say
        after every failure and every look."""
        self._engine = engine
        self._health = health
        self._may_sample = may_sample
        self._on_verdict = on_verdict
        self._requests = 0
        self.generated = Throughput()

    @property
    def max_model_len(self) -> int:
        return self._engine.max_model_len

    @property
    def sampling_now(self) -> int:
        """Requests that the engine has and may sample for."""
        return self._requests if self._may_sample() else 0

    @property
    def silent_s(self) -> float:
        """Seconds since the last token, while the engine has requests and may sample."""
        return self.generated.silent_s() if self.sampling_now else 0.0

    @property
    def last_error(self) -> str:
        return self._health.last_error

    async def generate(
        self, request: GenerationRequest, recorder: Recorder, on_tokens: Callable[[], None] | None = None
    ) -> None:
        """Generate one turn. Raises EngineFailedError, and the errors of the segments that `on_tokens` leads to."""

        def note(count: int) -> None:
            self.generated.add(count)
            if on_tokens is not None:
                on_tokens()

        if not self._requests:
            self.generated.expect()
        self._count(1)
        try:
            await generate(self._engine, request, recorder, note)
        except (BrokerError, FrameError):  # of the segments
            raise
        except Exception as error:
            log.exception("the engine failed at %s", request.request_id)
            self._on_verdict(self._health.failed(error))
            raise EngineFailedError(self._health.last_error) from error
        finally:
            self._count(-1)

    def check_health(self) -> None:
        """Compare with the last look, to see an engine that hangs. The worker calls it with every heartbeat."""
        self.generated.run(self.sampling_now)
        self._on_verdict(self._health.check(self.sampling_now, self.generated.total))

    def _count(self, change: int) -> None:
        self._requests += change
        self.generated.run(self.sampling_now)
