"""The learner offers and announces weight versions by compare-and-set, and stores the blobs that go with them:
manifests, the broadcast group, the model's files. It also archives weights as blobs (`ArchivedBlobs`).

In the rendezvous store the learner and the members of a broadcast group exchange values while the group forms:

    learner   writes `meeting:NAME`, which no worker may write: its values, and who the members are
    members   write `joining:NAME:MEMBER`, each by its own session (`broker/scripts/rendezvous.lua`)
    server    notifies workers, in the stream `bell`, of every version that the learner offers or announces, and of
              every new group

Promised: a value is read as that of its writer, and no process writes one in another's name; values of one rendezvous
are never read in another; a rendezvous is gone a while after its last write. Not promised: that values outlive the
server, nor that a worker gets every notification: a waiting worker looks from time to time in any case.
"""

import asyncio
import itertools
import logging
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

from msgspec.structs import replace

from headway.broker.connection.connection import Argument, Command, Connection
from headway.broker.errors import FrameError, SchemaMismatchError, VersionRegressionError
from headway.broker.schema import Owner, WeightVersion
from headway.broker.schema.weights import BroadcastGroup, ModelFiles, WeightManifest
from headway.broker.wire.codec import decode, encode

log = logging.getLogger(__name__)

_STAGED_TTL_S = 60
T = TypeVar("T", WeightManifest, BroadcastGroup, ModelFiles)


class VersionsPeek(NamedTuple):
    """The newest versions, and which broadcast group is stored."""

    offered: WeightVersion | None
    announced: WeightVersion | None
    group: bytes | None
    """Another text whenever a group is stored, so that no worker reads all its members again and again."""


