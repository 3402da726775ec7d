"""The worker's verbs: lease a sample, keep the lease, append segments, submit the trajectory, or hand the lease back.

A lease expires on the server's clock and then goes to another worker under a new token, together with the
segments that were appended; whoever comes late is fenced.
"""

import secrets
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from .codec import decode, decode_segment, encode_segment, encode_trajectory
from .connection import Argument, Command, Connection
from .errors import BrokerError, FrameError, HeadwayError, SchemaMismatchError
from .keys import blob_name
from .schema import Lease, Prompt, Segment, Trajectory, TrajectoryId, VersionSpan, WeightVersion
from .staleness import oldest_step
from .unconfirmed import Submission, Unconfirmed

_ATTEMPTS = 3
_HEAD_BYTES = 256
_DURABLE_TIMEOUT_MS = 2000


class SubmitOutcome(StrEnum):
    """What became of a submission."""

    ACCEPTED = "accepted"
    DUPLICATE = "duplicate"
    """This very submission was accepted before; its first reply was lost."""
    FENCED = "fenced"
    """The lease is no longer held, the group's round is over, or a rewind has abandoned the weights: the work is
    void."""


class AppendOutcome(StrEnum):
    """What became of a segment."""

    APPENDED = "appended"
    OUT_OF_ORDER = "out of order"
    """The server wants another one next: see `AppendReply.expected`."""
    FENCED = "fenced"
    """As for a submission: stop generating."""


@dataclass(frozen=True)
class AppendReply:
    """`expected` is the index of the segment that comes next."""

    outcome: AppendOutcome
    expected: int


@dataclass(frozen=True)
class LeaseReply:
    """The leases handed out, and where fewer than asked for, why."""

    leases: tuple[Lease, ...]
    state: str
    """Of the run; "absent" where no learner has claimed it yet."""
    reason: str
    """"" | capacity | stale weights | no prompts | bytes | worker limit | finished | paused (nothing announced,
    or stopped)."""


