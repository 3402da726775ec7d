"""A run in a test: small real prompts and trajectories, and one learner with its owner, which the test moves."""

import struct
import zlib
from collections.abc import Sequence
from typing import TypeVar

import msgspec
import numpy as np
from msgspec.structs import replace

from headway.broker import Broker
from headway.broker.client.learner import CheckpointMark, Claim, NotReady, Owner
from headway.broker.client.leases import LeaseReply, SubmitOutcome
from headway.broker.schema import Lease, Prompt, RunRules, Segment, Trajectory, VersionSpan, WeightVersion
from headway.broker.schema.status import QueueDepths
from headway.broker.schema.weights import BroadcastGroup, Probe, WeightManifest

HEADER = struct.Struct("<4sHHII")
FRESH = CheckpointMark(0, 0)
TTL_S = 30.0
T = TypeVar("T", bound=msgspec.Struct)


def group_id(position: int) -> str:
    return f"0000-{position:08d}"


def prompt(position: int, num_samples: int = 2) -> Prompt:
    return Prompt(
        group=group_id(position),
        token_ids=[1, 2, 70_000],
        text=f"1+{position}=",
        ground_truth=str(position + 1),
        data_source="arithmetic",
        extra_info={"difficulty": 1, "parts": [1, 2.5, None]},
        num_samples=num_samples,
    )


def trajectory(lease: Lease, *versions: int | WeightVersion, tokens: int = 6) -> Trajectory:
    """Return a sample of these weights in turn (a step: of incarnation 1), a token each at least."""
    cuts = [*range(len(versions)), tokens]
    spans = tuple(
        VersionSpan(start, end, WeightVersion(1, version) if isinstance(version, int) else version)
        for start, end, version in zip(cuts[:-1], cuts[1:], versions, strict=True)
    )
    return Trajectory(
        tid=lease.tid,
        prompt_tokens=np.array(lease.prompt.token_ids, np.int32),
        response_tokens=np.arange(tokens, dtype=np.int32) + 65_530,
        behavior_logprobs=-np.linspace(0.1, 3, tokens, dtype=np.float32),
        loss_mask=np.ones(tokens, np.uint8),
        spans=spans,
        reward=0.5,
        rewards={"exact": 1.0, "length": -0.5},
        finish_reason="stop",
        worker="w",
    )


def as_segment(whole: Trajectory) -> Segment:
    """Return all tokens of a sample as its first segment."""
    return Segment(
        tid=whole.tid,
        index=0,
        start=0,
        tokens=whole.response_tokens,
        behavior_logprobs=whole.behavior_logprobs,
        loss_mask=whole.loss_mask,
        spans=whole.spans,
    )


def manifest(incarnation: int, step: int) -> WeightManifest:
    return WeightManifest(
        version=WeightVersion(incarnation, step),
        tensors=(),
        buckets=(),
        probe=Probe(token_ids=[1, 2], logprobs=[-1.0], tolerance=1e-4),
        group_epoch=0,
        pull_url="http://127.0.0.1:1",
        pull_token="secret",
        fingerprints=(),
    )


def of_no_run(struct: T | None) -> T:
    """Return the trajectory as it was before the broker's client wrote the run's identity into it."""
    assert struct is not None
    return replace(struct, identity="")


def broadcast_group(epoch: int = 1) -> BroadcastGroup:
    return BroadcastGroup(
        epoch=epoch,
        incarnation=1,
        transport="gloo",
        meeting="8c2f",
        learner="127.0.0.1",
        timeout_s=1.0,
        members=("w",),
        at_once=1,
    )


class Scenario:
    """One learner's view of a run, and workers as plain names."""

    def __init__(self, broker: Broker, claim: Claim) -> None:
        self.broker = broker
        self.claim = claim
        self.owner: Owner = claim.owner
        self.not_ready: NotReady | None = None
        """The reason why the last take gave no batch."""

    async def announce(self, step: int) -> None:
        await self.broker.versions.announce(self.owner, manifest(self.owner.incarnation, step))

    async def lease(self, count: int, step: int, worker: str = "w", ttl_s: float = TTL_S) -> LeaseReply:
        return await self.broker.leases.lease(worker, WeightVersion(1, step), count, ttl_s)

    async def submit(self, lease: Lease, *versions: int | WeightVersion) -> SubmitOutcome:
        return await self.broker.leases.submit(lease, trajectory(lease, *versions))

    async def submit_all(self, leases: Sequence[Lease], step: int) -> None:
        for lease in leases:
            assert await self.submit(lease, step) is SubmitOutcome.ACCEPTED

    async def generate(self, count: int, step: int) -> LeaseReply:
        """Lease up to so many samples and finish them all."""
        reply = await self.lease(count, step)
        await self.submit_all(reply.leases, step)
        return reply

    async def take(self, step: int, n: int = 2) -> list[str] | None:
        """Return the groups' ids, or None while the batch is not ready."""
        taken = await self.broker.batches.take(self.owner, step, n)
        self.not_ready = taken if isinstance(taken, NotReady) else None
        return None if isinstance(taken, NotReady) else [group.prompt.group for group in taken.groups]

    async def queues(self) -> QueueDepths:
        return (await self.broker.status.snapshot()).queues


async def begin(
    broker: Broker,
    rules: RunRules,
    *,
    fed: int = 40,
    group_size: int = 2,
    checkpoint: CheckpointMark = FRESH,
    resume: bool = False,
    config: bytes = b"recipe",
) -> Scenario:
    """Claim the run and feed groups 0 to `fed`; announce the initial weights of a fresh run."""
    claim = await broker.batches.claim(checkpoint=checkpoint, rules=rules, config=config, resume=resume)
    scenario = Scenario(broker, claim)
    await broker.prompts.feed([prompt(i, group_size) for i in range(fed)], claim.owner)
    if claim.highest_announced is None and checkpoint == FRESH:
        await scenario.announce(0)
    return scenario


async def hidden(broker: Broker, name: str) -> str:
    """Return a key that only functions name, for a client that has not claimed the run."""
    secret = await broker._connection.execute("GET", broker._connection.keys("secret"))
    return f"{broker._connection.keys.prefix}hidden:{secret.decode()}:{name}"


def rules(max_lag: int, groups_per_step: int = 2, **others: object) -> RunRules:
    return RunRules(max_lag=max_lag, groups_per_step=groups_per_step, **others)  # type: ignore[arg-type]


def groups(*positions: int) -> list[str]:
    return [group_id(position) for position in positions]


def of_another_schema(frame: bytes) -> bytes:
    """Return the frame as another version of Headway would write it, its checksum included."""
    magic, schema, kind, _, length = HEADER.unpack_from(frame)
    body = frame[HEADER.size :]
    crc = zlib.crc32(body, (schema + 7) << 16 | kind)
    return HEADER.pack(magic, schema + 7, kind, crc, length) + body
