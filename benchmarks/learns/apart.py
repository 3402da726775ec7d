"""A run whose roles are started one by one, as by a user whose engines need packages of their own.

server, learner, a pool of the recipe's engine ─── this Python
a pool of SGLang's workers ────────────────────── the Python and the environment that `--sglang` names
"""

import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

import psutil

from headway.broker.client.broker import BlockingBroker
from headway.broker.errors import RunNotFoundError
from headway.broker.server.embedded import EmbeddedServer
from headway.broker.staleness import oldest_step
from headway.deploy.run.directory import EXPERIENCE
from headway.learner.experience.log import ExperienceLog

SGLANG, MIXED = "sglang", "mixed"
APART = (SGLANG, MIXED)
"""The parts whose workers are started apart: all with SGLang, and pools of two engines."""
OWN = "own"
"""The pool of the recipe's engine."""
POOLS = {SGLANG: (SGLANG,), MIXED: (OWN, SGLANG)}
HELD = "held.json"
"""The file with the seconds for which the learner was held."""
POLL_S = 0.2
END_S = 90.0
"""Seconds in which workers end by themselves once the learner has ended."""


@dataclass(frozen=True, kw_only=True)
class Pools:
    """The commands by which pools of workers are started."""

    sglang: Sequence[str] = (sys.executable,)
    """The words of a command that runs SGLang's Python, as `env` takes them: NAME=VALUE ..., then the program."""
    of_own: Sequence[str] = ()
    of_sglang: Sequence[str] = ()
    """The overrides of the workers of each pool."""

    def command(self, pool: str, devices: Sequence[str]) -> list[str]:
        """Return the command that starts a pool with one worker, on these GPUs if there are some."""
        python, own = (self.sglang, self.of_sglang) if pool == SGLANG else ((sys.executable,), self.of_own)
        kind = ("engine.kind=sglang",) if pool == SGLANG else ()
        placed = (f"workers.devices=[{','.join(devices)}]",) if devices else ()
        return ["env", *python, "-m", "headway", "workers", "--pool", pool, *kind, *placed, *own]


def finish_apart(learner: Sequence[str], workers: Mapping[str, Sequence[str]], run: str, timeout_s: float) -> float:
    """Run server, learner and pools until the learner has ended, and the workers with it; return the seconds for which
    the learner was held.

    `learner`: the arguments of `headway`; `workers`: each pool's command. Raises CalledProcessError or TimeoutExpired,
    with output on stderr.
    """
    with TemporaryDirectory() as data, EmbeddedServer(Path(data)) as server, ExitStack() as stack:
        environment = {"HEADWAY_BROKER": server.url, "HEADWAY_RUN": run, "PYTHONUNBUFFERED": "1"}
        commands = [[sys.executable, "-m", "headway", *learner], *map(list, workers.values())]
        started = [stack.enter_context(_started(command, environment)) for command in commands]
        broker = BlockingBroker(server.url, run)
        stack.callback(broker.close)
        hold = Hold(psutil.Process(started[0].pid), len(workers))
        try:
            _await(started, timeout_s, lambda: hold.look(broker))
        except BaseException:
            hold.end()
            for process in started:
                process.terminate()  # each stops its own children in order
            raise
    return round(hold.held_s, 1)


class Hold:
    """Stops a learner's processes from the moment at which some pool has weights until all pools are there."""

    def __init__(self, learner: psutil.Process, pools: int) -> None:
        self._learner, self._pools = learner, pools
        self._stopped: list[psutil.Process] = []
        self._began = 0.0
        self._is_over = pools < 2
        self.held_s = 0.0

    def look(self, broker: BlockingBroker) -> None:
        """Look at the run, and stop the learner or let it go on."""
        if self._is_over:
            return
        try:
            workers = broker.call(broker.broker.status.snapshot(any_identity=True)).workers
        except RunNotFoundError:
            return
        if len({pool_of(one.worker) for one in workers}) == self._pools:
            self.end()
        elif not self._stopped and any(one.version for one in workers):
            self._began = time.monotonic()
            with suppress(psutil.NoSuchProcess):
                self._stopped = [self._learner, *self._learner.children(recursive=True)]
            for process in self._stopped:
                with suppress(psutil.NoSuchProcess):
                    process.suspend()

    def end(self) -> None:
        """Let the learner go on. Idempotent."""
        for process in self._stopped:
            with suppress(psutil.NoSuchProcess):
                process.resume()
        if self._stopped:
            self.held_s = time.monotonic() - self._began
        self._stopped, self._is_over = [], True


def _started(command: Sequence[str], environment: Mapping[str, str]) -> "subprocess.Popen[bytes]":
    # Standard output of this process has only one JSON object.
    return subprocess.Popen(command, stdout=sys.stderr, env={**os.environ, **environment})


def _await(started: Sequence["subprocess.Popen[bytes]"], timeout_s: float, look: Callable[[], None]) -> None:
    learner, *pools = started
    end = time.monotonic() + timeout_s
    while learner.poll() is None:
        look()
        for pool in pools:
            if code := pool.poll():
                raise subprocess.CalledProcessError(code, pool.args)
        if time.monotonic() > end:
            raise subprocess.TimeoutExpired(learner.args, timeout_s)
        time.sleep(POLL_S)
    for process in started:
        if code := process.wait(END_S):
            raise subprocess.CalledProcessError(code, process.args)


def by_pool(directory: Path, steps: int) -> dict[str, dict[str, Any]]:
    """Return the trained samples of each pool, their mean reward and their lag, by the run's experience log."""
    rewards, lags = defaultdict[str, list[float]](list), defaultdict[str, list[int]](list)
    log = ExperienceLog(directory / EXPERIENCE)
    for step in range(steps):
        for group in log.read(step) or ():
            for one in group.trajectories:
                pool = pool_of(one.worker)
                rewards[pool].append(one.reward)
                lags[pool].append(step - oldest_step(one.spans))
    return {
        pool: {
            "samples": len(lags[pool]),
            "reward": round(fmean(rewards[pool]), 4),
            "lag_mean": round(fmean(lags[pool]), 3),
            "lag_max": max(lags[pool]),
        }
        for pool in sorted(lags)
    }


def pool_of(worker: str) -> str:
    """Return the pool of a worker that is called HOST-POOL-NUMBER-TAG."""
    return worker.rsplit("-", 3)[-3]
