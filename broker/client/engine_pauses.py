"""When engines pause: for a swap of weights, or while the learner of a colocated run has their device.

Swap turns: only a share of a pool's engines pause at the same time to swap weights, so that the others generate.

A swap turn is the right of a worker, until a deadline, to pause its engine for a swap. It has nothing to do with the
turns of an episode (`broker.schema.Turn`).

Promised: a swap turn is granted only while fewer than a share of the serving workers hold one, or no worker does. One
that is not renewed ends at its deadline on the server's clock, even if its holder is gone, and any one ends after a
minute; that of a dead process ends at once where its supervisor says that it is dead (`Leases.report_death`). A worker
that had one waits for those that ask and had none since. Tokens that name no serving worker hold up none. A worker
serves from the heartbeat that says that it holds weights until it leaves, drains, or its heartbeats end.

Not promised: more order among the workers that ask; that a holder that slept past its deadline stops its swap before
the next one begins; that a swap turn outlives the server. A worker that gets no answer swaps without one: swap turns
keep engines busy, and lag is bounded without them.

Phases of a colocated run, whose learner and engines have the same devices in turns:

    learner   generate ──(renewed while it waits for a batch)── train, until no worker is awake ── trains ──► generate
    worker    asleep ── may_generate: yes, it counts as awake ── may_generate: no ── engine sleeps ── fell_asleep

Promised: once the server has answered `train`, no worker becomes awake before the next `generate`, and `train` names
every worker that was awake until it has fallen asleep or has been silent for its time to live. Time in which the server
was away does not count, and the server may have forgotten workers then, so after an outage `train` returns None for
`AWAKE_S`. Engines may generate until a deadline: if the learner is gone, they fall asleep by themselves. A phase ends
with the server on which it began.

Not promised: that a worker has left the device if it alone was stopped or cut off for longer than its time to live; nor
anything about an outage that the learner could not notice, because it stood still itself or had not started.

The times bound each other. A phase outlives a request that fails: RENEW_S + ANSWER_S < LENT_S. A live worker is never
silent for its time to live, even if one request fails: SAY_S + ANSWER_S < AWAKE_S < OPENING_S. The learner notices
every outage of AWAKE_S, as one of its requests fails in it. And it waits for a worker that starts, or has died, until
its time to live has passed: OPENING_S < LONGEST_WAIT_S.
"""

import time

from headway.broker.connection.connection import ANSWER_S, Connection, text
from headway.broker.schema import Owner


class SwapTurnVerbs:
    """The verbs by which a worker takes a swap turn. Its token is the worker's name, a colon, and something random."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def take(self, token: str, share: float, ttl_s: float) -> bool:
        """Asks for a swap turn of `ttl_s` seconds from now, which `share` (above 0, below 1) of the workers may hold at
        once. Returns whether the token holds one. Idempotent; never waits."""
        return bool(await self._connection.script("swap_turn", token, self._connection.session, ttl_s, share))

    async def renew(self, token: str, ttl_s: float) -> bool:
        """Moves the deadline. Returns False where the turn has ended; it is not taken again."""
        return bool(await self._connection.script("swap_turn", token, self._connection.session, ttl_s))

    async def give_back(self, token: str) -> None:
        """Ends the turn at once, so that another worker may take one. Idempotent."""
        await self._connection.script("end_swap_turn", token, absent=None)


RENEW_S = 3.0
"""A learner that waits for a batch renews the phase this often."""
LENT_S = 10 * RENEW_S
"""Engines may generate for so long after the learner's last renewal."""
SAY_S = 1.0
"""The longest time between two signs of life of an awake worker, where nothing fails."""
AWAKE_S = SAY_S + ANSWER_S + 4.0
"""A silent worker counts as asleep after so long, and the learner takes the device. An event loop never stands still
for that long."""
OPENING_S = 2 * AWAKE_S
"""A silent worker whose engine starts counts as asleep after so long, as the start may block its whole process. After
an outage it has no longer than the others."""
LONGEST_WAIT_S = 10 * OPENING_S
"""The learner waits so long for engines to fall asleep: as long as one may take to start, or to answer."""


class Phases:
    """Engines may generate only while a learner says so; otherwise it trains, or there is none."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def generate(self, owner: Owner, ttl_s: float = LENT_S) -> None:
        """Lets engines generate for `ttl_s` seconds from now. Raises FencedError, ServerRestartedError."""
        await self._connection.learner_script("phase", owner, ttl_s)

    async def train(self, owner: Owner) -> tuple[str, ...] | None:
        """Stops engines, and returns the workers that are still awake; the learner asks until there are none. Raises as
        `generate` does.

        None means that the server was away, and awake workers may not have reported since.
        """
        names = await self._connection.learner_script("phase", owner, 0)
        return tuple(map(text, names)) if self._has_heard() else None

    async def may_generate(self, worker: str, ttl_s: float = AWAKE_S, *, is_awake: bool) -> bool:
        """Returns whether engines may generate now. If so the worker counts as awake for `ttl_s` seconds, and otherwise
        for as long as it says that it is."""
        session = self._connection.session
        return bool(await self._connection.script("awake", worker, session, ttl_s, int(is_awake), absent=0))

    async def fell_asleep(self, worker: str) -> None:
        """Reports that the worker holds nothing on the device. Idempotent."""
        await self._connection.script("asleep", worker, self._connection.session, absent=None)

    async def are_engines_awake(self) -> bool | None:
        """Tells a learner that owns nothing yet whether an earlier one lets engines generate, or some are still awake.
        None means what it means in `train`."""
        are_awake = bool(await self._connection.script("engines_awake", absent=0))
        return are_awake if self._has_heard() else None

    def _has_heard(self) -> bool:
        """True once every awake worker has had time to report since the server was away."""
        return time.monotonic() - self._connection.answered_since_s >= AWAKE_S
