"""Processes of a run whose name the trial's run has taken: stopped in the midst of their work, and woken one by one."""

import asyncio
import multiprocessing.sharedctypes as shared
import random
import signal
from ctypes import c_int64
from multiprocessing.process import BaseProcess

from headway.broker import Broker

from .engine import Tally
from .learner import run_learner
from .process import begin, send
from .trial import RUN, Trial
from .witness import Witness
from .worker import run_worker

WORKERS = 3
STEPS = 6
"""The steps that the earlier run trains before it ends, so that it has weights beyond the first."""
LEFT_WITHIN_S = 15.0
"""The seconds within which a woken process must find out."""
_POLL_S = 0.1


class Leftovers:
    """A learner and its workers, whose samples and knowledge are of a run that is gone."""

    def __init__(self, trial: Trial, url: str) -> None:
        self._trial = trial.overwritten
        self._url = url
        self._asleep: list[BaseProcess] = []
        self._incarnation = shared.RawValue(c_int64)
        self._tallies = [shared.RawValue(Tally) for _ in range(WORKERS)]
        """References that keep this memory from the next process that asks for some: the leftovers write into it."""
        self.woken = 0
        self.unexpelled = 0
        """The number of woken processes that did not leave by themselves."""

    async def leave_behind(self, witness: Witness) -> None:
        """Begin, stop and delete an earlier run, as overwriting does."""
        self._asleep = [begin("learner", run_learner, (self._trial, self._url, self._incarnation))]
        for number, tally in enumerate(self._tallies):
            name = f"leftover-{number}"
            self._asleep.append(begin(name, run_worker, (self._trial, self._url, name, name, tally)))
        await self._are_in_the_midst(witness)
        for process in self._asleep:
            _signal(process, signal.SIGSTOP)
        broker = Broker(self._url, RUN)
        await broker.status.delete_run()
        await broker.close()

    async def wake(self, rng: random.Random) -> None:
        """Wake one process, if any is left. It must leave, and its acts until then must not count."""
        if not self._asleep:
            return
        process = self._asleep.pop(rng.randrange(len(self._asleep)))
        self.woken += 1
        _signal(process, signal.SIGCONT)
        await asyncio.to_thread(process.join, LEFT_WITHIN_S)
        if process.exitcode is None:
            self.unexpelled += 1
            process.kill()

    def close(self) -> None:
        """Kill the processes that still sleep."""
        for process in self._asleep:
            process.kill()

    async def _are_in_the_midst(self, witness: Witness) -> None:
        while True:
            status = await witness.status()
            has_trained = status is not None and status.announced is not None and status.announced.step >= STEPS
            if status is not None and has_trained and sum(info.active > 0 for info in status.workers) == WORKERS:
                return
            await asyncio.sleep(_POLL_S)


def _signal(process: BaseProcess, number: signal.Signals) -> None:
    if process.pid is not None:
        send(process.pid, number)