class Versions:
    """The run's weight versions, and the broadcast group that receives them."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._put: dict[str, bytes] = {}
        """The blobs that this client stored, to store again after a server lost its last second."""
        self._storing = asyncio.Lock()
        """Stores one blob at a time: an old blob that is restored must not replace a newer one."""

    async def offer(self, owner: Owner, manifest: WeightManifest) -> None:
        """Offers a version before its broadcast: the members of the manifest's group epoch start receiving. Idempotent.

        Raises VersionRegressionError unless newer than everything announced and offered, FencedError.
        """
        await self._swap("offered", owner, manifest)

    async def announce(self, owner: Owner, manifest: WeightManifest) -> None:
        """Announces that a version is complete and may be used; admission follows it. Idempotent; raises as `offer`
        does."""
        await self._swap("announced", owner, manifest)

    async def offered(self) -> WeightManifest | None:
        """Returns the offered manifest. This and the next two raise ForeignRunError: equal versions of two runs are
        different weights."""
        return await self._get("manifest:offered", WeightManifest)

    async def announced(self) -> WeightManifest | None:
        return await self._get("manifest:announced", WeightManifest)

    async def peek(self) -> "VersionsPeek":
        """Returns what the learner says of its weights, in one cheap round trip."""
        _, *held, group = await self._connection.script("peek", absent=[None] * 6)
        return VersionsPeek(_version(held[0], held[1]), _version(held[2], held[3]), group)

    async def current(self) -> tuple[WeightVersion | None, WeightVersion | None]:
        """Returns (offered, announced)."""
        offered, announced, _ = await self.peek()
        return offered, announced

    async def put_group(self, owner: Owner, group: BroadcastGroup) -> None:
        await self._store("broadcast", owner, encode(replace(group, identity=self._connection.identity)))

    async def group(self) -> BroadcastGroup | None:
        return await self._get("broadcast", BroadcastGroup)

    async def put_model(self, owner: Owner, files: ModelFiles) -> None:
        await self._store("model", owner, encode(files))

    async def model(self) -> ModelFiles | None:
        return await self._get("model", ModelFiles)

    def forget(self) -> None:
        """Forgets what was stored under an earlier claim, which this owner may not restore."""
        self._put.clear()

    async def restore(self, owner: Owner) -> None:
        """Stores again what this client stored last (after a re-assertion)."""
        async with self._storing:
            for key, blob in list(self._put.items()):
                if key == "manifest:announced":
                    # The server may have kept a newer announcement whose reply was lost in the crash: that one stays.
                    with suppress(VersionRegressionError):
                        await self._swap_now("announced", owner, decode(blob, WeightManifest))
                else:
                    await put_blob(self._connection, owner, key, blob)

    async def _swap(self, what: str, owner: Owner, manifest: WeightManifest) -> None:
        async with self._storing:
            await self._swap_now(what, owner, manifest)

    async def _swap_now(self, what: str, owner: Owner, manifest: WeightManifest) -> None:
        manifest = replace(manifest, identity=self._connection.identity)
        blob, staged = encode(manifest), f"stage:{secrets.token_hex(8)}"
        version = manifest.version
        await self._connection.learner_script(
            "version",
            owner,
            what,
            version.incarnation,
            version.step,
            staged,
            before=[("SET", self._connection.keys(staged), blob, "EX", _STAGED_TTL_S)],
        )
        if what == "announced":
            self._put["manifest:announced"] = blob

    async def _store(self, key: str, owner: Owner, blob: bytes) -> None:
        async with self._storing:
            await put_blob(self._connection, owner, key, blob)
            self._put[key] = blob

    async def _get(self, key: str, kind: type[T]) -> T | None:
        blob = await self._connection.execute("GET", self._connection.keys(key))
        try:
            if blob is None:
                return None
            held = decode(blob, kind)
            if not isinstance(held, ModelFiles):
                self._connection.check_identity(held.identity)
            return held
        except SchemaMismatchError:
            raise  # two versions of Headway in one run: the operator must act
        except FrameError as error:
            log.warning("%s of run %s is passed over until it is written again: %s", key, self._connection.run, error)
            return None


async def put_blob(connection: Connection, owner: Owner, key: str, blob: bytes, keep: int = 0) -> None:
    """Stores a blob under a key of the run, or with `keep` at the end of a list of that length, while `owner` still
    owns the run."""
    staged = f"stage:{secrets.token_hex(8)}"
    await connection.learner_script(
        "put",
        owner,
        key,
        staged,
        keep,
        before=[("SET", connection.keys(staged), blob, "EX", _STAGED_TTL_S)],
    )


def _version(incarnation: bytes | None, step: bytes | None) -> WeightVersion | None:
    return None if incarnation is None or step is None else WeightVersion(int(incarnation), int(step))


PIECE_BYTES = 1 << 20
"""The most that one command carries: with more, a slow line could not meet the deadline of a request."""
_TTL_S = 3600
"""Every version renews it. Where a step takes longer, workers fetch from the learner meanwhile."""


class ArchiveRoom(NamedTuple):
    """The bytes that a run may store, and those that it has stored for training."""

    max_bytes: int
    payload_bytes: int


class ArchivedBlobs:
    """The archive of one run."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def keep(self, owner: Owner, sizes: Mapping[str, int]) -> set[str]:
        """Lists these blobs with their sizes in bytes, frees all others, and returns which are stored whole. Raises
        FencedError."""
        pieces = {name: _pieces(name, nbytes) for name, nbytes in sizes.items()}
        listed = list(itertools.chain.from_iterable(pieces.values()))
        flags = await self._connection.learner_script("archive", owner, _TTL_S, sum(sizes.values()), *listed)
        there = {piece for piece, is_there in zip(listed, flags, strict=True) if is_there}
        return {name for name, its in pieces.items() if there.issuperset(its)}

    async def put(self, name: str, start: int, piece: bytes) -> None:
        """Stores the piece of a listed blob that begins at `start`, a multiple of PIECE_BYTES."""
        key = self._connection.keys(_piece(name, start))
        await self._connection.execute("SET", key, piece, "EX", _TTL_S)

    async def read(self, name: str, start: int, nbytes: int) -> bytes:
        """Reads at most so many bytes, up to the end of the piece; empty where the blob is gone."""
        first = start % PIECE_BYTES
        last = min(first + nbytes, PIECE_BYTES) - 1
        found: bytes = await self._connection.execute(
            "GETRANGE", self._connection.keys(_piece(name, start)), first, last
        )
        return found

    async def room(self) -> ArchiveRoom:
        """Returns the room as of now. For the run's learner."""
        held = await self._connection.execute(
            "HMGET", self._connection.keys.hidden("meta"), "max_bytes", "payload_bytes"
        )
        return ArchiveRoom(*(int(value or 0) for value in held))


def _piece(name: str, start: int) -> str:
    return f"archive:{name}:{start // PIECE_BYTES}"


