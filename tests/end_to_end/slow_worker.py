# mypy: disable-error-code="arg-type"
"""A worker as a process of its own, with a slow engine whose tokens name the worker that sampled them."""

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence

from headway.broker.client.broker import open_broker
from headway.broker.schema import Prompt, WeightVersion
from headway.broker.schema.weights import Probe, WeightManifest
from headway.rollout_workers.config import SamplingConfig, WorkersConfig
from headway.rollout_workers.decoding import Decoding
from headway.rollout_workers.engines.base import Chunk, GenerationRequest, NamedTensors
from headway.rollout_workers.environments import SingleTurn
from headway.rollout_workers.rewards.base import Score
from headway.rollout_workers.samples.episode import Episodes
from headway.rollout_workers.samples.leased_samples import WorkerContext
from headway.rollout_workers.worker import Worker
from headway.weightsync.config import WeightsConfig
from headway.weightsync.deliveries import BufferSet, Delivery

VERSION = WeightVersion(1, 0)
PROMPT_TOKENS = [3, 1, 4]
LENGTH = 100
"""The number of tokens of every response."""
TOKEN_S = 0.02
LEASE_TTL_S = 1.0


class SlowEngine:
    """An engine whose token at position p of a response is `base + p`."""

    capacity = 2
    max_model_len = 1000

    def __init__(self, base: int) -> None:
        self._base = base

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Chunk]:
        start = len(request.prompt_tokens) - len(PROMPT_TOKENS)
        for position in range(start, start + request.max_new_tokens):
            await asyncio.sleep(TOKEN_S)
            token = self._base + position
            yield Chunk(
                token_ids=[token],
                logprobs=[logprob_of(token)],
                version=VERSION,
                finish_reason="length" if position + 1 == start + request.max_new_tokens else None,
            )

    async def swap_weights(self, version: WeightVersion, tensors: NamedTensors, **how: object) -> None:
        assert version == VERSION

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        raise AssertionError("no test probes this engine")

    async def close(self) -> None:
        """There is nothing to free."""


class OneVersion:
    """A subscriber that delivers the first weights and no others."""

    epoch = 0
    joins_groups = True
    is_arriving = False
    last_error = ""

    async def wait_for_version(self, current: WeightVersion | None) -> Delivery:
        if current is not None:
            await asyncio.Event().wait()
        return Delivery(manifest(), BufferSet(()), may_be_reused=True)

    def newer(self) -> None:
        """There is no other."""

    async def close(self) -> None:
        """There is nothing to free."""


class OneReward:
    """A reward of 1 for every response."""

    async def score(self, prompt: Prompt, response: str, finish_reason: str, tokens: object = ()) -> Score:
        return Score(total=1.0)

    async def close(self) -> None:
        """There is nothing to free."""


def manifest() -> WeightManifest:
    """Return the manifest of weights that no worker needs to receive."""
    probe = Probe(token_ids=[1], logprobs=[], tolerance=0.0)
    return WeightManifest(
        version=VERSION, tensors=(), buckets=(), probe=probe, group_epoch=0, pull_url="", pull_token="", fingerprints=()
    )


def logprob_of(token: int) -> float:
    return -token / 1024


async def work(url: str, run: str, name: str, base: int, capacity: int) -> None:
    broker = await open_broker(url, run)
    engine = SlowEngine(base)
    engine.capacity = capacity
    context = WorkerContext(
        worker=name,
        engine_kind="slow",
        lease_ttl_s=LEASE_TTL_S,
        decoding=Decoding(lambda tokens: "", (0,)),
        sampling=SamplingConfig(max_new_tokens=LENGTH),
        config=WorkersConfig(heartbeat_s=0.1, segment_tokens=4, probe_swaps=False),
        weights=WeightsConfig(),
    )
    worker = Worker(
        context,
        broker=broker,
        engine=engine,
        subscriber=OneVersion(),
        player=Episodes(SingleTurn(), OneReward(), context.decoding),
    )
    await worker.run()
    await broker.close()


if __name__ == "__main__":
    asyncio.run(work(*sys.argv[1:4], *map(int, sys.argv[4:])))
