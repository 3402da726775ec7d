"""One worker process: the product's, with a double of the engine, and a client that repeats itself and forgets."""

import asyncio
import random
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from unittest.mock import patch

import msgspec
import torch

import headway.rollout_workers.worker
from headway.broker.client import broker as client
from headway.broker.client.leases import Leases, SubmitOutcome
from headway.broker.client.status import HeartbeatReply, StatusVerbs
from headway.broker.errors import BrokerError, ForeignRunError
from headway.broker.schema import Lease, Trajectory
from headway.broker.schema.status import WorkerInfo
from headway.broker.schema.weights import WeightManifest
from headway.deploy.roles import worker as rollout
from headway.deploy.roles.config_watch import ConfigChangedError
from headway.rollout_workers.worker import Worker
from headway.weightsync import receiver
from headway.weightsync.deliveries import BufferPool, BufferSet
from headway.weightsync.receiver import GroupMembership

from .engine import SlowEngine, Tally
from .process import BEGIN_ANEW, enter
from .protections import take_out
from .trial import BROKER_TIMEOUT_S, LEASE_TTL_S, RUN, Trial

REPEATED, FORGOTTEN, HELD_UP = 0.1, 0.04, 0.02
"""The shares of samples that are handed in once more later, not renewed, and handed in late."""
LONGEST_DELAY_S = 2 * LEASE_TTL_S


def run_worker(trial: Trial, url: str, name: str, process: str, tally: Tally) -> None:
    """Run one `process` of the worker of this name, whose log it continues.

    It ends with code 0 when the run is finished, with BEGIN_ANEW where the product would begin anew.
    """
    enter(trial.directory, name)
    take_out(trial.without)
    torch.set_num_threads(1)
    SlowEngine.tally = tally
    patch.object(client, "Leases", ErraticLeases).start()
    patch.object(client, "StatusVerbs", ErraticStatus).start()
    patch.object(receiver, "GroupMembership", CountingGroup).start()
    if not trial.broadcasts:
        patch.object(headway.rollout_workers.worker, "Worker", PullingWorker).start()
    patch.object(rollout, "open_broker", partial(client.open_broker, timeout_s=BROKER_TIMEOUT_S)).start()
    try:
        rollout.work(url, RUN, process, ())
    except (ForeignRunError, ConfigChangedError) as error:
        print(error, flush=True)
        sys.exit(BEGIN_ANEW)


class PullingWorker(Worker):
    """Takes part in no broadcast: forming a group anew at every death would take the trial's whole time."""

    def info(self) -> WorkerInfo:
        return msgspec.structs.replace(super().info(), wants_broadcast=False)


class CountingGroup(GroupMembership):
    """Counts the versions that it has received."""

    def receive(
        self, offer: WeightManifest, landing: BufferPool, cancelled: threading.Event
    ) -> tuple[WeightManifest, BufferSet]:
        received = super().receive(offer, landing, cancelled)
        SlowEngine.tally.received += 1
        return received


class ErraticStatus(StatusVerbs):
    """Forgets to renew some leases."""

    async def heartbeat(
        self, info: WorkerInfo, ttl_s: float, leases: Sequence[Lease] = (), lease_ttl_s: float = 0.0
    ) -> HeartbeatReply:
        """Renew all but the forgotten ones."""
        renewed = [one for one in leases if not _is_chosen(one, "forgotten", FORGOTTEN)]
        SlowEngine.tally.forgotten += len(leases) - len(renewed)
        return await super().heartbeat(info, ttl_s, renewed, lease_ttl_s)


class ErraticLeases(Leases):
    """Hands some samples in late, and some once more at unexpected times."""

    async def submit(self, lease: Lease, trajectory: Trajectory) -> SubmitOutcome:
        """Submit, perhaps late, and perhaps again later."""
        if _is_chosen(lease, "held up", HELD_UP):
            await asyncio.sleep(random.uniform(0, LONGEST_DELAY_S))
        outcome = await super().submit(lease, trajectory)
        if _is_chosen(lease, "repeated", REPEATED):
            _repetitions.add(repetition := asyncio.create_task(self._repeat(lease, trajectory)))
            repetition.add_done_callback(_repetitions.discard)
        return outcome

    async def _repeat(self, lease: Lease, trajectory: Trajectory) -> None:
        await asyncio.sleep(random.uniform(0, LONGEST_DELAY_S))
        SlowEngine.tally.repeated += 1
        with suppress(BrokerError):  # no caller waits for it
            await super().submit(lease, trajectory)


_repetitions = set[asyncio.Task[None]]()
"""References to the tasks, which the event loop does not keep."""


def _is_chosen(lease: Lease, for_what: str, share: float) -> bool:
    """Whether the lease is chosen: the same answer for one lease every time."""
    return random.Random(f"{for_what} {lease.token}").random() < share
