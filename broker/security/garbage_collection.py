"""The learner frees orphaned keys, which no process needs: a hostile worker could keep the server's memory full.

A worker's user may store blobs, and write keys whose names should contain a secret that it does not know: access
control checks names, not sizes. So the learner looks through the server, once a minute and whenever memory runs short,
and frees

    hidden keys             without the secret of their run
    payloads and segments   that no group holds, after a minute (at once where memory is short: a worker that has just
                            stored one stores it again), or with no time to live, or too long a one; and those that are
                            larger than recorded, which are then generated again
    markers of durability   that are not empty
    faults of workers       that are longer than a worker of Headway writes them, or have no time to live
    all of these            under a name that no run has

One function judges and frees each key of the run, so that a blob that a worker has recorded meanwhile stays. On other
shards, which functions cannot reach, age decides: a worker records a blob within ten seconds of storing it.
A collection over 20,000 recorded payloads takes the server 0.15 s of processor time, and holds up no client for more
than a few milliseconds at a time.
"""

import asyncio
import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from redis.exceptions import NoPermissionError

from headway.broker.config import BlobStorage
from headway.broker.connection.connection import Argument, Connection, KeyPage
from headway.broker.connection.server_traits import fields_of
from headway.broker.errors import BrokerError, HeadwayError
from headway.broker.keys import PREFIX, Keys, is_name
from headway.broker.schema import Owner

log = logging.getLogger(__name__)

EVERY_S = 60.0
_LOOK_S = 5.0
"""The learner asks this often how full the server is."""
_PAUSE_S = 2.0
"""The shortest time between two collections; it grows while they do not help."""
_SHORT_OF_MEMORY = 0.85
"""The share of maxmemory above which memory counts as short."""
_PATIENCE_S = 60.0
"""The learner waits so long for a worker to record a blob that it stored: the worker may have been stopped
meanwhile."""
_SHORT_PATIENCE_S = 20.0
"""The learner waits only so long where memory is short, on other shards: twice what a worker's request may take."""
_OWN_AT_A_TIME, _ON_A_SHARD_AT_A_TIME = 500, 100
_KEY = re.compile(rb"headway:\{([^}]*)\}:(.*)", re.DOTALL)
_BLOB_ON_A_SHARD = re.compile(rb"headway:\{[^}/]*/(\d+)\}:((?:payload|segment):[^}]+:\d+:\d+:[\w.-]+)", re.DOTALL)
_SIGNS_OF_A_RUN = ("identity", "verbs", "config", "secret")
_GONE, _NOT_RECORDED = -2, -1
_OF_WORKERS = re.compile(rb"(hidden|payload|segment):|fault:[0-9a-f]$|durable$|.*\}", re.DOTALL)
"""The keys that a worker's user may write, by the patterns of its rights."""


@dataclass(frozen=True)
class FreedKeys:
    """The keys and bytes that a collection has freed."""

    keys: int = 0
    bytes: int = 0
    foreign: int = 0
    """The keys among them that no worker of Headway leaves, even when it dies."""

    def __add__(self, other: "FreedKeys") -> "FreedKeys":
        return FreedKeys(self.keys + other.keys, self.bytes + other.bytes, self.foreign + other.foreign)


