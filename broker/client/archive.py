"""Weights that lie in the broker for whoever pulls: blobs in pieces, with a time to live.

They are listed before they come, and their bytes count against `max_bytes` from then on, so the server never holds any
that nobody has counted. A claim frees what the learner before has left.
"""

import itertools
from collections.abc import Mapping
from typing import NamedTuple

from broker.connection.connection import Connection
from broker.owner import Owner

PIECE_BYTES = 1 << 20
"""What one command carries at most: with more, a slow line could not meet the deadline of a request."""
_TTL_S = 3600
"""Anew with every version. Whoever trains a step for longer has workers fetch from the learner meanwhile."""


class Room(NamedTuple):
    """What a run may store, in bytes, and what it has stored for training."""

    max_bytes: int
    payload_bytes: int


class ArchivedBlobs:
    """The archive of one run."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def keep(self, owner: Owner, sizes: Mapping[str, int]) -> set[str]:
        """These blobs, of so many bytes, and no others; which of them are there, whole. Raises FencedError."""
        pieces = {name: _pieces(name, nbytes) for name, nbytes in sizes.items()}
        listed = list(itertools.chain.from_iterable(pieces.values()))
        flags = await self._connection.learner_script("archive", owner, _TTL_S, sum(sizes.values()), *listed)
        there = {piece for piece, is_there in zip(listed, flags, strict=True) if is_there}
        return {name for name, its in pieces.items() if there.issuperset(its)}

    async def put(self, name: str, start: int, piece: bytes) -> None:
        """The piece of a listed blob that begins at `start`, a multiple of PIECE_BYTES."""
        key = self._connection.keys(_piece(name, start))
        await self._connection.execute("SET", key, piece, "EX", _TTL_S)

    async def read(self, name: str, start: int, nbytes: int) -> bytes:
        """At most so many bytes, to the end of the piece at most; empty where there is no such blob any more."""
        first = start % PIECE_BYTES
        last = min(first + nbytes, PIECE_BYTES) - 1
        found: bytes = await self._connection.execute(
            "GETRANGE", self._connection.keys(_piece(name, start)), first, last
        )
        return found

    async def room(self) -> Room:
        """As of now. For the run's learner."""
        held = await self._connection.execute(
            "HMGET", self._connection.keys.hidden("meta"), "max_bytes", "payload_bytes"
        )
        return Room(*(int(value or 0) for value in held))


def _piece(name: str, start: int) -> str:
    return f"archive:{name}:{start // PIECE_BYTES}"


def _pieces(name: str, nbytes: int) -> list[str]:
    return [_piece(name, start) for start in range(0, nbytes, PIECE_BYTES)]
