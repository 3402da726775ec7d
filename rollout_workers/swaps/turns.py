"""Swaps weights in turns, so that the pool's engines never all pause together.

A turn keeps engines busy and protects no data: a broker that does not answer, or a turn that does not come, delays a
swap and never prevents it.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

from headway.broker.client.engine_pauses import SwapTurnVerbs
from headway.rollout_workers.outages import Outages

POLL_S = 0.05
"""Seconds between two requests for a turn."""
LONGEST_WAIT_S = 300.0
"""Seconds to wait for a turn: many times what a swap takes. An engine that hangs keeps its turn until the deadline of
its call, and the deadlines of all its calls together are much longer than other workers should wait."""
GIVE_BACK_S = 1.0
"""Seconds to give a turn back. If the broker does not answer, the turn ends by itself."""

log = logging.getLogger(__name__)


class SwapTurns:
    """Takes turns for one worker, one at a time."""

    def __init__(self, turns: SwapTurnVerbs, worker: str, outages: Outages, *, share: float, ttl_s: float) -> None:
        """`share`: the part of the pool's workers that may swap at once; with 1 no turns are taken. `ttl_s`: seconds
        after which a turn that is not renewed ends."""
        self._turns = turns
        self._worker = worker
        self._outages = outages
        self._share = share
        self._ttl_s = ttl_s

    @asynccontextmanager
    async def turn(self, is_urgent: Callable[[], bool]) -> AsyncIterator[bool]:
        """Hold a turn and renew it, or go on without one once `is_urgent` returns True. Yields whether the worker had
        to wait."""
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
        """Wait until the worker has a turn, or should swap without one. Returns whether it had to wait."""
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
