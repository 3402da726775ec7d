"""Continuous batching on any transformers causal LM, in a thread of this process; it needs no further package.

One thread decodes, and takes commands (add, cancel, swap, score) between two forwards. It streams samples to the event
loop a few tokens at a time: waking every reader after every token would cost more than a step.

Headway has this engine for its exactness: transformers' continuous batching keeps stale keys over a weight swap and
cannot say where in a sample the swap fell.
"""

import asyncio
import contextlib
import functools
import queue
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from headway.broker.errors import HeadwayError, WeightSyncError
from headway.broker.schema import WeightVersion
from headway.rollout_workers.config import EngineConfig
from headway.rollout_workers.engines.abilities import REQUESTS
from headway.rollout_workers.engines.base import (
    Check,
    Chunk,
    EngineOptionsError,
    GenerationRequest,
    NamedTensors,
    Parts,
    usable_device,
)
from headway.rollout_workers.engines.weight_loading.engine_adapters import check_adapter
from headway.rollout_workers.engines.weight_loading.named_tensors import Filling, fill, held_tensors

from .decoder import Decoder, Sample, Sampler
from .model_layers import EXPERTS, Adapter
from .slot_cache import ATTENTION

T = TypeVar("T")

FLUSH_S = 0.02
"""Seconds that a token may wait for others; the last token of a sample does not wait."""
DEADLINE_S = 300.0
"""Seconds for the thread to answer: a device may hang instead of failing."""
CLOSE_S = 20.0
"""Seconds for the thread to end; a thread that has not ended by then is abandoned."""


@dataclass(eq=False)
class Stream:
    """One sample on its way to its reader. The engine's thread owns the sample; the reader's event loop owns the
    queue."""

    sample: Sample
    loop: asyncio.AbstractEventLoop
    chunks: asyncio.Queue[Chunk | HeadwayError] = field(default_factory=asyncio.Queue)
    sent: int = 0
    """Generated tokens that the reader was sent."""

    @property
    def has_more(self) -> bool:
        return len(self.sample.logprobs) > self.sent

    def chunk(self, version: WeightVersion) -> Chunk:
        """Return a chunk of the tokens since the last chunk."""
        sample, first = self.sample, self.sent
        self.sent = len(sample.logprobs)
        experts, sample.experts = sample.experts, []
        return Chunk(
            token_ids=sample.tokens[len(sample.tokens) - self.sent + first :],
            logprobs=sample.logprobs[first:],
            version=version,
            experts=np.concatenate(experts) if experts else None,
            finish_reason=sample.finish_reason,
        )


