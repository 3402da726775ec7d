"""`headway autoscale`: looks at a run again and again, and asks a pool for the workers that the rule wants.

It is a process of its own beside any run, wherever the pool was started. A pool whose autoscaler ends stays as it is.
"""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from headway.broker.client.broker import BlockingBroker
from headway.broker.schema.status import PoolInfo, RunStatus, WorkerInfo
from headway.deploy.observe.autoscaling import Autoscaler, Decision, Load, Targets, busy_share, steps_made
from headway.deploy.observe.pools import pool_of, workers_of
from headway.deploy.printing import say, say_json
from headway.rollout_workers.run_end import RUN_OVER

from .looking import as_learner, awaited, client_of, locate_run

LOOK_S = 2.0
"""Seconds between two looks at the run."""
LOOKS = 5
"""Looks over which the engines' use is averaged: within a step it comes and goes."""


class Look(msgspec.Struct, frozen=True, kw_only=True):
    """One look of the autoscaler: the figures that it saw, and its decision."""

    pool: str
    load: Load
    decision: Decision


def keep_scaling(
    url: str | None, run: str | None, pool: str, targets: Targets, *, cooldown_s: float, dry_run: bool, as_json: bool
) -> None:
    """Scale the pool until the run is over or Ctrl-C, and print each decision that is not the one before.

    `dry_run`: print the decisions and ask for nothing. Waits for a run that no learner has claimed yet. Raises
    RunNotFoundError where the run has no such pool.
    """
    where, run = locate_run(url, run)
    with client_of(where if dry_run else as_learner(url, where), run) as client:
        awaited(lambda: client.call(client.broker.status.snapshot(any_identity=True)))
        said = None
        for look in Autoscaling(client, pool, targets, cooldown_s, dry_run).looks():
            decided = (look.load.wanted, look.decision.wanted, look.decision.reason)
            if decided != said:
                said = decided
                _tell(look, as_json)
    if not as_json:
        say("The run is over.")


@dataclass
class Autoscaling:
    """The looks at one pool of one run."""

    client: BlockingBroker
    pool: str
    """Its name; empty: the run's only one."""
    targets: Targets
    cooldown_s: float
    """Seconds after a change in which nothing is changed again."""
    dry_run: bool

    def __post_init__(self) -> None:
        self._scaler = Autoscaler(self.targets)
        self._changed = float("-inf")
        self._since: int | None = None
        """Steps that the run had made when the pool last changed."""
        self._busy: deque[float] = deque(maxlen=LOOKS)

    def looks(self) -> Iterator[Look]:
        """Yield a look every LOOK_S seconds until the run is over."""
        while (status := self._status()).state not in RUN_OVER:
            if not self._is_cooling_down():
                yield self._look(status)
            time.sleep(LOOK_S)

    def _is_cooling_down(self) -> bool:
        return time.monotonic() - self._changed < self.cooldown_s

    def _look(self, status: RunStatus) -> Look:
        info, made = self._pool(status), steps_made(status)
        if self._since is None or made < self._since:  # it has just begun, or the run went back
            self._since = made
        self._busy.append(busy_share(self._workers(status, info)))
        load = Load.of(status, info, self._since, self._ahead(), self.targets, self._busy)
        decision = self._scaler.decide(load)
        if decision.wanted != info.wanted and not self.dry_run:
            self._since, self._changed = made, time.monotonic()
            self._busy.clear()
            self._ask(info.pool, decision.wanted)
        return Look(pool=info.pool, load=load, decision=decision)

    def _pool(self, status: RunStatus) -> PoolInfo:
        """Return the pool as the rule sees it."""
        return pool_of(status, self.pool)

    def _workers(self, status: RunStatus, info: PoolInfo) -> Sequence[WorkerInfo]:
        """Return the pool's workers."""
        return workers_of(status, info)

    def _ask(self, pool: str, wanted: int) -> None:
        """Ask for so many workers."""
        self.client.call(self.client.broker.pools.scale(pool, "to", wanted))

    def _status(self) -> RunStatus:
        return self.client.call(self.client.broker.status.snapshot(any_identity=True))

    def _ahead(self) -> float:
        """Return the steps for which the run begins samples ahead, which a learner that resumes may change."""
        progress = self.client.call(self.client.broker.progress.look())
        return progress.ahead if progress is not None else 0.0


def _tell(look: Look, as_json: bool) -> None:
    if as_json:
        say_json(look, in_one_line=True)
        return
    wanted, before = look.decision.wanted, look.load.wanted
    change = f"{before} stays" if wanted == before else f"{before} -> {wanted}"
    say(f"Workers of pool {look.pool}: {change}. {look.decision}")
