"""A learner and a worker over a real broker, without weights.

They follow the protocol of `learner.stages.loop` and `rollout_workers.worker`, one verb at a time, so that a test can
come between any two.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TypeVar

import msgspec
import numpy as np

from headway.broker import Broker
from headway.broker.client.learner import CheckpointGroups, CheckpointMark, Claim, NotReady
from headway.broker.client.leases import AppendOutcome, AppendReply, SubmitOutcome
from headway.broker.errors import ServerRestartedError
from headway.broker.schema import Group, Lease, Segment, VersionSpan, WeightVersion

from .model import Batch, Checkpoint, Lineage, Model, groups_of, is_of_copy, token_at
from .renewal import renew
from .scenario import TTL_S, group_id, manifest, prompt, trajectory

T = TypeVar("T")


def batch_of(groups: Sequence[Group]) -> Batch:
    return tuple(trajectory.tid for group in groups for trajectory in group.trajectories)


@dataclass
class Learner:
    """One incarnation; it begins at a checkpoint and ends with the process."""

    broker: Broker
    model: Model
    claim: Claim
    step: int
    lineage: Lineage
    checkpoint: Checkpoint
    log: dict[int, Batch] | None
    """The batch that each step trained, on the learner's disk; None where it keeps no log."""
    replayed_to: int = 0
    """The learner trains the steps below it from the log."""
    caught_up_at: int = 0
    announced: WeightVersion | None = None
    taken: dict[int, Batch] = field(default_factory=dict)
    committed: list[str] = field(default_factory=list)
    has_published: bool = False
    is_feed_closed: bool = False
    is_replay_lost: bool = False
    is_exhausted: bool = False
    waits_for: NotReady | None = None
    """The reason why the last take gave no batch."""

    def __post_init__(self) -> None:
        self.cursor = self.checkpoint.cursor.again()

    @classmethod
    async def start(
        cls,
        broker: Broker,
        model: Model,
        checkpoint: Checkpoint,
        log: dict[int, Batch] | None,
        *,
        resume: bool,
        is_anew: bool = False,
    ) -> "Learner":
        """Claim the run from this checkpoint on. With `is_anew` the server forgets everything after it."""
        log_end = checkpoint.step
        while log is not None and log_end in log:
            log_end += 1
        replayable_to = 0 if is_anew or log is None else log_end
        cursor = checkpoint.cursor
        done = tuple(sorted(group for group in cursor.done if group >= group_id(cursor.watermark)))
        claim = await broker.batches.claim(
            checkpoint=CheckpointMark(checkpoint.incarnation, checkpoint.step),
            rules=model.rules,
            config=b"recipe",
            resume=resume,
            contains=CheckpointGroups(group_id(cursor.watermark), done),
            replayable_to=replayable_to,
            regenerate=is_anew,
        )
        if model.has_forgotten:
            model.delivered.clear()
            model.has_forgotten = False
        self = cls(broker, model, claim, checkpoint.step, checkpoint.lineage, checkpoint, log)
        is_forgotten = claim.highest_announced is None
        if is_anew or claim.is_rewound:
            self.drop_log()
        else:
            self.caught_up_at = replayable_to if is_forgotten else claim.highest_announced or 0
            if is_forgotten or claim.committed_step > checkpoint.step:
                await self._replay(range(checkpoint.step, replayable_to))
        return self

    @property
    def version(self) -> WeightVersion:
        return WeightVersion(self.claim.owner.incarnation, self.step)

    async def feed(self, count: int) -> None:
        await self._feed_lost()
        places = self.cursor.take(count)
        await self._feed(places)
        if self.cursor.is_exhausted and not self.is_feed_closed:
            await self.insist(lambda: self.broker.prompts.close_feed(self.claim.owner))
            self.is_feed_closed = self.cursor.is_exhausted  # unless the server was found restarted

    async def publish(self) -> None:
        """Announce the weights as they are; while replaying, announce nothing."""
        self.has_published = True
        if self.step < self.caught_up_at:
            return
        self.model.announce(self.version, self.lineage)
        version = manifest(self.version.incarnation, self.step)
        await self.insist(lambda: self.broker.versions.announce(self.claim.owner, version))
        self.announced, self.is_replay_lost = self.version, False

    async def train(self) -> bool:
        """Train one step, if its batch is there; obstacles are handled as the loop would handle them."""
        await self.feed(0)
        if self.step < self.replayed_to and self.log is not None:
            self._learn(self.log[self.step])
            return True
        groups = await self._pinned()
        if isinstance(groups, NotReady):
            self.waits_for = groups
            await self._help(groups)
            return False
        self.is_exhausted = not groups
        if groups:
            self.model.judge_batch(self.step, self.lineage, groups)
            self._learn(batch_of(groups))
        return bool(groups)

    async def save(self) -> Checkpoint:
        """Return the state as it is, with dropped groups marked."""
        self.cursor.mark(await self.insist(self.broker.batches.settled_without_training))
        return Checkpoint(self.claim.owner.incarnation, self.step, self.lineage, self.cursor.again())

    async def commit(self, checkpoint: Checkpoint) -> None:
        """Commit a durable checkpoint: the broker may forget its batches."""
        self.checkpoint = checkpoint
        done = sorted(groups_of(batch for step, batch in self.taken.items() if step < self.step))
        watermark = group_id(self.cursor.watermark)
        await self.insist(lambda: self.broker.batches.commit(self.claim.owner, self.step, done, watermark))
        self.taken = {step: batch for step, batch in self.taken.items() if step >= self.step}
        self.committed += done

    async def insist(self, verb: Callable[[], Awaitable[T]]) -> T:
        """Return the verb's result, after the server has been told again all that it may have forgotten."""
        while True:
            try:
                return await verb()
            except ServerRestartedError:
                await self._tell_again()
                self.is_replay_lost = self.announced is None
                self.cursor = self.cursor.again()
                self.is_feed_closed = False

    def drop_log(self) -> None:
        """Drop the log after this step, because a branch of its own follows."""
        if self.log is not None:
            for step in [step for step in self.log if step >= self.step]:
                del self.log[step]
        for step in [step for step in self.model.delivered if step >= self.step]:
            del self.model.delivered[step]

    def _learn(self, batch: Batch) -> None:
        self.lineage = (*self.lineage, batch)
        self.taken[self.step] = batch
        self.cursor.mark(groups_of([batch]))
        self.step += 1
        self.has_published = False

    async def _pinned(self) -> list[Group] | NotReady:
        n = self.model.rules.groups_per_step
        batch = await self.insist(lambda: self.broker.batches.take(self.claim.owner, self.step, n))
        if isinstance(batch, NotReady):
            return batch
        groups = list(batch.groups)
        if self.log is not None and set(batch_of(groups)) < set(self.log.get(self.step, ())):
            return NotReady.REWIND
        if groups:
            self.model.judge_repetition(self.step, batch_of(groups))
            if self.log is not None:
                self.log[self.step] = batch_of(groups)
        return groups

    async def _help(self, why: NotReady) -> None:
        if why in (NotReady.REWIND, NotReady.ANNOUNCE) or self.is_replay_lost:
            self.is_replay_lost = False
            await self._replay_what_is_lost()
        elif why is NotReady.BYTES and self.taken:
            await self.commit(await self.save())

    async def _replay_what_is_lost(self) -> None:
        end = self.step
        while self.log is not None and end in self.log:
            end += 1
        if end > self.step:
            await self._replay(range(self.step, end))
        else:
            self.caught_up_at = 0
            self.drop_log()
            await self.publish()

    async def _replay(self, steps: range) -> None:
        if steps:
            assert self.log is not None
            self.replayed_to = steps.stop
            self.taken |= {step: self.log[step] for step in steps}
            await self._tell_again()

    async def _tell_again(self) -> None:
        self.model.has_forgotten = False
        await self.broker.batches.reassert(
            self.claim.owner, announced=self.announced, committed_groups=self.committed, pinned=self.taken
        )

    async def _feed_lost(self) -> None:
        if (await self.insist(self.broker.prompts.waiting))[1]:
            end = self.cursor.next
            self.cursor = self.cursor.again()
            await self._feed(self.cursor.take(end - self.cursor.next))
            self.cursor.next = max(self.cursor.next, end)

    async def _feed(self, places: Sequence[int]) -> None:
        prompts = [prompt(place, self.model.group_size) for place in places]
        await self.insist(lambda: self.broker.prompts.feed(prompts, self.claim.owner))


