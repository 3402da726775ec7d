"""The parts of a whole loop: a learner moved by hand, and a subscriber that delivers the test's versions."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from transformers import PreTrainedModel

from headway.broker.client.broker import Broker
from headway.broker.client.learner import CheckpointMark, TakenBatch
from headway.broker.schema import Group, Owner, Prompt, RunRules, TrajectoryId, WeightVersion
from headway.broker.schema.weights import Probe, TensorSpec, WeightManifest
from headway.rollout_workers.config import EngineConfig, EvalConfig, SamplingConfig, WorkersConfig
from headway.rollout_workers.decoding import Decoding
from headway.rollout_workers.engines import open_engine
from headway.rollout_workers.engines.base import NamedTensors
from headway.rollout_workers.environments import SingleTurn
from headway.rollout_workers.rewards.base import Score
from headway.rollout_workers.samples.episode import Episodes
from headway.rollout_workers.samples.leased_samples import WorkerContext
from headway.rollout_workers.samples.teacher_client import TeacherClient
from headway.rollout_workers.worker import EXIT_STEP_S, Worker
from headway.weightsync.config import WeightsConfig
from headway.weightsync.publisher import PublishReport
from headway.weightsync.tensors.fingerprint import fingerprint

from .models import Architecture, forward_logprobs, make_model, named_tensors, save_config

HANGS_AFTER_S = 240.0
"""Seconds after which a wait is given up, however busy the machine is; pytest gives the whole test up soon after."""
CAPACITY = 4
GROUP_SIZE = 2
PROBE = [3, 14, 15, 9, 2, 6]
LONG = 240
"""Tokens of a response that lasts longer than the test's changes to its worker."""
LONGER = 900
"""Tokens of a response so long that a swap begins in it on the busiest machine."""


class Delivery(NamedTuple):
    """A version as a subscriber delivers it."""

    manifest: WeightManifest
    tensors: list[tuple[str, torch.Tensor]]


class Deliveries:
    """A subscriber that yields the test's deliveries."""

    def __init__(self) -> None:
        self.epoch = 0
        self.joins_groups = True
        self.is_arriving = False
        self.last_error = ""
        self.queue: asyncio.Queue[Delivery] = asyncio.Queue()

    async def wait_for_version(self, current: WeightVersion | None) -> Delivery:
        return await self.queue.get()

    def newer(self) -> Delivery | None:
        newest = None
        while not self.queue.empty():
            newest = self.queue.get_nowait()
        return newest

    async def close(self) -> None:
        """There is nothing to free."""


class OneReward:
    """A reward of 1 for every response."""

    async def score(self, prompt: Prompt, response: str, finish_reason: str, tokens: object = ()) -> Score:
        return Score(total=1.0, components={"one": 1.0})

    async def close(self) -> None:
        """There is nothing to free."""


async def until_a_group_forms(publish: Callable[[int], Awaitable[PublishReport]]) -> tuple[int, tuple[str, ...]]:
    """Publish versions of steps 1, 2, ... until workers receive one by broadcast. Return its step and their names."""
    step = 0
    async with asyncio.timeout(HANGS_AFTER_S):
        while True:
            step += 1
            members = (await publish(step)).members
            await asyncio.sleep(0.2)
            if members:
                return step, members


def manifest(version: WeightVersion, probe: Probe, tensors: NamedTensors) -> WeightManifest:
    """Return the manifest of weights that no worker needs to receive."""
    specs = tuple(TensorSpec(name, "float32", tuple(tensor.shape), 0, 0, tensor.nbytes) for name, tensor in tensors)
    return WeightManifest(
        version=version,
        tensors=specs,
        buckets=(),
        probe=probe,
        group_epoch=0,
        pull_url="",
        pull_token="",
        fingerprints=tuple(fingerprint(tensor) for _, tensor in tensors),
    )


def delivery(version: WeightVersion, model: PreTrainedModel, *, error: float = 0.0) -> Delivery:
    """Make a delivery; `error` is added to the probe's logprobs."""
    logprobs = forward_logprobs(model, PROBE[:1], PROBE[1:]) + error
    probe = Probe(token_ids=PROBE, logprobs=logprobs.tolist(), tolerance=1e-3)
    tensors = named_tensors(model)
    return Delivery(manifest(version, probe, tensors), tensors)


def prompts(count: int) -> list[Prompt]:
    return [
        Prompt(
            group=f"0000-{i:08d}",
            token_ids=[2 + i % 50, 7, 11],
            text=f"prompt {i}",
            ground_truth="",
            data_source="test",
            num_samples=GROUP_SIZE,
        )
        for i in range(count)
    ]


