"""A worker's finished samples on their way to the broker: submitted or given up, and made durable."""

import asyncio
import logging

from headway.broker.client.leases import Leases, SubmitOutcome
from headway.broker.schema import Lease, Trajectory
from headway.rollout_workers.outages import Outages

CONFIRM_S = 1.0
"""Seconds between two questions for which submissions are durable."""
log = logging.getLogger(__name__)


class WorkerSubmissions:
    """Hands samples in, again and again until the broker answers, so that no work is lost."""

    def __init__(self, leases: Leases, outages: Outages) -> None:
        self._leases = leases
        self._outages = outages
        self.outcomes = dict.fromkeys(SubmitOutcome, 0)
        """Submissions by outcome. A duplicate was accepted before and its reply was lost; a fenced one is void."""
        self.unscored = 0
        """Samples that the worker gave up because no reward function could score them."""
        self.last_error = ""

    @property
    def taken(self) -> int:
        """Samples that the broker has of this worker."""
        return self.outcomes[SubmitOutcome.ACCEPTED] + self.outcomes[SubmitOutcome.DUPLICATE]

    async def submit(self, lease: Lease, trajectory: Trajectory) -> SubmitOutcome:
        """Submit the sample, and return the broker's answer."""
        outcome = await self._outages.ride_out(lambda: self._leases.submit(lease, trajectory))
        self.outcomes[outcome] += 1
        return outcome

    async def give_up(self, lease: Lease, reason: str) -> None:
        """Give the sample up, so that a worker generates it anew: its present text may be what the reward function
        cannot score."""
        self.unscored += 1
        self.last_error = f"{self.unscored} samples could not be scored; the last one: {reason}"
        log.warning("%s: %s", lease.tid, reason)
        await self._outages.ride_out(lambda: self._leases.give_up(lease, reason))

    async def confirm(self) -> None:
        """Have the server make submissions durable, for ever. That takes up to a second, hence not with the
        heartbeat."""
        while True:
            await asyncio.sleep(CONFIRM_S)
            with self._outages:
                if again := await self._leases.confirm():
                    log.warning("the server had lost %d submissions that it gets again", again)