@dataclass(eq=False)
class Flight:
    """A sample that a worker generates, also after it has lost the right to."""

    lease: Lease
    versions: list[WeightVersion]
    """The version of the weights that sampled each token."""
    ends: list[int]
    """The end of each segment that the server has."""

    @classmethod
    def resume(cls, lease: Lease) -> "Flight":
        spans = [span for segment in lease.segments for span in segment.spans]
        versions = [span.version for span in spans for _ in range(span.start, span.end)]
        tokens = [token for segment in lease.segments for token in segment.tokens.tolist()]
        assert tokens == [token_at(lease.tid, i, version) for i, version in enumerate(versions)], "mixed-up segments"
        return cls(lease, versions, [segment.start + len(segment.tokens) for segment in lease.segments])

    @property
    def is_copy(self) -> bool:
        return is_of_copy(self.lease.token)

    @property
    def copied_from(self) -> int:
        """The step of the weights for which a copy was given."""
        return int(self.lease.token.split("x")[1])

    def generate(self, version: WeightVersion, tokens: int) -> None:
        self.versions += [version] * tokens

    def spans(self, start: int = 0) -> tuple[VersionSpan, ...]:
        spans, position = [], start
        for version, tokens in groupby(self.versions[start:]):
            end = position + len(list(tokens))
            spans.append(VersionSpan(position, end, version))
            position = end
        return tuple(spans)

    def tokens(self, start: int = 0) -> list[int]:
        tid = self.lease.tid
        return [token_at(tid, i, version) for i, version in enumerate(self.versions) if i >= start]