class GarbageCollector:
    """The learner's garbage collection on the server."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._own, self._shard = (f"{PREFIX}{{{connection.run}{end}".encode() for end in ("}:", "/"))
        self._collecting: asyncio.Task[None] | None = None
        self._said = ""
        self.storage = BlobStorage()
        """The way in which workers store blobs; the caller sets it before the first collection."""

    async def begin(self, owner: Owner) -> None:
        """Collects from now on until `end`. Where memory is short already it returns after the first collection."""
        await self.end()
        if await self.is_short_of_memory():
            await self._try_to_collect(owner)
        self._collecting = asyncio.create_task(self._collect_on(owner))

    async def end(self) -> None:
        """Stops collecting at once. Idempotent."""
        if self._collecting is not None:
            self._collecting.cancel()
            await asyncio.wait({self._collecting})
            self._collecting = None

    async def collect(self, owner: Owner, *, is_short: bool = False) -> FreedKeys:
        """Looks through the server once. With `is_short`, as memory is short, it does not wait until workers have
        recorded their blobs. Raises FencedError, and BrokerError where this user may not look."""
        request, freed = _Collection(owner, is_short), FreedKeys()
        own = list[bytes]()
        async for page in self._connection.pages(f"{PREFIX}{{*"):
            freed += await self._collect_page(request, page, own)
        for names in _batched(sorted(own), _OWN_AT_A_TIME):  # segments of a sample are looked up together
            freed += await self._collect_own(request, names)
        return freed

    async def is_short_of_memory(self) -> bool:
        """True where the server has refused a write since the last collection, or is about to."""
        if self._connection.lacks_memory.is_set():
            return True
        for info in map(fields_of, await self._connection.on_primaries(("INFO", "memory"))):
            if int(info["used_memory"]) > _SHORT_OF_MEMORY * int(info["maxmemory"]) > 0:
                return True
        return False

    async def _collect_on(self, owner: Owner) -> None:
        pause_s = _PAUSE_S
        while True:
            has_helped = await self._try_to_collect(owner)
            pause_s = _PAUSE_S if has_helped else min(2 * pause_s, EVERY_S)
            await asyncio.sleep(pause_s)
            await self._wait()

    async def _try_to_collect(self, owner: Owner) -> bool:
        """Collects. Returns False where memory is short and the collection could not help."""
        try:
            is_short = await self.is_short_of_memory()
            self._connection.lacks_memory.clear()
            freed = await self.collect(owner, is_short=is_short)
        except HeadwayError as error:
            self._complain(error)
            return True
        self._tell(freed)
        return not is_short or freed.keys > 0

    async def _wait(self) -> None:
        """Waits for the next minute, or until memory runs short."""
        with suppress(TimeoutError):
            async with asyncio.timeout(EVERY_S):
                while True:
                    with suppress(BrokerError):
                        if await self.is_short_of_memory():
                            return
                    with suppress(TimeoutError):
                        async with asyncio.timeout(_LOOK_S):
                            await self._connection.lacks_memory.wait()

    def _tell(self, freed: FreedKeys) -> None:
        if freed.keys:
            log.info("%d keys of %d bytes that no process needs were freed on the server.", freed.keys, freed.bytes)
        if freed.foreign:
            log.warning(
                "%d of %d keys (%d bytes) that were freed on the server at %s are none that workers of ours leave (nor"
                " a cluster's node, unless it lost its last writes): a process uses a worker's password to fill its"
                " memory. Change it. The embedded server: stop it, delete passwords/worker in its directory, start it"
                " and the workers again. Your own: tell it the `ACL SETUSER` and `CLIENT KILL` lines for the worker"
                " that `headway acl` prints.",
                freed.foreign,
                freed.keys,
                freed.bytes,
                self._connection.url,
            )

    def _complain(self, error: HeadwayError) -> None:
        """Logs an error once for each kind; the learner itself reports a server that is away."""
        if isinstance(error.__cause__, NoPermissionError) and str(error) != self._said:
            self._said = str(error)
            log.warning("Keys that nobody needs cannot be freed: %s", error)
        log.debug("A garbage collection on the server failed: %s", error)

    async def _collect_page(self, request: "_Collection", page: KeyPage, own: list[bytes]) -> FreedKeys:
        """Frees the orphaned keys of a page that are not the run's own, and adds the names of the others to `own`."""
        on_shards, others = list[bytes](), list[bytes]()
        of_the_learner = self._connection.keys.hidden("").encode()
        for key in page.keys:
            match = _KEY.fullmatch(key)
            if match is None or not _OF_WORKERS.match(match[2]) or key.startswith(of_the_learner):
                continue
            if key.startswith(self._own):
                own.append(match[2])
            elif key.startswith(self._shard):
                on_shards.append(key)
            else:
                others.append(key)
        freed = FreedKeys()
        for keys in _batched(sorted(on_shards), _ON_A_SHARD_AT_A_TIME):
            freed += await self._collect_shard(request, page, keys)
        return freed + await self._free(page, await self._of_no_run(others), foreign=True)

    async def _collect_own(self, request: "_Collection", names: Sequence[bytes]) -> FreedKeys:
        patience_ms = 0 if request.is_short else int(1000 * _PATIENCE_S)
        settings, freed = (self._ttl_ms, patience_ms), FreedKeys()
        while names:
            keys, freed_bytes, foreign, judged = await self._ask(request, "free_orphans", *settings, *names)
            freed, names = freed + FreedKeys(keys, freed_bytes, foreign), names[judged:]
        return freed

    async def _collect_shard(self, request: "_Collection", page: KeyPage, keys: Sequence[bytes]) -> FreedKeys:
        """Frees keys by age, on a node whose functions do not know which blobs are recorded."""
        blobs = {key: match[1] + b"/" + match[2] for key in keys if (match := _BLOB_ON_A_SHARD.fullmatch(key))}
        markers = [key for key in keys if key.endswith(b"}:durable") and key.count(b"}") == 1]
        sizes = await self._connection.ask(page, [("STRLEN", key) for key in (*blobs, *markers)])
        left_ms = await self._connection.ask(page, [("PTTL", key) for key in blobs])
        said = await self._bytes_said(request, list(blobs.values()))  # asked last, as a record is never taken back
        harmless = {key for key, size in zip(markers, sizes[len(blobs) :], strict=True) if size == 0}
        foreign = [key for key in keys if key not in blobs and key not in harmless]
        left_over, recorded = list[bytes](), list[bytes]()
        for key, size, left, bytes_said in zip(blobs, sizes[: len(blobs)], left_ms, said, strict=True):
            is_timed = 0 <= left <= self._ttl_ms
            if left == _GONE or (is_timed and self._ttl_ms - left < 1000 * request.patience_s):
                continue
            if bytes_said == _NOT_RECORDED:
                (left_over if is_timed else foreign).append(key)
            elif size > bytes_said:
                foreign.append(key)
            elif left >= 0:
                recorded.append(key)
        await self._connection.ask(page, [("PERSIST", key) for key in recorded])
        return await self._free(page, left_over, foreign=False) + await self._free(page, foreign, foreign=True)

    async def _bytes_said(self, request: "_Collection", names: Sequence[bytes]) -> list[int]:
        """Returns the bytes that were recorded for each blob."""
        said = list[int]()
        while len(said) < len(names):
            said += await self._ask(request, "recorded", *names[len(said) :])
        return said

    async def _free(self, page: KeyPage, keys: Sequence[bytes], *, foreign: bool) -> FreedKeys:
        sizes = await self._connection.ask(page, [("MEMORY", "USAGE", key) for key in keys])
        await self._connection.ask(page, [("UNLINK", key) for key in keys])
        return FreedKeys(len(keys), sum(size or 0 for size in sizes), len(keys) if foreign else 0)

    async def _of_no_run(self, keys: Sequence[bytes]) -> list[bytes]:
        """Returns the keys under a name that no run has; none where this user may not look at other runs."""
        of = {key: match[1].partition(b"/")[0].decode(errors="replace") for key in keys if (match := _KEY.match(key))}
        names = sorted({name for name in of.values() if is_name(name)})
        try:
            signs = [[Keys(name)(sign) for sign in _SIGNS_OF_A_RUN] for name in names]
            found = await self._connection.pipeline([("EXISTS", *sign) for sign in signs])
        except BrokerError as error:
            if isinstance(error.__cause__, NoPermissionError):
                return []
            raise
        runs = {name for name, number in zip(names, found, strict=True) if number}
        return [key for key, name in of.items() if name not in runs]

    async def _ask(self, request: "_Collection", verb: str, *arguments: Argument) -> list[int]:
        """Asks any server that answers, even a restarted one: it may be too full for a re-assertion before it is
        freed."""
        owner = request.owner
        reply: list[int] = await self._connection.script(verb, owner.incarnation, owner.token, "", *arguments)
        return reply

    @property
    def _ttl_ms(self) -> int:
        return int(1000 * self.storage.payload_ttl_s)


@dataclass(frozen=True)
class _Collection:
    """The terms of one collection."""

    owner: Owner
    is_short: bool
    """True where memory is short."""

    @property
    def patience_s(self) -> float:
        """The age from which a key is freed where age decides."""
        return _SHORT_PATIENCE_S if self.is_short else _PATIENCE_S


def _batched(keys: Sequence[bytes], size: int) -> Iterator[Sequence[bytes]]:
    for start in range(0, len(keys), size):
        yield keys[start : start + size]
