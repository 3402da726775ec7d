"""The learner stores weights in the broker for workers that pull them: blobs in pieces, with a time to live.

They are listed before they come, and their bytes count against `max_bytes` from then on, so the server never holds
any uncounted ones. A claim frees those of the earlier learner.
"""

import itertools
from collections.abc import Mapping
from typing import NamedTuple

from headway.broker.connection.connection import Connection
from headway.broker.owner import Owner

PIECE_BYTES = 1 << 20
"""The most that one command carries: with more, a slow line could not meet the deadline of a request."""
_TTL_S = 3600
"""Every version renews it. Where a step takes longer, workers fetch from the learner meanwhile."""


class Room(NamedTuple):
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

    async def room(self) -> Room:
        """Returns the room as of now. For the run's learner."""
        held = await self._connection.execute(
            "HMGET", self._connection.keys.hidden("meta"), "max_bytes", "payload_bytes"
        )
        return Room(*(int(value or 0) for value in held))


def _piece(name: str, start: int) -> str:
    return f"archive:{name}:{start // PIECE_BYTES}"


def _pieces(name: str, nbytes: int) -> list[str]:
    return [_piece(name, start) for start in range(0, nbytes, PIECE_BYTES)]
