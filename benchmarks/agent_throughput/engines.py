"""Engines that are measured: one that is simulated, and a real one with a model's own weights."""

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any, cast

import msgspec

from headway.broker.schema import WeightVersion
from headway.broker.schema.weights import Probe, WeightManifest
from headway.rollout_workers.config import EngineConfig
from headway.rollout_workers.engines import open_engine
from headway.rollout_workers.engines.base import Chunk, GenerationRequest

CALL = '<tool_call>\n{"name": "look_up", "arguments": {"key": "A-1207", "limit": 3}}\n</tool_call><|im_end|>'
WORDS = " I look it up."


class EngineOrder(msgspec.Struct, frozen=True, kw_only=True):
    """An engine to open."""

    kind: str
    """simulated, or a kind of Headway's."""
    model: str
    places: int
    """Requests that it runs at a time."""
    step_s: float = 0.02
    """Of a simulated one: the time in which each running request gets a token."""
    device: str = "cpu"
    max_model_len: int = 8192
    memory: float = 0.6
    """The share of a GPU's memory that vLLM takes."""
    options: dict[str, Any] = {}


class SimulatedEngine:
    """Samples a call of a tool behind a few words, a token each step for every request that has a place."""

    max_model_len = 1 << 20

    def __init__(self, order: EngineOrder) -> None:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(order.model)
        self.capacity = order.places
        self._places, self._step_s = asyncio.Semaphore(order.places), order.step_s
        self._call, self._words = (tokenizer(text, add_special_tokens=False).input_ids for text in (CALL, WORDS))
        self._drawn = random.Random(0)
        self.version = WeightVersion(1, 0)

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Chunk]:
        """See Engine. All tokens come at the end, so that the simulation costs little."""
        async with self._places:
            tokens = [*self._words * self._drawn.randrange(8), *self._call][-request.max_new_tokens :]
            await asyncio.sleep(len(tokens) * self._step_s)
        yield Chunk(token_ids=tokens, logprobs=[-0.5] * len(tokens), version=self.version, finish_reason="stop")

    async def swap_weights(self, version: WeightVersion, tensors: Any, **_: Any) -> None:
        """See Engine."""
        self.version = version

    async def close(self) -> None:
        """See Engine."""


async def opened(order: EngineOrder, version: WeightVersion) -> Any:
    """Open an engine with a model's own weights, as this version."""
    if order.kind == "simulated":
        return SimulatedEngine(order)
    import torch
    from transformers import AutoModelForCausalLM

    is_on_gpu = order.device != "cpu"
    options = {"gpu_memory_utilization": order.memory} if is_on_gpu and order.kind == "vllm" else {}
    config = EngineConfig(
        kind=order.kind,
        max_concurrent=order.places,
        max_model_len=order.max_model_len,
        dtype="bfloat16" if is_on_gpu else "float32",
        device=order.device,
        options={**options, **order.options},
    )
    engine = open_engine(config, Path(order.model), seed=0)
    dtype = torch.bfloat16 if is_on_gpu else torch.float32
    model = AutoModelForCausalLM.from_pretrained(order.model, dtype=dtype)
    await engine.swap_weights(version, [(name, one.detach()) for name, one in model.named_parameters()])
    return engine


class CountedEngine:
    """An engine that outlives workers, and counts what they have it do."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.capacity, self.max_model_len = engine.capacity, engine.max_model_len
        self.tokens = self.requests = self._running = 0
        self._asked_s = self._full_s = 0.0
        self._since_s = time.monotonic()

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Chunk]:
        """See Engine."""
        self._note(1)
        self.requests += 1
        try:
            async with aclosing(cast(Any, self._engine.generate(request))) as chunks:
                async for chunk in chunks:
                    self.tokens += len(chunk.token_ids)
                    yield chunk
        finally:
            self._note(-1)

    def figures(self) -> dict[str, float]:
        """Return sums since the beginning: of tokens and requests, and of seconds times requests, all that it had and
        those that had a place."""
        self._note(0)
        return {
            "tokens": self.tokens,
            "requests": self.requests,
            "asked": self._asked_s,
            "running": self._full_s,
        }

    def _note(self, change: int) -> None:
        now = time.monotonic()
        self._asked_s += (now - self._since_s) * self._running
        self._full_s += (now - self._since_s) * min(self._running, self.capacity)
        self._since_s, self._running = now, self._running + change

    async def swap_weights(self, version: WeightVersion, tensors: Any, **_: Any) -> None:
        """Do nothing: the engine has its weights."""

    async def close(self) -> None:
        """Do nothing: another worker goes on with it."""


class OneVersion:
    """A subscriber that delivers one version."""

    def __init__(self, manifest: WeightManifest) -> None:
        self.epoch, self.joins_groups, self.is_arriving, self.last_error = 0, False, False, ""
        self.manifest = manifest
        self.tensors: list[Any] = []
        self.is_verified = True
        self._is_delivered = False

    async def wait_for_version(self, current: WeightVersion | None) -> Any:
        """Return the version once, and nothing more."""
        if self._is_delivered:
            await asyncio.Event().wait()
        self._is_delivered = True
        return self

    def newer(self) -> None:
        """Return that there is none."""

    async def close(self) -> None:
        """Do nothing."""


def manifest_of(version: WeightVersion) -> WeightManifest:
    """Return the manifest of a version that nobody is to fetch."""
    return WeightManifest(
        version=version,
        tensors=(),
        buckets=(),
        probe=Probe(token_ids=[1, 2], logprobs=[-1.0], tolerance=1e-4),
        group_epoch=0,
        pull_url="http://127.0.0.1:1",
        pull_token="none",
        fingerprints=(),
    )
