"""A worker hands in several finished samples in one call, and keeps each until the server cannot lose it.

It stores a payload or segment for a while, under a name that a script then records (`Blobs`). A server that
fsyncs once a second, or a replica that takes over, can lose what it has acknowledged. The worker submits it again; a
trajectory that was not lost is then a duplicate, and free (`UnconfirmedSubmissions`).
"""

import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from msgspec.structs import replace

from headway.broker.config import BlobStorage
from headway.broker.connection.connection import Argument, Command, Connection
from headway.broker.connection.round_trips import SharedCalls
from headway.broker.errors import BrokerError
from headway.broker.keys import blob_name
from headway.broker.schema import Lease, Trajectory, TrajectoryId, VersionSpan, WeightVersion
from headway.broker.wire.codec import encode_trajectory

UNCONFIRMED_BYTES = 64 << 20
"""Beyond this the worker forgets the oldest submissions: if the server loses one of them, it is generated again."""
UNCONFIRMED_S = 10.0
"""The age at which a submission counts as durable where the server cannot say: several times what `everysec` loses."""


@dataclass(frozen=True)
class Submission:
    """A finished sample as it was handed in."""

    lease: Lease
    payload: bytes
    measures: bytes
    """The payload's measures, as the verb `submit` takes them (`measures_of`)."""
    at: float


class UnconfirmedSubmissions:
    """Submissions in the order in which they were accepted."""

    def __init__(self) -> None:
        self._kept: dict[str, Submission] = {}
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, submission: Submission) -> None:
        """Keeps a submission that the server has accepted. Idempotent."""
        if submission.lease.token in self._kept:
            return
        self._kept[submission.lease.token] = submission
        self._bytes += len(submission.payload)
        while self._bytes > UNCONFIRMED_BYTES:
            self.forget([next(iter(self._kept.values()))])

    def all(self) -> list[Submission]:
        """Returns the submissions, oldest first."""
        return list(self._kept.values())

    def forget(self, submissions: Sequence[Submission]) -> None:
        """Forgets submissions that are durable or void."""
        for submission in submissions:
            if self._kept.pop(submission.lease.token, None) is not None:
                self._bytes -= len(submission.payload)

    def forget_old(self) -> None:
        """Forgets all that the server has had ample time to make durable."""
        latest = time.monotonic() - UNCONFIRMED_S
        self.forget([submission for submission in self.all() if submission.at < latest])


class Blobs:
    """The blobs of one worker process."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.storage = BlobStorage()

    def store(self, kind: str, tid: TrajectoryId, nonce: str, frame: bytes) -> tuple[str, Command]:
        """Returns a name, and the command that stores the frame under it until a script has recorded it."""
        name = blob_name(kind, tid, nonce, self.storage.payload_shards)
        key, ttl_ms = self._connection.keys.blob(name), int(1000 * self.storage.payload_ttl_s)
        return name, ("SET", key, frame, "PX", ttl_ms)

    async def keep(self, names: list[str]) -> None:
        """Keeps recorded blobs: on other shards, where scripts do not reach, they had a time to live until now."""
        if self.storage.payload_shards > 1 and names:
            await self._connection.pipeline([("PERSIST", self._connection.keys.blob(name)) for name in names])

    def lost(self, size: int) -> BrokerError:
        """Returns the error for a blob that was gone each time that the script looked for it."""
        return BrokerError(
            f"The server at {self._connection.url} loses blobs of {size} bytes as soon as they are stored: its "
            "maxmemory-policy must be noeviction."
        )


def shard_of(name: str) -> str:
    """Returns the beginning `N/` of a payload's name, which tells its shard; "" where that is the run's own."""
    return name[: name.index("/") + 1] if name[0] != "p" else ""


ATTEMPTS = 3
"""The number of times that the worker stores a blob that is gone when the script looks for it."""
_DURABLE_TIMEOUT_MS = 2000
_CALLS_AT_A_TIME = 2
"""Calls under way: while the server works on one, the worker prepares the next."""
_SHARED_BY = 16
_SHARED_BYTES = 1 << 20
"""About the most bytes that wait for the same reply."""
_OF_ONE_VERSION = struct.Struct(">4I")


class SubmitOutcome(StrEnum):
    """The server's answer to a submission."""

    ACCEPTED = "accepted"
    DUPLICATE = "duplicate"
    """This very submission was accepted before; its first reply was lost."""
    FENCED = "fenced"
    """The lease is no longer held, the group's round is over, or a rewind has abandoned the weights: the work is
    void."""


