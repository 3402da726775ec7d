"""Trajectories whose frame has a given size, and the loops of learner and worker that move them.

The learner's loop has no training: feed -> take -> announce -> commit, each step as soon as its batch is ready. The
worker's has no engine: lease -> submit, as `rollout_workers.worker` asks and waits.
"""

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
import psutil
import redis
from numpy.typing import NDArray

from headway.broker import Broker
from headway.broker.client.learner import CheckpointMark, Owner, TakenBatch
from headway.broker.client.leases import SubmitOutcome
from headway.broker.schema import Lease, Prompt, RunRules, Trajectory, TrajectoryId, VersionSpan, WeightVersion
from headway.broker.schema.weights import Probe, WeightManifest
from headway.broker.server.embedded import EmbeddedServer
from headway.broker.wire.codec import encode_trajectory

Durability = Literal["off", "everysec"]
"""The durability of the append-only file."""
GROUP_SIZE = 8
PROMPT_TOKENS, SHORT_PROMPT = 64, 4
VOCABULARY = 150_000
_VARIANTS = 16
"""The number of different responses that take turns."""
BATCH = 64
"""The trajectories of one step."""
MAX_LAG = 16
POLL_S = 0.01
_FED_AT_ONCE = 256
_MAX_BYTES = 8 << 30
TTL_S = 30.0
_VERSION_POLL_S = 0.02
_CONFIRM_S = 1.0


@contextmanager
def fresh_server(aof: Durability) -> Iterator[EmbeddedServer]:
    """Yield an empty server on a unix socket, with the embedded server's own configuration."""
    with (
        tempfile.TemporaryDirectory(prefix="headway-") as directory,
        EmbeddedServer(Path(directory), maxmemory_bytes=_MAX_BYTES) as server,
    ):
        if aof == "off":
            with redis.Redis.from_url(server.url) as client:
                client.config_set("appendonly", "no")
        yield server


def cpu_seconds(pid: int) -> float:
    """Return the user and system time of the process."""
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def tid_of(number: int) -> TrajectoryId:
    """Return the id of trajectory `number`: eight to a group."""
    return TrajectoryId(f"0000-{number // GROUP_SIZE:08d}", 0, number % GROUP_SIZE)


def number_of(tid: TrajectoryId) -> int:
    return int(tid.group.partition("-")[2]) * GROUP_SIZE + tid.sample


def prompt(position: int, num_samples: int = GROUP_SIZE, tokens: int = PROMPT_TOKENS) -> Prompt:
    return Prompt(
        group=f"0000-{position:08d}",
        token_ids=_prompt_tokens(tokens),
        text="How many are they?",
        ground_truth="42",
        data_source="benchmark",
        num_samples=num_samples,
    )


@cache
def _prompt_tokens(count: int) -> list[int]:
    tokens: list[int] = _tokens(np.random.default_rng(0), count).tolist()
    return tokens


@dataclass(frozen=True)
class Payloads:
    """Trajectories made of a few prepared responses, as `payloads[number]`."""

    variants: tuple[Trajectory, ...]

    def __getitem__(self, number: int) -> Trajectory:
        return self.named(tid_of(number))

    def named(self, tid: TrajectoryId) -> Trajectory:
        """Return the trajectory with this id."""
        return msgspec.structs.replace(self.variants[number_of(tid) % len(self.variants)], tid=tid)

    @property
    def frame_bytes(self) -> float:
        """Return the mean size of the frames."""
        return sum(len(encode_trajectory(variant)) for variant in self.variants) / len(self.variants)


@cache
def payloads_of(frame_bytes: int, prompt_tokens: int = PROMPT_TOKENS) -> Payloads:
    """Return trajectories with frames of so many bytes, to within two per cent or one token."""
    low, high = 1, frame_bytes
    while low < high:
        middle = (low + high) // 2
        if len(encode_trajectory(_trajectory(0, middle, prompt_tokens))) < frame_bytes:
            low = middle + 1
        else:
            high = middle
    return Payloads(tuple(_trajectory(seed, low, prompt_tokens) for seed in range(_VARIANTS)))


def _trajectory(seed: int, response_tokens: int, prompt_tokens: int) -> Trajectory:
    rng = np.random.default_rng(seed)
    return Trajectory(
        tid=tid_of(0),
        prompt_tokens=np.array(_prompt_tokens(prompt_tokens), np.int32),
        response_tokens=_tokens(rng, response_tokens),
        behavior_logprobs=-rng.exponential(0.5, response_tokens).astype(np.float32),
        loss_mask=np.ones(response_tokens, np.uint8),
        spans=(VersionSpan(0, response_tokens, WeightVersion(1, 0)),),
        reward=1.0,
        rewards={"exact": 1.0},
        finish_reason="stop",
        worker="benchmark",
    )


def _tokens(rng: np.random.Generator, count: int) -> NDArray[np.int32]:
    """Draw tokens log-uniformly over the vocabulary: common words are common, as in text."""
    return np.exp(rng.uniform(0.0, np.log(VOCABULARY), count)).astype(np.int32)


@dataclass(frozen=True)
class Run:
    """The size of a run: so many groups, a batch's worth in every step."""

    groups: int
    group_size: int = GROUP_SIZE
    prompt_tokens: int = PROMPT_TOKENS
    max_lag: int = MAX_LAG
    feed_ahead_steps: int = 1 << 40
    """Steps fed beyond those that may be admitted; where that suffices, all groups are fed before the first step."""

    @property
    def groups_per_step(self) -> int:
        return BATCH // self.group_size