class Leases:
    """One worker process's hold on samples. It remembers what it holds, so as not to be given the same sample
    twice, and what it submitted, until that is durable."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._held: dict[str, dict[TrajectoryId, str]] = defaultdict(dict)
        self._unconfirmed = Unconfirmed()
        self._server_id = ""
        self.payload_ttl_s = 600.0
        """A payload or segment that was stored and never recorded is forgotten after this."""
        self.payload_shards = 1
        """See `BrokerConfig.payload_shards`; the same for all who work on a run."""
        self.replicas = 0
        """See `BrokerConfig.replicas`."""

    async def lease(self, worker: str, version: WeightVersion, count: int, ttl_s: float) -> LeaseReply:
        """Up to `count` samples for an engine that holds `version`. A lost reply's leases expire by
        themselves."""
        if not self._server_id:
            self._server_id = await self._ask_server_id()
        held = self._held[worker]
        state, reason, *granted = await self._connection.script(
            "lease",
            version.incarnation,
            version.step,
            count,
            ttl_s,
            secrets.token_hex(8),
            *(f"{tid} {token}" for tid, token in held.items()),
        )
        leases = await self._fetched([_Granted.read(one) for one in granted], ttl_s)
        held.update((lease.tid, lease.token) for lease in leases)
        return LeaseReply(leases, state.decode(), reason.decode())

    async def renew(self, leases: Sequence[Lease], ttl_s: float) -> set[str]:
        """Moves the deadlines; returns the tokens of those that are no longer held: their generation must stop."""
        if not leases:
            return set()
        _, *tokens = await self._connection.script("renew", ttl_s, *_members(leases))
        lost = {token.decode() for token in tokens}
        for lease in leases:
            if lease.token in lost:
                self._forget(lease)
        return lost

    async def append(self, lease: Lease, segment: Segment, ttl_s: float) -> AppendReply:
        """Keeps a segment for whoever goes on with the sample, and renews the lease. Raises FrameError."""
        frame = encode_segment(segment)
        for _ in range(_ATTEMPTS):
            name, store = self._blob("segment", lease.tid, secrets.token_hex(6), frame)
            outcome, held = await self._connection.script(
                "append",
                str(lease.tid),
                lease.token,
                segment.index,
                name,
                len(frame),
                len(segment.tokens),
                ttl_s,
                *_steps(segment.spans),
                before=[store],
            )
            if outcome != b"no blob":
                await self._keep(name, is_accepted=outcome == b"appended")
                if outcome == b"fenced":
                    self._forget(lease)
                return AppendReply(AppendOutcome(outcome.decode()), int(held))
        raise self._evicting(len(frame))

    async def submit(self, lease: Lease, trajectory: Trajectory) -> SubmitOutcome:
        """Hands a finished sample in. Raises FrameError where its parts contradict each other."""
        oldest, *versions = _steps(trajectory.spans)
        metadata = (len(trajectory.response_tokens), oldest, *versions)
        submission = Submission(lease, encode_trajectory(trajectory), metadata, time.monotonic())
        outcome = await self._submit(submission, is_again=False)
        self._forget(lease)
        if outcome is not SubmitOutcome.FENCED:
            self._unconfirmed.keep(submission)
        return outcome

    async def confirm(self) -> int:
        """Call it about once a second: forgets submissions that are durable now. After the server restarted,
        or a replica took over, submits again what may have been lost; how many those were."""
        if not len(self._unconfirmed):
            return 0
        submissions = self._unconfirmed.all()
        is_durable = await self._connection.make_durable(self.replicas, _DURABLE_TIMEOUT_MS)
        server_id = await self._ask_server_id()
        if server_id != self._server_id:
            accepted = await self._submit_again(self._unconfirmed.all())
            self._server_id = server_id  # not before: what an outage has cut short is done over
            return accepted
        if is_durable:
            self._unconfirmed.forget(submissions)
        else:
            self._unconfirmed.forget_old()
        return 0

    async def release(self, leases: Sequence[Lease]) -> None:
        """Hands leases back at once, with their segments, for others to take."""
        if leases:
            await self._connection.script("release", *_members(leases))
        for lease in leases:
            self._forget(lease)

    def _forget(self, lease: Lease) -> None:
        for held in self._held.values():
            if held.get(lease.tid) == lease.token:
                del held[lease.tid]

    async def _submit(self, submission: Submission, *, is_again: bool) -> SubmitOutcome:
        tokens, *versions = submission.metadata
        for _ in range(_ATTEMPTS):
            # Named after the lease: however often it is sent, there is one copy, and a duplicate loses its TTL, too.
            name, store = self._blob("payload", submission.lease.tid, submission.lease.token, submission.payload)
            outcome = await self._connection.script(
                "submit",
                str(submission.lease.tid),
                submission.lease.token,
                name,
                len(submission.payload),
                tokens,
                int(is_again),
                *versions,
                before=[store],
            )
            if outcome != b"no payload":
                await self._keep(name, is_accepted=outcome != b"fenced")
                return SubmitOutcome(outcome.decode())
        raise self._evicting(len(submission.payload))

    async def _submit_again(self, submissions: Sequence[Submission]) -> int:
        accepted = 0
        for submission in submissions:
            outcome = await self._submit(submission, is_again=True)
            accepted += outcome is SubmitOutcome.ACCEPTED
            if outcome is SubmitOutcome.FENCED:
                self._unconfirmed.forget([submission])
        return accepted

    async def _ask_server_id(self) -> str:
        """Of the server that holds the run's metadata."""
        (server_id,) = await self._connection.script("renew", 0)
        return str(server_id.decode())

    def _blob(self, kind: str, tid: TrajectoryId, nonce: str, frame: bytes) -> tuple[str, Command]:
        """A name, and the command that stores the frame under it until a script has recorded it."""
        name = blob_name(kind, tid, nonce, self.payload_shards)
        return name, ("SET", self._connection.keys.blob(name), frame, "PX", int(1000 * self.payload_ttl_s))

    async def _keep(self, name: str, *, is_accepted: bool) -> None:
        """On another shard, where scripts do not reach: no time to live any more. Else the script has done it."""
        if is_accepted and self.payload_shards > 1:
            await self._connection.execute("PERSIST", self._connection.keys.blob(name))

    async def _fetched(self, granted: "Sequence[_Granted]", ttl_s: float) -> tuple[Lease, ...]:
        """As `_fetch`; what cannot be fetched is handed back, or nobody would have it until it expires."""
        try:
            return await self._fetch(granted, ttl_s)
        except HeadwayError:
            members = [part for one in granted for part in (str(one.tid), one.token)]
            with suppress(BrokerError):
                await self._connection.script("release", *members)
            raise

    async def _fetch(self, granted: "Sequence[_Granted]", ttl_s: float) -> tuple[Lease, ...]:
        """The leases with their prompts and segments. What is damaged is reported; its lease, or its segments, go."""
        if not granted:
            return ()
        keys, groups = self._connection.keys, sorted({one.tid.group for one in granted})
        commands: list[Command] = [("MGET", *(keys(f"prompt:{group}") for group in groups))]
        commands += [("GET", keys.blob(name)) for one in granted for name in one.segments]
        blobs, *segments = await self._connection.pipeline(commands)
        prompts = {group: await self._prompt(group, blob) for group, blob in zip(groups, blobs, strict=True)}
        leases, left = [], iter(segments)
        for one in granted:
            frames = [next(left) for _ in one.segments]
            prompt = prompts[one.tid.group]
            if prompt is not None:  # else the group was settled since, or lost, and the lease with it
                lease = Lease(tid=one.tid, token=one.token, ttl_s=ttl_s, prompt=prompt)
                leases.append(await self._with_segments(lease, frames))
        return tuple(leases)

    async def _prompt(self, group: str, blob: bytes | None) -> Prompt | None:
        try:
            return None if blob is None else decode(blob, Prompt)
        except SchemaMismatchError:
            raise  # it is we who are wrong here
        except FrameError as error:
            await self._connection.script("lose", group, str(error), (blob or b"")[:_HEAD_BYTES])
            return None

    async def _with_segments(self, lease: Lease, frames: Sequence[bytes | None]) -> Lease:
        segments: list[Segment] = []
        for frame in frames:
            try:
                segments.append(_decode_next(lease.tid, segments, frame))
            except FrameError as error:
                head = (frame or b"")[:_HEAD_BYTES]
                await self._connection.script("discard", str(lease.tid), lease.token, str(error), head)
                return lease
        return Lease(tid=lease.tid, token=lease.token, ttl_s=lease.ttl_s, prompt=lease.prompt, segments=tuple(segments))

    def _evicting(self, size: int) -> BrokerError:
        return BrokerError(
            f"The server at {self._connection.url} loses blobs of {size} bytes as soon as they are stored: its "
            "maxmemory-policy must be noeviction."
        )


@dataclass(frozen=True)
class _Granted:
    """A lease as the script tells it."""

    tid: TrajectoryId
    token: str
    segments: tuple[str, ...]
    """Names of their blobs."""

    @classmethod
    def read(cls, reply: Sequence[Any]) -> "_Granted":
        member, token, *segments = reply
        return cls(parse_tid(member), token.decode(), tuple(name.decode() for name in segments))


def parse_tid(member: bytes) -> TrajectoryId:
    """The id that a script names `group:round:sample`."""
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
    return segment


def _steps(spans: Sequence[VersionSpan]) -> list[Argument]:
    """The oldest step, then for each incarnation whose weights sampled it: the incarnation and its newest step."""
    newest = {version.incarnation: version.step for version in sorted(span.version for span in spans)}
    return [oldest_step(spans), *(number for pair in newest.items() for number in pair)]


def _members(leases: Sequence[Lease]) -> list[str]:
    return [argument for lease in leases for argument in (str(lease.tid), lease.token)]