def _pieces(name: str, nbytes: int) -> list[str]:
    return [_piece(name, start) for start in range(0, nbytes, PIECE_BYTES)]


LIFETIME_S = 3600
"""A rendezvous is forgotten so long after its last write: many times what forming a group may take. A learner removes
its own itself."""
LEARNER = ""
"""This name is the learner's; no worker can have it."""
NUMBERS = "+"
"""Under this name stand the numbers that all members add to."""
_LONGEST_WAIT_S = 2.0


class RendezvousStore:
    """The values of one run's rendezvous; each has a unique name. `who` is LEARNER, or the worker that calls."""

    def __init__(self, connection: Connection, timeout_s: float) -> None:
        self._connection = connection
        self._wait_ms = int(1000 * min(_LONGEST_WAIT_S, timeout_s / 2))

    async def create(self, name: str, members: Sequence[str], words: dict[str, bytes]) -> None:
        """Creates a rendezvous with these members and first values. For the learner."""
        said = [part for word in words.items() for part in word]
        await self._write(name, ("HSET", self._by_learner(name), "members", " ".join(members), *said))

    async def set(self, name: str, who: str, key: str, value: bytes) -> bool:
        """Writes a value under `key`. Idempotent. Returns False where `who` has no part in the rendezvous, or is
        another process."""
        if who == LEARNER:
            await self._write(name, ("HSET", self._by_learner(name), key, value))
            return True
        return await self._set(name, who, "set", key, value) is not None

    async def set_once(self, name: str, who: str, key: str, value: bytes) -> bytes | None:
        """Writes a member's value where it has none under `key` yet, and returns the one that stands then. Idempotent.
        Returns None where `set` returns False."""
        said: bytes | None = await self._set(name, who, "once", key, value)
        return said

    async def add(self, name: str, who: str, key: str, amount: int) -> int | None:
        """Adds to a number that all share, and returns the sum. It counts twice where an answer is lost. Returns None
        where `set` returns False."""
        if who == LEARNER:
            return int((await self._write(name, ("HINCRBY", self._numbers(name), key, amount)))[0])
        counted: int | None = await self._set(name, who, "add", key, amount)
        return counted

    async def get(self, name: str, words: Sequence[tuple[str, str]]) -> list[bytes | None]:
        """Returns the value of each (writer, key); None where there is none yet. The writer may be NUMBERS."""
        asked = [part for word in words for part in word]
        heard: list[bytes | None] = await self._connection.script("rendezvous_get", name, *asked)
        return heard

    async def delete(self, name: str, who: str, words: Sequence[tuple[str, str]]) -> int:
        """Deletes values of (writer, key), a member its own alone, and returns how many there were."""
        if who == LEARNER:
            return sum(await self._connection.pipeline([("HDEL", self._of(name, by), key) for by, key in words]))
        return sum([await self._set(name, who, "drop", key, b"") or 0 for by, key in words if by == who])

    async def remove(self, name: str, members: Sequence[str]) -> None:
        """Removes the rendezvous with its values. For the learner; idempotent."""
        said = [self._of(name, who) for who in (LEARNER, NUMBERS, *members)]
        await self._connection.execute("UNLINK", *said)

    async def wait_for_notification(self, seen: bytes) -> bytes:
        """Returns the id of a notification after `seen` (b"0": of any), or `seen` where none comes for a while."""
        stream = self._connection.keys("bell")
        reply = await self._connection.execute_alone("XREAD", "BLOCK", self._wait_ms, "STREAMS", stream, seen)
        if not reply:
            return seen
        ((_, notifications),) = reply.items() if isinstance(reply, dict) else reply
        return bytes(notifications[-1][0])

    async def _set(self, name: str, who: str, manner: str, key: str, value: Argument) -> Any:
        return await self._connection.script("rendezvous_set", name, who, self._connection.session, manner, key, value)

    async def _write(self, name: str, command: Command) -> Any:
        return await self._connection.pipeline([command, ("EXPIRE", command[1], LIFETIME_S)])

    def _of(self, name: str, who: str) -> str:
        if who == LEARNER:
            return self._by_learner(name)
        return self._numbers(name) + ("" if who == NUMBERS else f":{who}")

    def _by_learner(self, name: str) -> str:
        return self._connection.keys(f"meeting:{name}")

    def _numbers(self, name: str) -> str:
        return self._connection.keys.hidden(f"joining:{name}")
