"""The worker's verbs: lease a sample, append segments, submit the trajectory, or hand the lease back.

A worker's heartbeat renews its leases (`StatusVerbs.heartbeat`).

A lease expires on the server's clock and then goes to another worker under a new token, together with the
segments that were appended; a worker that comes late is fenced.
"""

import asyncio
import logging
import secrets
from collections import defaultdict
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from hashlib import sha1
from typing import Any

from msgspec.structs import replace

from headway.broker.config import BlobStorage
from headway.broker.connection.connection import Command, Connection
from headway.broker.errors import (
    BrokerError,
    BrokerUnavailableError,
    FrameError,
    HeadwayError,
    QuarantinedError,
    SchemaMismatchError,
)
from headway.broker.schema import Lease, Prompt, SampleLimits, Segment, Trajectory, TrajectoryId, WeightVersion
from headway.broker.security.sample_validation import validate_segment
from headway.broker.wire.codec import decode, decode_segment, encode_segment

from .submissions import ATTEMPTS, Blobs, Submissions, SubmitOutcome, measures_of

__all__ = ["AppendOutcome", "AppendReply", "LeaseReply", "Leases", "NoMoreLeases", "SubmitOutcome", "parse_tid"]

_HEAD_BYTES = 256
_NO_SEGMENT = -1
_COPY = "copy"
"""The beginning of the tokens of copies, see `tokens.lua`."""

log = logging.getLogger(__name__)


class AppendOutcome(StrEnum):
    """The server's answer to a segment."""

    APPENDED = "appended"
    OUT_OF_ORDER = "out of order"
    """The server expects another segment next: see `AppendReply.expected`."""
    FENCED = "fenced"
    """The worker no longer holds the lease, and must stop generating."""


@dataclass(frozen=True)
class AppendReply:
    """`expected` is the index of the segment that comes next."""

    outcome: AppendOutcome
    expected: int


class NoMoreLeases(StrEnum):
    """Why a worker got fewer leases than it asked for."""

    CAPACITY = "capacity"
    """Every sample that the bound on lag and `staleness.ahead` admit is leased."""
    STALE_WEIGHTS = "stale weights"
    """The worker's weights are too old: samples of them could not be trained."""
    NO_PROMPTS = "no prompts"
    BYTES = "bytes"
    """The store is full."""
    WORKER_LIMIT = "worker limit"
    """The worker holds broker.max_leases_per_worker leases already."""
    RECIPE = "recipe"
    """A learner has claimed the run with another configuration than the one that the worker obeys."""
    FINISHED = "finished"
    PAUSED = "paused"
    """The learner has announced nothing that the worker could hold, or the run is stopped."""


@dataclass(frozen=True)
class LeaseReply:
    """The leases that a worker was given."""

    leases: tuple[Lease, ...]
    state: str
    """The state of the run; "absent" where no learner has claimed it yet."""
    reason: NoMoreLeases | None
    """None where the worker got as many as it asked for."""