class Submissions:
    """The submissions of one worker process."""

    def __init__(self, connection: Connection, blobs: Blobs) -> None:
        self._connection = connection
        self._blobs = blobs
        self._unconfirmed = UnconfirmedSubmissions()
        self._server_id = ""
        self._shared = SharedCalls(
            self._hand_in,
            at_a_time=_CALLS_AT_A_TIME,
            most=_SHARED_BY,
            size=lambda submission: len(submission.payload),
            most_size=_SHARED_BYTES,
        )

    def __len__(self) -> int:
        """The number of submissions that the server may still forget."""
        return len(self._unconfirmed)

    async def note_server(self) -> None:
        """Notes, before the first lease, which server may forget submissions."""
        if not self._server_id:
            self._server_id = await self._ask_server_id()

    async def submit(self, lease: Lease, trajectory: Trajectory) -> SubmitOutcome:
        """Submits a finished sample. Raises FrameError where its parts contradict each other."""
        frame = encode_trajectory(replace(trajectory, identity=lease.identity))
        measures = measures_of(frame, trajectory.spans)
        submission = Submission(lease, frame, measures, time.monotonic())
        return await self._shared.send(submission)

    async def confirm(self) -> int:
        """Forgets submissions that are durable now. After the server restarted, or a replica took over, it
        submits again what may have been lost, and returns how many submissions those were."""
        if not len(self._unconfirmed):
            return 0
        submissions = self._unconfirmed.all()
        is_durable = await self._connection.make_durable(self._blobs.storage.replicas, _DURABLE_TIMEOUT_MS)
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

    async def close(self) -> None:
        """Cancels the submissions that callers still wait for."""
        await self._shared.close()

    async def _hand_in(self, submissions: Sequence[Submission], *, is_again: bool = False) -> list[SubmitOutcome]:
        left, outcomes = list(submissions), dict[str, SubmitOutcome]()
        for _ in range(ATTEMPTS):
            left = await self._try(left, outcomes, is_again)
            if not left:
                return [outcomes[submission.lease.token] for submission in submissions]
        raise self._blobs.lost(len(left[0].payload))

    async def _try(
        self, submissions: Sequence[Submission], outcomes: dict[str, SubmitOutcome], is_again: bool
    ) -> list[Submission]:
        """Adds the outcomes to `outcomes`, and returns the submissions whose payload was gone before the script
        recorded it."""
        stores, names, arguments = list[Command](), list[str](), list[Argument]([int(is_again)])
        for submission in submissions:
            lease, payload = submission.lease, submission.payload
            # Named after the lease: however often it is sent, there is one copy, and a duplicate loses its TTL, too.
            name, store = self._blobs.store("payload", lease.tid, lease.token, payload)
            names.append(name)
            stores.append(store)
            arguments += (str(lease.tid), lease.token, shard_of(name), submission.measures)
        replies = await self._connection.script("submit", *arguments, before=stores)
        gone, kept = list[Submission](), list[str]()
        for submission, name, reply in zip(submissions, names, replies, strict=True):
            if reply == b"no payload":
                gone.append(submission)
                continue
            outcomes[submission.lease.token] = outcome = SubmitOutcome(reply.decode())
            if outcome is not SubmitOutcome.FENCED:
                kept.append(name)
                self._unconfirmed.keep(submission)  # here, as its caller may be gone
        await self._blobs.keep(kept)
        return gone

    async def _submit_again(self, submissions: Sequence[Submission]) -> int:
        accepted = 0
        for submission in submissions:
            (outcome,) = await self._hand_in([submission], is_again=True)
            accepted += outcome is SubmitOutcome.ACCEPTED
            if outcome is SubmitOutcome.FENCED:
                self._unconfirmed.forget([submission])
        return accepted

    async def _ask_server_id(self) -> str:
        """Returns the id of the server that holds the run's metadata."""
        server_id = await self._connection.script("server", absent=b"")
        return str(server_id.decode())


def measures_of(frame: bytes, spans: Sequence[VersionSpan]) -> bytes:
    """Returns what a script is told of a blob (`measures` in `calls.lua`): its bytes, then the incarnation,
    the step and the tokens of each version that sampled it."""
    if len(spans) == 1:
        one, version = spans[0], spans[0].version
        return _OF_ONE_VERSION.pack(len(frame), version.incarnation, version.step, one.end - one.start)
    tokens = dict[WeightVersion, int]()
    for span in spans:
        tokens[span.version] = tokens.get(span.version, 0) + span.end - span.start
    numbers = [number for one, count in tokens.items() for number in (one.incarnation, one.step, count)]
    return struct.pack(f">{1 + len(numbers)}I", len(frame), *numbers)
