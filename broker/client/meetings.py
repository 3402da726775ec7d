"""The learner and the members of a broadcast group exchange words here, and workers wait at a bell for news.

    learner   says what lies in `meeting:NAME`, which no worker may write, and who the members are
    members   say what lies in `joining:NAME:MEMBER`, each by its own session (`broker/scripts/say.lua`)
    server    rings `bell` with every version that the learner offers or announces, and with every new group

Promised: a word is heard as that of the one who said it, and no process says one in another's name; words of one
meeting are never heard in another; a meeting is gone a while after its last word. Not promised: that words outlive the
server, nor that a worker hears every ring: a waiting worker looks from time to time in any case.
"""

from collections.abc import Sequence
from typing import Any

from headway.broker.connection.connection import Argument, Command, Connection

LIFETIME_S = 3600
"""A meeting is forgotten so long after its last word: many times what forming a group may take. A learner ends its
meetings itself."""
LEARNER = ""
"""This name is the learner's; no worker can have it."""
NUMBERS = "+"
"""Under this name stand the numbers that all members add to."""
_LONGEST_WAIT_S = 2.0


class Meetings:
    """Words of one run's meetings; each meeting has a unique name. `who` is LEARNER, or the worker that calls."""

    def __init__(self, connection: Connection, timeout_s: float) -> None:
        self._connection = connection
        self._wait_ms = int(1000 * min(_LONGEST_WAIT_S, timeout_s / 2))

    async def begin(self, name: str, members: Sequence[str], words: dict[str, bytes]) -> None:
        """Begins a meeting with these members and first words. For the learner."""
        said = [part for word in words.items() for part in word]
        await self._tell(name, ("HSET", self._by_learner(name), "members", " ".join(members), *said))

    async def say(self, name: str, who: str, key: str, value: bytes) -> bool:
        """Says a word under `key`. Idempotent. Returns False where `who` has no part in the meeting, or is another
        process."""
        if who == LEARNER:
            await self._tell(name, ("HSET", self._by_learner(name), key, value))
            return True
        return await self._say(name, who, "set", key, value) is not None

    async def say_once(self, name: str, who: str, key: str, value: bytes) -> bytes | None:
        """Says a member's word where none of it stands yet, and returns the one that stands then. Idempotent. Returns
        None where `say` returns False."""
        said: bytes | None = await self._say(name, who, "once", key, value)
        return said

    async def count(self, name: str, who: str, key: str, amount: int) -> int | None:
        """Adds to a number that all share, and returns the sum. It counts twice where an answer is lost. Returns None
        where `say` returns False."""
        if who == LEARNER:
            return int((await self._tell(name, ("HINCRBY", self._numbers(name), key, amount)))[0])
        counted: int | None = await self._say(name, who, "add", key, amount)
        return counted

    async def hear(self, name: str, words: Sequence[tuple[str, str]]) -> list[bytes | None]:
        """Returns the word of each (who said it, key); None where it was not said yet. `who` may be NUMBERS."""
        asked = [part for word in words for part in word]
        heard: list[bytes | None] = await self._connection.script("hear", name, *asked)
        return heard

    async def forget(self, name: str, who: str, words: Sequence[tuple[str, str]]) -> int:
        """Deletes words of (who said it, key), a member its own alone, and returns how many there were."""
        if who == LEARNER:
            return sum(await self._connection.pipeline([("HDEL", self._of(name, by), key) for by, key in words]))
        return sum([await self._say(name, who, "drop", key, b"") or 0 for by, key in words if by == who])

    async def end(self, name: str, members: Sequence[str]) -> None:
        """Ends the meeting and deletes its words. For the learner; idempotent."""
        said = [self._of(name, who) for who in (LEARNER, NUMBERS, *members)]
        await self._connection.execute("UNLINK", *said)

    async def wait_for_bell(self, heard: bytes) -> bytes:
        """Returns the name of a ring after that of `heard` (b"0": of any), or `heard` where none comes for a while."""
        bell = self._connection.keys("bell")
        rung = await self._connection.execute_alone("XREAD", "BLOCK", self._wait_ms, "STREAMS", bell, heard)
        if not rung:
            return heard
        ((_, rings),) = rung.items() if isinstance(rung, dict) else rung
        return bytes(rings[-1][0])

    async def _say(self, name: str, who: str, manner: str, key: str, value: Argument) -> Any:
        return await self._connection.script("say", name, who, self._connection.session, manner, key, value)

    async def _tell(self, name: str, command: Command) -> Any:
        return await self._connection.pipeline([command, ("EXPIRE", command[1], LIFETIME_S)])

    def _of(self, name: str, who: str) -> str:
        if who == LEARNER:
            return self._by_learner(name)
        return self._numbers(name) + ("" if who == NUMBERS else f":{who}")

    def _by_learner(self, name: str) -> str:
        return self._connection.keys(f"meeting:{name}")

    def _numbers(self, name: str) -> str:
        return self._connection.keys.hidden(f"joining:{name}")
