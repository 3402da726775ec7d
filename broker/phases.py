"""Phases of a colocated run, whose learner and engines have the same devices in turns.

    learner   generate ──(renewed while it waits for a batch)── train, until nobody is awake ── trains ──► generate
    worker    asleep ── may_generate: yes, it counts as awake ── may_generate: no ── engine sleeps ── fell_asleep

Promised: once `train` has been answered no worker becomes awake before the next `generate`, and every one that was is
named until it has fallen asleep or has not been heard of for its time to live. Engines may generate until a deadline:
where the learner is gone they fall asleep by themselves. A phase ends with the server that it began on.

Not promised: that a worker which was stopped for longer than its time to live has left the device.
"""

from .connection import Connection
from .owner import Owner


class Phases:
    """Engines may generate while the learner says so; else it trains, or nobody is there to say."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def generate(self, owner: Owner, ttl_s: float) -> None:
        """Engines may generate for `ttl_s` seconds from now. Raises FencedError, ServerRestartedError."""
        await self._connection.learner_script("phase", owner, ttl_s)

    async def train(self, owner: Owner) -> tuple[str, ...]:
        """They may no more; the workers that are awake still. Ask until there are none. Raises as `generate` does."""
        names = await self._connection.learner_script("phase", owner, 0)
        return tuple(name.decode() for name in names)

    async def may_generate(self, worker: str, ttl_s: float, *, is_awake: bool) -> bool:
        """Whether engines may generate now; the worker then counts as awake for `ttl_s` seconds, and else as long as it
        says that it is."""
        return bool(await self._connection.script("awake", worker, ttl_s, int(is_awake)))

    async def fell_asleep(self, worker: str) -> None:
        """It holds nothing on the device any more, or never did. Idempotent."""
        await self._connection.execute("ZREM", self._connection.keys("awake"), worker)

    async def are_engines_awake(self) -> bool:
        """For a learner that owns nothing yet: whether one before it lets engines generate, or some have not fallen
        asleep since."""
        return bool(await self._connection.script("engines"))
