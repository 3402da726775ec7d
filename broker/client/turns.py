"""Swap turns: only a share of a pool's engines pause at the same time to swap weights, so that the others generate.

A swap turn is the right of a worker, until a deadline, to pause its engine for a swap. It has nothing to do with the
turns of an episode (`broker.schema.Turn`).

Promised: a swap turn is granted only while fewer than a share of the serving workers hold one, or no worker does. One
that is not renewed ends at its deadline on the server's clock, even if its holder is gone, and any one ends after a
minute; that of a dead process ends at once where its supervisor says that it is dead (`Leases.bury`). A worker that had
one waits for those that ask and had none since. Tokens that name no serving worker hold up none. A worker serves from
the heartbeat that says that it holds weights until it leaves, drains, or its heartbeats end.

Not promised: more order among the workers that ask; that a holder that slept past its deadline stops its swap before
the next one begins; that a swap turn outlives the server. A worker that gets no answer swaps without one: swap turns
keep engines busy, and lag is bounded without them.
"""

from headway.broker.connection.connection import Connection


class SwapTurnVerbs:
    """The verbs by which a worker takes a swap turn. Its token is the worker's name, a colon, and something random."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def take(self, token: str, share: float, ttl_s: float) -> bool:
        """Asks for a swap turn of `ttl_s` seconds from now, which `share` (above 0, below 1) of the workers may hold at
        once. Returns whether the token holds one. Idempotent; never waits."""
        return bool(await self._connection.script("turn", token, self._connection.session, ttl_s, share))

    async def renew(self, token: str, ttl_s: float) -> bool:
        """Moves the deadline. Returns False where the turn has ended; it is not taken again."""
        return bool(await self._connection.script("turn", token, self._connection.session, ttl_s))

    async def give_back(self, token: str) -> None:
        """Ends the turn at once, so that another worker may take one. Idempotent."""
        await self._connection.script("end_turn", token, absent=None)
