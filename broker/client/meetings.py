"""The learner and the members of a broadcast group exchange words here, and workers wait at a bell for news.

    learner   says what lies in `meeting:NAME`, which no worker may write
    members   say what lies in `joining:NAME`, and hear both
    server    rings `bell` with every version that the learner offers or announces, and with every new group

Promised: where learner and members have said words under one key, the learner's is heard; words of one meeting are
never heard in another; a meeting is gone a while after its last word. Not promised: that words outlive the server, nor
that a worker hears every ring: a waiting worker looks from time to time in any case.
"""

from collections.abc import Sequence

from broker.connection.connection import Connection

LIFETIME_S = 3600
"""A meeting is forgotten so long after its last word: many times what forming a group may take. A learner ends its
meetings itself."""
_LONGEST_WAIT_S = 2.0


class Meetings:
    """Words of one run's meetings; each meeting has a unique name."""

    def __init__(self, connection: Connection, timeout_s: float) -> None:
        self._connection = connection
        self._wait_ms = int(1000 * min(_LONGEST_WAIT_S, timeout_s / 2))

    async def say(self, name: str, key: str, value: bytes, *, leads: bool) -> None:
        """Says a word under `key`; `leads` marks the learner's. Idempotent."""
        said = self._said(name, leads)
        await self._connection.pipeline([("HSET", said, key, value), ("EXPIRE", said, LIFETIME_S)])

    async def say_once(self, name: str, key: str, value: bytes) -> bytes:
        """Says a word as a member where none stands yet, and returns the word of the first member. Idempotent."""
        said = self._said(name, leads=False)
        commands = [("HSETNX", said, key, value), ("EXPIRE", said, LIFETIME_S), ("HGET", said, key)]
        return bytes((await self._connection.pipeline(commands))[-1])

    async def count(self, name: str, key: str, amount: int) -> int:
        """Adds to a number and returns the sum. It counts twice where an answer is lost."""
        said = self._said(name, leads=False)
        counted, _ = await self._connection.pipeline([("HINCRBY", said, key, amount), ("EXPIRE", said, LIFETIME_S)])
        return int(counted)

    async def hear(self, name: str, keys: Sequence[str]) -> list[bytes | None]:
        """Returns the word under each of `keys`; None where there is none yet."""
        by_learner, by_members = await self._connection.pipeline(
            [("HMGET", self._said(name, leads), *keys) for leads in (True, False)]
        )
        return [first if first is not None else second for first, second in zip(by_learner, by_members, strict=True)]

    async def forget(self, name: str, keys: Sequence[str], *, leads: bool) -> int:
        """Deletes the words under `keys`, the learner those of both sides, and returns how many there were."""
        places = (True, False) if leads else (False,)
        return sum(await self._connection.pipeline([("HDEL", self._said(name, place), *keys) for place in places]))

    async def end(self, name: str) -> None:
        """Ends the meeting and deletes its words. For the learner; idempotent."""
        await self._connection.execute("UNLINK", self._said(name, True), self._said(name, False))

    async def wait_for_bell(self, heard: bytes) -> bytes:
        """Returns the name of a ring after that of `heard` (b"0": of any), or `heard` where none comes for a while."""
        bell = self._connection.keys("bell")
        rung = await self._connection.execute_alone("XREAD", "BLOCK", self._wait_ms, "STREAMS", bell, heard)
        if not rung:
            return heard
        ((_, rings),) = rung.items() if isinstance(rung, dict) else rung
        return bytes(rings[-1][0])

    def _said(self, name: str, leads: bool) -> str:
        return self._connection.keys(f"{'meeting' if leads else 'joining'}:{name}")