class EmbeddedEngine:
    """Runs a transformers model as an engine. With `version` None it has only the weights' shapes."""

    def __init__(
        self, model: nn.Module, config: EngineConfig, *, seed: int, version: WeightVersion | None = None
    ) -> None:
        self.capacity = config.max_concurrent or REQUESTS
        self.max_model_len = config.max_model_len
        self._threads = config.threads
        self._vocabulary = model.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
        device = usable_device(config.device, "engine.device")
        model = model.to(device).eval().requires_grad_(False)
        self._decoder = Decoder(model, self.capacity, self.max_model_len, Sampler(seed, device), device, version)
        self._adapter = Adapter(model)
        self._base_is_new = False
        """No adapter over these weights has been used yet: whatever is cached is of other ones."""
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._queued: deque[Stream] = deque()
        self._streams: dict[Sample, Stream] = {}
        self._asked: set[Future[Any]] = set()
        self._flushed = time.monotonic()
        self._is_paused = False
        self._lock = threading.Lock()
        self._ended: HeadwayError | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="headway-engine", daemon=True)
        self._thread.start()

    def check_attention(self) -> None:
        """Raise EngineOptionsError for a model that this engine would compute wrongly. To be called before anything is
        asked of it: its thread waits."""
        self._decoder.check_attention()

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Chunk]:
        """See Engine."""
        self._check(request.prompt_tokens, self.max_model_len - 1)
        if self._decoder.version is None:
            raise HeadwayError("this engine has no weights yet: call swap_weights first")
        if request.experts_from is not None and self._decoder.router_tap.is_dense:
            raise HeadwayError("this model has no experts that routers choose: set algorithm.router_replay=false")
        limit = min(len(request.prompt_tokens) + request.max_new_tokens, self.max_model_len)
        sample = Sample(request, limit, list(request.prompt_tokens))
        stream = Stream(sample, asyncio.get_running_loop())
        self._post(lambda: self._queued.append(stream))
        try:
            while True:
                chunk = await stream.chunks.get()
                if isinstance(chunk, HeadwayError):
                    raise chunk
                yield chunk
                if chunk.finish_reason:
                    return
        finally:
            with contextlib.suppress(HeadwayError):  # an engine that has ended holds no place
                self._post(lambda: self._forget(stream))

    async def swap_weights(
        self,
        version: WeightVersion,
        tensors: NamedTensors,
        *,
        keep_cache: bool = False,
        check: Check | None = None,
    ) -> None:
        """See Engine."""
        await self._ask(lambda: self._swap(version, tensors, keep_cache, check))

    async def load_base(self, tensors: NamedTensors, *, check: Check | None = None) -> None:
        """See AdaptedEngine."""
        await self._ask(lambda: self._load_base(tensors, check))

    async def swap_adapter(
        self,
        version: WeightVersion,
        tensors: NamedTensors,
        scale: float,
        *,
        keep_cache: bool = False,
        check: Check | None = None,
    ) -> None:
        """See AdaptedEngine."""
        await self._ask(lambda: self._swap_adapter(version, tensors, scale, keep_cache, check))

    async def swap_in_parts(
        self, version: WeightVersion, parts: Parts, *, keep_cache: bool = False, check: Check | None = None
    ) -> None:
        """See Engine."""
        filling = Filling(self._decoder.model)
        async for part in parts:
            await self._ask(functools.partial(self._load_part, filling, part))
        await self._ask(lambda: self._finish_swap(version, filling, keep_cache, check))

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """See Engine."""
        self._check(token_ids, self.max_model_len)
        return await self._ask(lambda: self._decoder.score(token_ids))

    async def score_base(self, token_ids: Sequence[int]) -> list[float]:
        """See AdaptedEngine."""
        self._check(token_ids, self.max_model_len)
        return await self._ask(lambda: self._score_base(token_ids))

    async def sleep(self) -> None:
        """See Engine."""
        await self._ask(self._decoder.sleep)

    async def wake(self) -> None:
        """See Engine."""
        await self._ask(self._decoder.wake)

    async def close(self) -> None:
        """See Engine."""
        with contextlib.suppress(HeadwayError):
            self._post(self._stop)
        await asyncio.to_thread(self._thread.join, CLOSE_S)

    def _check(self, token_ids: Sequence[int], longest: int) -> None:
        if not 1 <= len(token_ids) <= longest:
            raise HeadwayError(
                f"{len(token_ids)} tokens, but engine.max_model_len={self.max_model_len} allows 1 to {longest}"
            )
        if min(token_ids) < 0 or max(token_ids) >= self._vocabulary:
            raise HeadwayError(f"token ids must lie in [0, {self._vocabulary}): another model's tokenizer?")

    def _post(self, command: Callable[[], None]) -> None:
        """Have the engine's thread run this between two forwards."""
        with self._lock:
            if self._ended:
                raise self._ended
            self._commands.put(command)

    async def _ask(self, question: Callable[[], T]) -> T:
        answer: Future[T] = Future()

        def command() -> None:
            if self._ended:  # `_end` has told every caller
                return
            try:
                answer.set_result(question())
            except WeightSyncError as error:
                answer.set_exception(error)

        with self._lock:
            self._asked.add(answer)
        answer.add_done_callback(self._asked.discard)
        self._post(command)
        try:
            async with asyncio.timeout(DEADLINE_S):
                return await asyncio.shield(asyncio.wrap_future(answer))
        except TimeoutError as error:
            raise WeightSyncError(
                f"the embedded engine gave no answer within {DEADLINE_S:g} s; restart the worker"
            ) from error

    # Everything below runs in the engine's thread.

    def _run(self) -> None:
        torch.set_num_threads(self._threads)
        try:
            while not self._closing:
                self._advance()
            self._end(HeadwayError("the engine was closed"))
        except Exception as error:  # noqa: BLE001 - whatever ends this thread must reach its callers
            self._end(HeadwayError(f"the embedded engine stopped: {type(error).__name__}: {error}"))

    def _advance(self) -> None:
        """Run the waiting commands, then one forward."""
        idle = self._is_paused or not (self._decoder.running or self._queued)
        if idle:
            self._commands.get()()
        while not self._commands.empty():
            self._commands.get()()
        while self._queued and len(self._decoder.running) < self.capacity:
            stream = self._queued.popleft()
            self._streams[stream.sample] = stream
            self._decoder.add(stream.sample)
        if self._decoder.running and not (self._is_paused or self._closing):
            self._deliver(self._decoder.step())

    def _deliver(self, finished: Sequence[Sample]) -> None:
        self._send([self._streams.pop(sample) for sample in finished])
        if time.monotonic() - self._flushed > FLUSH_S:
            self._flush()

    def _flush(self) -> None:
        """Send the new tokens of the samples that go on."""
        self._send([stream for stream in self._streams.values() if stream.has_more])
        self._flushed = time.monotonic()

    def _send(self, streams: Sequence[Stream]) -> None:
        """Send chunks with one call into each reader's event loop, however many chunks there are."""
        version = self._decoder.version
        assert version is not None
        ready: dict[asyncio.AbstractEventLoop, list[tuple[Stream, Chunk | HeadwayError]]] = {}
        for stream in streams:
            ready.setdefault(stream.loop, []).append((stream, stream.chunk(version)))
        for loop, chunks in ready.items():
            call_in(loop, chunks)

    def _swap(self, version: WeightVersion, tensors: NamedTensors, keep_cache: bool, check: Check | None) -> None:
        filling = Filling(self._decoder.model)
        places = filling.places(tensors)
        filling.check_whole()  # before anything is changed
        self._overwrite(places)
        self._adapter.drop()
        self._finish_swap(version, filling, keep_cache and not self._base_is_new, check)
        self._base_is_new = False

    def _load_base(self, tensors: NamedTensors, check: Check | None) -> None:
        filling = Filling(self._decoder.model)
        places = filling.places(tensors)
        filling.check_whole()
        self._base_is_new = True
        self._overwrite(places)
        if check is not None:
            check(held_tensors(self._decoder.model, filling.published))

    def _swap_adapter(
        self, version: WeightVersion, tensors: NamedTensors, scale: float, keep_cache: bool, check: Check | None
    ) -> None:
        check_adapter(self._adapter.modules, tensors)  # before anything is changed
        self._overwrite(())
        self._adapter.fill(tensors, scale)
        self._decoder.changed(version, keep_cache=keep_cache and not self._base_is_new)
        self._base_is_new = False
        if check is not None:
            check(self._adapter.held(tensors))
        self._is_paused = False

    def _score_base(self, token_ids: Sequence[int]) -> list[float]:
        with self._adapter.left_out():
            return self._decoder.score(token_ids)

    def _load_part(self, filling: Filling, part: NamedTensors) -> None:
        self._overwrite(filling.places(part))

    def _overwrite(self, places: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        if self._streams:
            self._flush()  # tokens noted until now are of the old version
        self._is_paused = True
        fill(places)

    def _finish_swap(self, version: WeightVersion, filling: Filling, keep_cache: bool, check: Check | None) -> None:
        filling.check_whole()
        self._decoder.changed(version, keep_cache=keep_cache)
        if check is not None:
            check(held_tensors(self._decoder.model, filling.published))
        self._is_paused = False

    def _forget(self, stream: Stream) -> None:
        if self._streams.pop(stream.sample, None):
            self._decoder.drop(stream.sample)
        elif stream in self._queued:
            self._queued.remove(stream)

    def _stop(self) -> None:
        self._closing = True

    def _end(self, reason: HeadwayError) -> None:
        """Take no more commands, and raise `reason` in every caller that waits."""
        with self._lock:
            self._ended = reason
            asked = list(self._asked)
        while not self._commands.empty():
            self._commands.get()()
        for stream in [*self._streams.values(), *self._queued]:
            call_in(stream.loop, [(stream, reason)])
        for answer in asked:
            if not answer.done():
                answer.set_exception(reason)


def call_in(loop: asyncio.AbstractEventLoop, chunks: Sequence[tuple[Stream, Chunk | HeadwayError]]) -> None:
    """Put the chunks into their queues from another thread."""

    def put() -> None:
        for stream, chunk in chunks:
            stream.chunks.put_nowait(chunk)

    with contextlib.suppress(RuntimeError):  # the loop is closed: its readers are gone
        loop.call_soon_threadsafe(put)


def open_embedded(config: EngineConfig, model_dir: Path, *, seed: int) -> EmbeddedEngine:
    """Build the model that `model_dir` describes. Weights in that directory are loaded as version 0.0."""
    settings = {
        "dtype": getattr(torch, config.dtype),
        "attn_implementation": ATTENTION,
        "experts_implementation": EXPERTS,
    }
    architecture = AutoConfig.from_pretrained(model_dir, trust_remote_code=False)
    if set(getattr(architecture, "layer_types", None) or ()) - {"full_attention"}:
        raise EngineOptionsError(
            f"the embedded engine runs full attention only, {architecture.model_type} has other layers; "
            "use engine.kind=vllm"
        )
    with torch.random.fork_rng(devices=[]), _fitting(architecture.model_type):
        # Forked, since an evaluation must not disturb a learner that resumes bit for bit.
        if any(Path(model_dir).glob("*.safetensors")):
            model = AutoModelForCausalLM.from_pretrained(model_dir, **settings)
            engine = EmbeddedEngine(model, config, seed=seed, version=WeightVersion(0, 0))
        else:
            model = AutoModelForCausalLM.from_config(architecture, **settings)
            engine = EmbeddedEngine(model, config, seed=seed)
        engine.check_attention()
        return engine


@contextlib.contextmanager
def _fitting(model_type: str) -> Iterator[None]:
    """Turn errors of a model that was not made for this engine into an EngineOptionsError."""
    try:
        yield
    except (TypeError, KeyError, AttributeError, IndexError, NotImplementedError) as error:
        raise EngineOptionsError(
            f"the embedded engine does not support {model_type} ({type(error).__name__}: {error}). Set"
            " engine.kind=vllm."
        ) from error