class Leases:
    """The leases of one worker process. It remembers the samples that it holds, so that it is not given one twice, and
    those that it submitted, until they are durable."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._held: dict[str, dict[TrajectoryId, str]] = defaultdict(dict)
        self._blobs = Blobs(connection)
        self._submissions = Submissions(connection, self._blobs)
        self.limits = SampleLimits()
        """The bounds of this run's samples; the caller sets them before the first lease."""

    @property
    def storage(self) -> BlobStorage:
        """The way in which payloads and segments are stored; the caller sets it before the first lease."""
        return self._blobs.storage

    @property
    def recipe_changed(self) -> asyncio.Event:
        """Set once the server refuses leases of samples, or of requests for scores, because the run has another
        configuration than `obey` was told."""
        return self._connection.recipe_changed

    def obey(self, config: bytes) -> None:
        """Tells the server with every request for leases that this process obeys the configuration that
        `StatusVerbs.config` returned. One that never says it is given leases under any."""
        self._connection.recipe = sha1(config, usedforsecurity=False).hexdigest()
        self._connection.recipe_changed.clear()

    async def lease(self, worker: str, version: WeightVersion, count: int, ttl_s: float) -> LeaseReply:
        """Leases up to `count` samples for an engine that holds `version`. Leases whose reply was lost expire. Raises
        QuarantinedError, ForeignRunError."""
        await self._submissions.note_server()
        held = self._held[worker]
        state, reason, highest, in_doubt, *granted = await self._asked(worker, version, count, ttl_s)
        if unknown := [one for one in in_doubt if held.get(parse_tid(one[0])) != one[1]]:
            with suppress(BrokerUnavailableError):  # the next answer names them again, and this one may grant leases
                await self._connection.script("release", *(part for one in unknown for part in one))
            if not granted:
                state, reason, highest, _, *granted = await self._asked(worker, version, count, ttl_s)
        if reason == b"quarantined":
            raise QuarantinedError(
                f"Worker {worker} gets no more leases of run {self._connection.run}: a user quarantined it, or too"
                " many of its samples were not what they can be: `headway status` shows why. Then look for a model, an"
                " engine or a version of Headway that is not the learner's, and mend it. Start the worker again."
            )
        incarnation, highest_step = map(int, highest.split(b"."))
        newest = WeightVersion(incarnation, max(version.step, highest_step))
        if reason == NoMoreLeases.RECIPE.encode():
            self._connection.recipe_changed.set()
        leases = await self._fetched([_LeaseGrant.read(one) for one in granted], worker, newest, ttl_s)
        held.update((lease.tid, lease.token) for lease in leases)
        return LeaseReply(leases, state.decode(), NoMoreLeases(reason.decode()) if reason else None)

    async def _asked(self, worker: str, version: WeightVersion, count: int, ttl_s: float) -> list[Any]:
        """Returns the answer of the verb `lease`, with the samples in doubt as (member, token). All that is said of the
        leases that the worker holds is how many they are, and which of them are copies."""
        held = self._held[worker]
        state, reason, highest, in_doubt, *granted = await self._connection.script(
            "lease",
            version.incarnation,
            version.step,
            count,
            ttl_s,
            secrets.token_hex(8),
            f"{worker} {self._connection.session}",
            self._connection.recipe,
            len(held),
            *(str(tid) for tid, token in held.items() if token.startswith(_COPY)),
            absent=[b"absent", b"paused", b"0.0", []],
        )
        pairs = (one.rpartition(b" ") for one in in_doubt)
        return [state, reason, highest, [(member, token.decode()) for member, _, token in pairs], *granted]

    def forget_lost(self, leases: Sequence[Lease], lost: Collection[str]) -> None:
        """Forgets those of the leases whose tokens are lost: the worker may be given these samples again."""
        for lease in leases:
            if lease.token in lost:
                self._forget(lease)

    async def append(self, lease: Lease, segment: Segment, ttl_s: float) -> AppendReply:
        """Keeps a segment for the worker that goes on with the sample, and renews the lease. Raises FrameError."""
        frame = encode_segment(replace(segment, identity=lease.identity, worker=lease.worker))
        for _ in range(ATTEMPTS):
            name, store = self._blobs.store("segment", lease.tid, secrets.token_hex(16), frame)
            outcome, held = await self._connection.script(
                "append",
                str(lease.tid),
                lease.token,
                segment.index,
                name,
                ttl_s,
                measures_of(frame, segment.spans),
                before=[store],
            )
            if outcome != b"no blob":
                if outcome == b"appended":
                    await self._blobs.keep([name])
                if outcome == b"fenced":
                    self._forget(lease)
                return AppendReply(AppendOutcome(outcome.decode()), int(held))
        raise self._blobs.lost(len(frame))

    async def intend(self, lease: Lease, calls: Sequence[str]) -> list[str] | None:
        """Records the digests of an agent's calls that run, before they are sampled. Returns those that ran when a
        former holder began its last one; None if the lease is lost."""
        is_held, before = await self._connection.script("intend", str(lease.tid), lease.token, " ".join(calls))
        if not int(is_held):
            self._forget(lease)
            return None
        return before.decode().split() if before else []

    async def submit(self, lease: Lease, trajectory: Trajectory) -> SubmitOutcome:
        """Hands a finished sample in. Raises FrameError where its parts contradict each other."""
        outcome = await self._submissions.submit(lease, trajectory)
        self._forget(lease)
        return outcome

    async def confirm(self) -> int:
        """Has the server make submissions durable, and forgets those that are; a worker calls it about once a second.
        After a restart of the server, or when a replica took over, it submits again what may have been lost, and
        returns how many submissions those were."""
        return await self._submissions.confirm()

    async def close(self) -> None:
        """Cancels the submissions that callers still wait for."""
        await self._submissions.close()

    async def release(self, leases: Sequence[Lease]) -> None:
        """Hands leases back at once, with their segments, for other workers to take."""
        if leases:
            await self._connection.script("release", *members(leases))
        for lease in leases:
            self._forget(lease)

    async def report_death(self, session: str) -> int:
        """Hands back at once what the process with this session held, and returns how many leases that were. The caller
        has seen that process end, and made its session: no other process knows that."""
        return int(await self._connection.script("report_death", session, absent=0))

    async def give_up(self, lease: Lease, reason: str) -> None:
        """Hands back a sample that cannot be used, to be generated anew from its start; the dead letters say why."""
        await self._discard(lease, _NO_SEGMENT, reason, b"")
        await self.release([lease])

    async def begin_anew(self, lease: Lease) -> None:
        """Discards the sample's segments, after which its player cannot go on, and keeps the lease."""
        await self._discard(lease, _NO_SEGMENT, "the player cannot go on after segments, and begins anew", b"")

    async def _discard(self, lease: Lease, index: int, reason: str, head: bytes) -> None:
        """Discards the sample's segments, because the one of this index cannot be used."""
        await self._connection.script("discard", str(lease.tid), lease.token, index, reason, head)

    def _forget(self, lease: Lease) -> None:
        for held in self._held.values():
            if held.get(lease.tid) == lease.token:
                del held[lease.tid]

    async def _fetched(
        self, granted: "Sequence[_LeaseGrant]", worker: str, newest: WeightVersion, ttl_s: float
    ) -> tuple[Lease, ...]:
        """Fetches as `_fetch` does, and hands the leases back where that fails: otherwise no worker could have them
        until they expire."""
        try:
            return await self._fetch(granted, worker, newest, ttl_s)
        except HeadwayError:
            with suppress(BrokerError):
                await self._connection.script("release", *members(granted))
            raise

    async def _fetch(
        self, granted: "Sequence[_LeaseGrant]", worker: str, newest: WeightVersion, ttl_s: float
    ) -> tuple[Lease, ...]:
        """Returns the leases with their prompts and segments; it reports a damaged prompt or segment and leaves it
        out."""
        if not granted:
            return ()
        keys, first = self._connection.keys, dict[str, _LeaseGrant]()
        for one in granted:
            first.setdefault(one.tid.group, one)
        commands: list[Command] = [("GET", keys.blob(name)) for one in granted for name in one.segments]
        blobs = await self._connection.script("prompts", *members(tuple(first.values())))
        segments = await self._connection.pipeline(commands) if commands else []
        prompts = {
            one.tid.group: await self._prompt(one, blob) for one, blob in zip(first.values(), blobs, strict=True)
        }
        leases, left = [], iter(segments)
        for one in granted:
            frames = [next(left) for _ in one.segments]
            prompt = prompts[one.tid.group]
            if prompt is not None:  # else the group was settled since, or lost, and the lease with it
                identity = self._connection.identity
                lease = Lease(
                    tid=one.tid, identity=identity, worker=worker, token=one.token, ttl_s=ttl_s, prompt=prompt
                )
                leases.append(await self._with_segments(lease, frames, one.oldest, newest))
        return tuple(leases)

    async def _prompt(self, one: "_LeaseGrant", blob: bytes | None) -> Prompt | None:
        try:
            return None if blob is None else decode(blob, Prompt)
        except SchemaMismatchError:
            raise  # this process is at fault, not the segment
        except FrameError as error:
            await self._connection.script("mark_lost", str(one.tid), one.token, str(error), (blob or b"")[:_HEAD_BYTES])
            return None

    async def _with_segments(
        self, lease: Lease, frames: Sequence[bytes | None], oldest: int, newest: WeightVersion
    ) -> Lease:
        if not frames:
            return lease
        segments: list[Segment] = []
        for index, frame in enumerate(frames):
            try:
                segment = _decode_next(lease.tid, segments, frame)
                validate_segment(segment, lease, self.limits, oldest=oldest, newest=newest)
                segments.append(segment)
            except FrameError as error:
                log.warning("%s is begun anew, as its segments cannot be gone on from: %s", lease.tid, error)
                await self._discard(lease, index, str(error), (frame or b"")[:_HEAD_BYTES])
                return lease
        return replace(lease, segments=tuple(segments))