class Learner:
    """One learner that has claimed its run and announced the first weights."""

    def __init__(self, broker: Broker, owner: Owner, run: Run) -> None:
        self._broker = broker
        self._owner = owner
        self._run = run
        self._fed = 0
        self._next, self._ahead = 0, set[int]()
        """The first group that is not trained, and those beyond it that are."""
        self.take_s: list[float] = []
        """The seconds of every take that gave a batch, decoding included."""

    @classmethod
    async def begin(cls, broker: Broker, run: Run) -> "Learner":
        rules = RunRules(max_lag=run.max_lag, groups_per_step=run.groups_per_step, max_bytes=_MAX_BYTES)
        claim = await broker.batches.claim(checkpoint=CheckpointMark(0, 0), rules=rules, config=b"", resume=False)
        learner = cls(broker, claim.owner, run)
        await learner._announce(0)
        await learner._feed(0)
        return learner

    async def steps(self) -> AsyncIterator[TakenBatch]:
        """Yield the batches of all steps; the request for the next one announces and commits each."""
        for step in range(self._run.groups // self._run.groups_per_step):
            batch = await self.take(step)
            yield batch
            await self._announce(step + 1)
            groups = [group.prompt.group for group in batch.groups]
            await self._broker.batches.commit(self._owner, step + 1, groups, self._watermark(groups))
            await self._feed(step + 1)

    async def take(self, step: int) -> TakenBatch:
        """Wait for the batch, and return it."""
        while True:
            asked = time.perf_counter()
            batch = await self._broker.batches.take(self._owner, step, self._run.groups_per_step)
            if isinstance(batch, TakenBatch):
                self.take_s.append(time.perf_counter() - asked)
                return batch
            await asyncio.sleep(POLL_S)

    def _watermark(self, groups: Sequence[str]) -> str:
        """Return the group id below which everything has been trained; groups finish in any order."""
        self._ahead.update(int(group.partition("-")[2]) for group in groups)
        while self._next in self._ahead:
            self._ahead.remove(self._next)
            self._next += 1
        return f"0000-{self._next:08d}"

    async def _announce(self, step: int) -> None:
        await self._broker.versions.announce(self._owner, _manifest(self._owner, step))

    async def _feed(self, step: int) -> None:
        run = self._run
        wanted = min(run.groups, (step + run.max_lag + 1 + run.feed_ahead_steps) * run.groups_per_step)
        while self._fed < wanted:
            positions = range(self._fed, min(wanted, self._fed + _FED_AT_ONCE))
            prompts = [prompt(position, run.group_size, run.prompt_tokens) for position in positions]
            await self._broker.prompts.feed(prompts, self._owner)
            self._fed = positions.stop


def _manifest(owner: Owner, step: int) -> WeightManifest:
    return WeightManifest(
        version=WeightVersion(owner.incarnation, step),
        tensors=(),
        buckets=(),
        probe=Probe(token_ids=[1, 2], logprobs=[-1.0], tolerance=1e-4),
        group_epoch=0,
        pull_url="http://127.0.0.1:1",
        pull_token="none",
        fingerprints=(),
    )


class Worker:
    """A worker that asks for as many leases as it has room for, with a task for every sample."""

    def __init__(self, broker: Broker, payloads: Payloads, *, capacity: int = 64) -> None:
        self._broker = broker
        self._payloads = payloads
        self._capacity = capacity
        self._version = WeightVersion(1, 0)
        self._held = 0
        self.done = 0
        """The number of submitted samples."""
        self._wake = asyncio.Event()

    async def work(self, count: int) -> None:
        """Work until so many samples have been submitted."""
        async with asyncio.TaskGroup() as tasks:
            background = [tasks.create_task(self._follow_versions()), tasks.create_task(self._confirm())]
            while self.done < count:
                self._wake.clear()
                for lease in await self._lease(min(self._capacity, count - self.done) - self._held):
                    self._held += 1
                    tasks.create_task(self._sample(lease))
                with suppress(TimeoutError):
                    async with asyncio.timeout(None if self._held == self._capacity else _VERSION_POLL_S):
                        await self._wake.wait()
            for task in background:
                task.cancel()

    async def _lease(self, room: int) -> Sequence[Lease]:
        if room <= 0:
            return ()
        return (await self._broker.leases.lease("worker", self._version, room, TTL_S)).leases

    async def _sample(self, lease: Lease) -> None:
        trajectory = sampled_by(self._version, self._payloads.named(lease.tid))
        assert await self._broker.leases.submit(lease, trajectory) is SubmitOutcome.ACCEPTED
        self._held -= 1
        self.done += 1
        self._wake.set()

    async def _follow_versions(self) -> None:
        while True:
            _, announced = await self._broker.versions.current()
            if announced is not None and announced != self._version:
                self._version = announced
                self._wake.set()
            await asyncio.sleep(_VERSION_POLL_S)

    async def _confirm(self) -> None:
        while True:
            await asyncio.sleep(_CONFIRM_S)
            await self._broker.leases.confirm()


def sampled_by(version: WeightVersion, trajectory: Trajectory) -> Trajectory:
    return msgspec.structs.replace(trajectory, spans=(VersionSpan(0, len(trajectory.response_tokens), version),))
