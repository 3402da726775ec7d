"""When this engine may swap weights: in its turn, so that the pool's engines never all pause together.

A turn keeps engines busy and guards nothing: a broker that does not answer, or a turn that does not come, delays a
swap and never prevents it.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

from broker.client.turns import TurnVerbs
from rollout_workers.outages import Outages

POLL_S = 0.05
"""Between two requests for a turn."""
LONGEST_WAIT_S = 300.0
"""For a turn: many times what a swap takes. The turn of an engine that hangs is renewed until the deadline of its call,
and those of all its calls together come to much more than the others should wait."""
GIVE_BACK_S = 1.0
"""What a broker that is away may delay the end of a turn, which then ends by itself."""

log = logging.getLogger(__name__)


class SwapTurns:
    """The turns of one worker, one at a time."""

    def __init__(self, turns: TurnVerbs, worker: str, outages: Outages, *, share: float, ttl_s: float) -> None:
        """`share` of the pool's workers may swap at once, 1: no turns are taken; a turn that is not renewed ends after
        `ttl_s`."""
        self._turns = turns
        self._worker = worker
        self._outages = outages
        self._share = share
        self._ttl_s = ttl_s

    @asynccontextmanager
    async def turn(self, is_urgent: Callable[[], bool]) -> AsyncIterator[bool]:
        """Hold a turn, renewed as long as need be, or none once `is_urgent`; yields whether it had to be waited for."""
        if self._share >= 1:
            yield False
            return
        token = f"{self._worker}:{secrets.token_hex(8)}"
        renewing = asyncio.create_task(self._renew(token))
        try:
            yield await self._wait(token, is_urgent)
        finally:
            renewing.cancel()
            with suppress(TimeoutError), self._outages:
                async with asyncio.timeout(GIVE_BACK_S):
                    await self._turns.give_back(token)

    async def _wait(self, token: str, is_urgent: Callable[[], bool]) -> bool:
        """Until the turn is ours, or it is better to swap without one; whether that took a while."""
        deadline, has_waited = time.monotonic() + LONGEST_WAIT_S, False
        with self._outages:
            while not await self._turns.take(token, self._share, self._ttl_s):
                has_waited = True
                if is_urgent():
                    break
                if time.monotonic() > deadline:
                    log.warning("no turn within %.0f s: swapping weights while others do", LONGEST_WAIT_S)
                    break
                await asyncio.sleep(POLL_S)
        return has_waited

    async def _renew(self, token: str) -> None:
        while True:
            await asyncio.sleep(self._ttl_s / 3)
            with self._outages:
                await self._turns.renew(token, self._ttl_s)