class Worker:
    """A worker of several samples at once, whose weights may be old."""

    def __init__(self, broker: Broker, name: str, shards: int) -> None:
        self.broker = broker
        self.name = name
        self.version: WeightVersion | None = None
        self.flights: list[Flight] = []
        self.landed: list[Flight] = []
        """Samples handed in or back; after a lost reply a worker hands them in again."""
        broker.leases.storage.payload_shards = shards

    async def refresh(self) -> None:
        """Get the announced weights, unless its own are newer."""
        _, announced = await self.broker.versions.current()
        if announced is not None and (self.version is None or announced > self.version):
            self.version = announced

    async def lease(self, count: int) -> list[Flight]:
        assert self.version is not None
        reply = await self.broker.leases.lease(self.name, self.version, count, TTL_S)
        flights = [Flight.resume(lease) for lease in reply.leases]
        self.flights += flights
        return flights

    def generate(self, flight: Flight, tokens: int) -> None:
        assert self.version is not None
        flight.generate(self.version, tokens)

    async def append(self, flight: Flight) -> AppendReply:
        """Append the tokens since the last segment that the server has."""
        start = flight.ends[-1] if flight.ends else 0
        tokens = flight.tokens(start)
        segment = Segment(
            tid=flight.lease.tid,
            index=len(flight.ends),
            start=start,
            tokens=np.array(tokens, np.int32),
            behavior_logprobs=np.full(len(tokens), -1.0, np.float32),
            loss_mask=np.ones(len(tokens), np.uint8),
            spans=flight.spans(start),
        )
        reply = await self.broker.leases.append(flight.lease, segment, TTL_S)
        match reply.outcome:
            case AppendOutcome.APPENDED:
                flight.ends.append(start + len(tokens))
            case AppendOutcome.OUT_OF_ORDER:
                del flight.ends[reply.expected :]
            case AppendOutcome.FENCED:
                self._end(flight)
        return reply

    async def submit(self, flight: Flight) -> SubmitOutcome:
        finished = msgspec.structs.replace(
            trajectory(flight.lease, 0, tokens=len(flight.versions)),
            response_tokens=np.array(flight.tokens(), np.int32),
            spans=flight.spans(),
        )
        outcome = await self.broker.leases.submit(flight.lease, finished)
        if flight in self.flights:
            self.landed.append(flight)
        self._end(flight)
        return outcome

    async def renew(self) -> list[Flight]:
        """Return the samples with which the worker may go on."""
        lost = await renew(self.broker, [flight.lease for flight in self.flights], TTL_S)
        return [flight for flight in self.flights if flight.lease.token not in lost]

    async def release(self, flight: Flight) -> None:
        await self.broker.leases.release([flight.lease])
        if flight.versions:
            self.landed.append(flight)
        self._end(flight)

    def _end(self, flight: Flight) -> None:
        self.flights = [other for other in self.flights if other is not flight]
