"""Turns to swap weights: so many engines of a pool pause at once and no more, so that the others generate meanwhile.

Promised: a turn is granted only while fewer than a share of the serving workers hold one, or nobody does; one that is
not renewed ends at its deadline on the server's clock, whatever became of its holder. A worker serves from the
heartbeat that says that it holds weights until it leaves, drains, or is not heard of any more.

Not promised: an order among those who ask; that a holder which slept past its deadline stops swapping beside the next
one; that a turn outlives the server. Whoever gets no answer swaps without a turn: turns keep engines busy, and lag is
bounded without them.
"""

from broker.connection.connection import Connection


class TurnVerbs:
    """A turn is named by a token that its holder made up."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def take(self, token: str, share: float, ttl_s: float) -> bool:
        """Whether the token holds a turn for `ttl_s` seconds from now, as one of `share` (above 0, below 1) of the
        workers. Idempotent; never waits."""
        return bool(await self._connection.script("turn", token, ttl_s, share))

    async def renew(self, token: str, ttl_s: float) -> bool:
        """Moves the deadline; False where the turn has ended, which this does not take again."""
        return bool(await self._connection.script("turn", token, ttl_s))

    async def give_back(self, token: str) -> None:
        """The next one may have it at once. Idempotent."""
        await self._connection.script("end_turn", token, absent=None)