@dataclass(frozen=True)
class _LeaseGrant:
    """A lease as the script tells it."""

    tid: TrajectoryId
    token: str
    oldest: int
    """The step of the segments' oldest token, as their workers told the server."""
    segments: tuple[str, ...]
    """The names of the segments' blobs."""

    @classmethod
    def read(cls, reply: Sequence[Any]) -> "_LeaseGrant":
        member, token, oldest, *segments = (*reply, 0) if len(reply) == 2 else reply
        return cls(parse_tid(member), token.decode(), int(oldest), tuple(name.decode() for name in segments))


def parse_tid(member: bytes) -> TrajectoryId:
    """Returns the id that a script names `group:round:sample`."""
    group, round_, sample = member.decode().rsplit(":", 2)
    return TrajectoryId(group, int(round_), int(sample))


def _decode_next(tid: TrajectoryId, before: Sequence[Segment], frame: bytes | None) -> Segment:
    if frame is None:
        raise FrameError(f"{tid}: segment {len(before)} is missing")
    segment, start = decode_segment(frame), sum(len(one.tokens) for one in before)
    if (segment.tid, segment.index, segment.start) != (tid, len(before), start):
        raise FrameError(
            f"{tid}: segment {segment.index} of {segment.tid} at {segment.start} is not the one at {start}"
        )
    if before and _choices(segment) != _choices(before[0]):
        raise FrameError(f"{tid}: segment {segment.index} has other experts, or lacks them, than the first one")
    return segment


def _choices(segment: Segment) -> tuple[object, ...] | None:
    """Returns layers, experts per token and number format; None where the engine recorded no experts."""
    return None if segment.experts is None else (*segment.experts.shape[1:], segment.experts.dtype)


def members(leases: "Sequence[Lease | _LeaseGrant]") -> list[str]:
    """Returns {member, token}... as scripts take them."""
    return [argument for lease in leases for argument in (str(lease.tid), lease.token)]
