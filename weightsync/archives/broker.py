"""An archive in the server's memory, for weights that are small compared with `broker.max_bytes`, where learner and
workers share no file system."""

import asyncio
import threading
from collections.abc import Coroutine, Set
from typing import Any

from headway.broker import BlockingBroker, Broker
from headway.broker.client.weights import PIECE_BYTES
from headway.broker.errors import BrokerError, WeightSyncError
from headway.broker.schema import Owner
from headway.weightsync.limits import Deadline, RateLimiter
from headway.weightsync.transports.base import SupersededError, UnreachableError
from headway.weightsync.transports.threads import in_time

_SHARE = 2
"""The archive takes at most `broker.max_bytes` divided by this."""


class BrokerArchive:
    """Takes at most half of `broker.max_bytes`, and an anchor at most half of that: the next anchor is written while
    workers still read the one before."""

    def __init__(self, broker: BlockingBroker, owner: Owner) -> None:
        self._blocking = broker
        self._archive = broker.broker.archive
        self._owner = owner
        self._sizes: dict[str, int] = {}
        self._there: set[str] = set()
        self._lock = threading.Lock()

    def reserve(self, nbytes: int) -> None:
        """See Archive."""
        most = self._blocking.call(self._archive.room()).max_bytes // _SHARE // 2
        if nbytes > most:
            raise WeightSyncError(
                f"the weights are {nbytes} bytes, and the broker takes whole versions of at most {most}, a quarter of"
                " broker.max_bytes: raise it, or set weights.archive to a directory"
            )

    def put(self, name: str, data: memoryview, deadline: Deadline) -> None:
        """See Archive."""
        with self._lock:
            if name in self._there:
                return
            self._check_room(len(data))
            self._keep({**self._sizes, name: len(data)})
        for start in range(0, len(data), PIECE_BYTES):
            deadline.check(f"storing {start} of {len(data)} bytes in the broker")
            self._blocking.call(self._archive.put(name, start, bytes(data[start : start + PIECE_BYTES])))
        with self._lock:
            self._there.add(name)

    def keep_only(self, names: Set[str]) -> set[str]:
        """See Archive."""
        with self._lock:
            self._keep({name: nbytes for name, nbytes in self._sizes.items() if name in names})
            return set(self._there)

    def _check_room(self, nbytes: int) -> None:
        room = self._blocking.call(self._archive.room())
        held = sum(self._sizes.values())
        if held + nbytes > room.max_bytes // _SHARE or held + nbytes + room.payload_bytes > room.max_bytes:
            raise WeightSyncError(
                f"no room for {nbytes} bytes of weights in the broker beside {held} of them and {room.payload_bytes} of"
                f" samples, with broker.max_bytes={room.max_bytes}, of which weights may take half"
            )

    def _keep(self, sizes: dict[str, int]) -> None:
        self._there = self._blocking.call(self._archive.keep(self._owner, sizes))
        self._sizes = sizes


class BrokerReader:
    """Reads from the broker in any thread. Made in the thread of the broker's event loop, where its requests run."""

    def __init__(self, broker: Broker, timeout_s: float) -> None:
        self._archive = broker.archive
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()

    def read(self, name: str, data: memoryview, rate_limiter: RateLimiter, deadline: Deadline) -> None:
        """See ArchiveReader."""
        done = 0

        def read_into(rest: memoryview) -> int:
            nonlocal done
            piece = self._ask(self._archive.read(name, done, len(rest)), deadline)
            rest[: len(piece)] = piece
            done += len(piece)
            return len(piece)

        if rate_limiter.fill(data, read_into, deadline) < len(data):
            raise SupersededError(f"{name} is in the broker no longer, after {done} of {len(data)} bytes")

    def _ask(self, coroutine: Coroutine[Any, Any, bytes], deadline: Deadline) -> bytes:
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return in_time(future, self._timeout_s, deadline, "waiting for the broker")
        except BrokerError as error:
            raise UnreachableError(str(error)) from error