class Learner:
    """The other side of the broker, moved by hand. Weights of step k: the random model with seed k."""

    broker: Broker
    owner: Owner
    groups_per_step: int
    pinned: dict[int, tuple[TrajectoryId, ...]]
    announced: WeightVersion | None
    models: dict[WeightVersion, PreTrainedModel]
    architecture: Architecture

    @classmethod
    async def start(
        cls, broker: Broker, *, groups: int, max_lag: int = 8, architecture: Architecture = "dense"
    ) -> Self:
        """Claim the run and feed it."""
        self = cls()
        self.broker = broker
        self.groups_per_step = 2
        rules = RunRules(
            max_lag=max_lag,
            groups_per_step=self.groups_per_step,
            on_straggler="wait",
            on_over_bound="requeue",
            max_bytes=1 << 28,
            scorers="quality teacher",
        )
        claim = await broker.batches.claim(checkpoint=CheckpointMark(0, 0), rules=rules, config=b"", resume=False)
        self.owner = claim.owner
        self.pinned = {}
        self.announced = None
        self.models = {}
        self.architecture = architecture
        await self.feed(groups)
        return self

    async def feed(self, groups: int) -> None:
        await self.broker.prompts.feed(prompts(groups), self.owner)
        await self.broker.prompts.close_feed(self.owner)

    def version(self, step: int) -> WeightVersion:
        return WeightVersion(self.owner.incarnation, step)

    async def publish(self, step: int, *workers: Deliveries, error: float = 0.0) -> None:
        """Announce a version and deliver it."""
        version = self.version(step)
        model = self.models.setdefault(version, make_model(self.architecture, step))
        sent = delivery(version, model, error=error)
        await self.broker.versions.announce(self.owner, sent.manifest)
        self.announced = version
        for worker in workers:
            worker.queue.put_nowait(sent)

    async def take(self, step: int) -> tuple[Group, ...]:
        """Wait for a step's batch."""
        async with asyncio.timeout(HANGS_AFTER_S):
            while True:
                batch = await self.broker.batches.take(self.owner, step, self.groups_per_step)
                if isinstance(batch, TakenBatch):
                    self.pinned[step] = tuple(t.tid for group in batch.groups for t in group.trajectories)
                    return batch.groups
                await asyncio.sleep(0.02)

    async def reassert(self, groups: int) -> None:
        """Adopt a restarted server."""
        await self.broker.batches.reassert(
            self.owner, announced=self.announced, committed_groups=(), pinned=self.pinned
        )
        await self.feed(groups)


def make_engine(
    directory: Path, capacity: int = CAPACITY, max_model_len: int = 256, architecture: Architecture = "dense"
) -> Any:
    """Open the embedded engine on one of the tests' small models, still without weights."""
    config = EngineConfig(max_concurrent=capacity, max_model_len=max_model_len)
    return open_engine(config, save_config(make_model(architecture, 0), directory / "model"), seed=0)


def decoding(stop_token_ids: Sequence[int]) -> Decoding:
    """Return a decoding whose texts are token ids, with spaces between."""
    return Decoding(
        lambda tokens: " ".join(map(str, tokens)),
        tuple(stop_token_ids),
        lambda text, after: [int(token) for token in text.split()],
    )


def make_worker(
    broker: Broker,
    engine: Any,
    subscriber: Any,
    *,
    name: str = "worker-1",
    reward: Any = None,
    environment: Any = None,
    player: Any = None,
    max_new_tokens: int = 16,
    lease_ttl_s: float = 1000.0,
    heartbeat_s: float = 0.05,
    patience_s: float = 60.0,
    segment_tokens: int = 16,
    stall_s: float = 600.0,
    on_unhealthy: Callable[[], object] = lambda: None,
    stop_token_ids: Sequence[int] = (),
    records_experts: bool = False,
    is_colocated: bool = False,
    weights: WeightsConfig | None = None,
    evaluation: EvalConfig | None = None,
    teacher: TeacherClient | None = None,
    under_way: int = 0,
    exit_step_s: float = EXIT_STEP_S,
) -> Worker:
    """Make a worker without stop tokens, so that every response has exactly `max_new_tokens`."""
    context = WorkerContext(
        worker=name,
        engine_kind="embedded",
        lease_ttl_s=lease_ttl_s,
        decoding=decoding(stop_token_ids),
        sampling=SamplingConfig(max_new_tokens=max_new_tokens),
        config=WorkersConfig(
            heartbeat_s=heartbeat_s, patience_s=patience_s, segment_tokens=segment_tokens, stall_s=stall_s
        ),
        weights=weights or WeightsConfig(),
        records_experts=records_experts,
        is_colocated=is_colocated,
        evaluation=evaluation or EvalConfig(),
        under_way=under_way,
    )
    return Worker(
        context,
        broker=broker,
        engine=engine,
        subscriber=subscriber,
        player=player or Episodes(environment or SingleTurn(), reward or OneReward(), decoding(stop_token_ids)),
        teacher=teacher,
        on_unhealthy=on_unhealthy,
        exit_step_s=exit_step_s,
    )


async def until(claim: Callable[[], bool]) -> None:
    async with asyncio.timeout(HANGS_AFTER_S):
        while not claim():  # noqa: ASYNC110 - watches parts that announce nothing
            await asyncio.sleep(0.01)


@asynccontextmanager
async def running(worker: Worker) -> AsyncIterator[asyncio.Task[str]]:
    """Run the worker, and drain it at the end if it still runs then."""
    task = asyncio.create_task(worker.run())
    try:
        yield task
    finally:
        worker.request_drain()
        await asyncio.wait([task])
