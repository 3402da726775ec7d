"""`headway autoscale`: looks at a run again and again, and asks a pool for the workers that the rule wants.

It is a process of its own beside any run, wherever the pool was started. A pool whose autoscaler ends stays as it is.
With `--serve` it says over HTTP how many workers a pool should have, for an autoscaler of a cluster. The rule:

    out  the learner waits for more than `wait` of its time, and the workers are busy
    in   the learner hardly waits (for less than half of `wait`), and workers are idle, or the lag or the queue's age is
         close to the steps for which samples are begun ahead (`staleness.ahead`, by default `staleness.max_lag`)

A mean lag of so many steps means that all admitted groups are begun: then admission bounds generation, and not the
workers. The queue's age is the time for which the oldest ready group has waited for the learner, over the time of so
many steps: at 1 its samples will have this lag even if they were of the newest weights when it became ready. Whether
workers are busy is judged by those of the pool alone, where they can be told by their names.

A learner that waits beside idle workers is bound by admission (`staleness.max_lag` and `staleness.ahead`), prompts or
the learner itself, and more workers would change nothing. Workers that generate faster than the learner trains fill the
admitted groups, so they become idle and their samples grow old in the queue: fewer workers do the same, with less lag.

The pool grows to the number at which the learner would wait for `wait` of its time if samples came in proportion to
workers, at most twofold at a time, and shrinks by the idle share, at most by half. After a change the rule waits until
all workers run and `steps` steps were made since. It does not shrink to a number at which the learner starved before,
until the learner's pace has changed.
"""

import math
import signal
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType

import msgspec

from headway.broker.client.broker import BlockingBroker
from headway.broker.errors import BrokerError, ConfigError
from headway.broker.schema.status import PoolInfo, QueueAges, RunStatus, WorkerInfo
from headway.broker.schema.step_metrics import StepMetrics
from headway.deploy.observe.bounded_server import BoundedServer, QuietRequestHandler
from headway.deploy.observe.status_tables import pool_of, workers_of
from headway.deploy.printing import say, say_json
from headway.deploy.run.figures import wait_fraction
from headway.rollout_workers.health import RUN_OVER

from .run_client import as_learner, awaited, client_of, locate_run

NEAR = 0.9
"""A mean lag, or a queue's age, of this share of the steps for which samples are begun ahead is close to them."""
OTHER_PACE = 1.25
"""A learner whose training seconds a step changed by this factor has another pace."""


@dataclass(frozen=True, kw_only=True)
class Targets:
    """The range in which the rule keeps a pool."""

    least: int = 1
    most: int
    wait: float = 0.1
    """The share of its time for which the learner may wait for samples."""
    busy: float = 0.6
    """The share of the engines' places that are in use, below which workers count as idle."""
    steps: int = 5
    """The steps from which the learner's wait is measured."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """The figures that the rule looks at."""

    wanted: int
    """Workers that the pool should have."""
    running: int
    steps: int
    """Steps made since the pool last changed."""
    wait: float
    """The share of the last steps' time in which the learner waited for samples."""
    busy: float
    """The share of the places in use in the pool's engines, over the last observations."""
    lag: float
    """The mean lag over the steps for which samples are begun ahead; 0 where these are 0. Above 1 where samples take
    longer."""
    age: float = 0.0
    """The wait of the oldest ready group over the time of these steps; 0 where they are 0."""
    train_s: float
    """The learner's mean training seconds of a step."""

    @classmethod
    def of(
        cls, status: RunStatus, pool: PoolInfo, since: int, ahead: float, targets: Targets, busy: Sequence[float]
    ) -> "Load":
        """Returns the load of a look at the run.

        `since`: the number of steps made when the pool last changed; `ahead`: the steps beyond the next one for which
        samples are begun; `busy`: `busy_share` at this look and the last.
        """
        made = steps_made(status)
        recent = status.recent_steps[-max(1, min(targets.steps, made - since)) :]
        return cls(
            wanted=pool.wanted,
            running=pool.running,
            steps=made - since,
            wait=wait_fraction(recent),
            busy=sum(busy) / len(busy),
            lag=_mean_lag(recent) / ahead if ahead else 0.0,
            age=_age(status.ages, recent, ahead),
            train_s=sum(step.train_s for step in recent) / len(recent) if recent else 0.0,
        )


@dataclass(frozen=True)
class Decision:
    """The number of workers wanted from now on, and why."""

    wanted: int
    reason: str
    """The same words for the same cause."""
    figures: str
    """The figures that the rule saw, in words."""

    def __str__(self) -> str:
        return f"{self.figures}: {self.reason}."


@dataclass
class Autoscaler:
    """Decides for one pool; it remembers at which number of workers the learner starved."""

    targets: Targets
    starved_at: int = field(default=0, init=False)
    """The largest number of workers at which the learner starved; 0: none."""
    starved_pace_s: float = field(default=0.0, init=False)
    """The learner's training seconds of a step then."""

    def decide(self, load: Load) -> Decision:
        """Returns what to do now; `wanted` is as before where nothing is to be changed."""
        targets = self.targets
        if not targets.least <= load.wanted <= targets.most:
            figures = f"{load.wanted} workers are wanted"
            return Decision(
                min(max(load.wanted, targets.least), targets.most), "that is outside of the limits", figures
            )
        if load.running < load.wanted:
            figures = f"{load.running} of {load.wanted} workers run"
            return Decision(load.wanted, "the others still start", figures)
        if load.steps < targets.steps:
            figures = f"The learner has made {load.steps} of {targets.steps} steps since the last change"
            return Decision(load.wanted, "too few to judge by", figures)
        self._forget_other_pace(load)
        if load.wait > targets.wait:
            return self._starved(load)
        if load.wait <= targets.wait / 2 and (load.busy < targets.busy or max(load.lag, load.age) >= NEAR):
            return self._idle(load)
        return Decision(load.wanted, "within the targets", _seen(load))

    def _starved(self, load: Load) -> Decision:
        targets, seen = self.targets, _seen(load)
        if load.busy < targets.busy:
            reason = "samples are held up by the bound on lag, staleness.ahead or prompts, not for want of workers"
            return Decision(load.wanted, reason, seen)
        if load.wanted > self.starved_at:
            self.starved_at, self.starved_pace_s = load.wanted, load.train_s
        if load.wanted == targets.most:
            return Decision(load.wanted, f"more workers would help, and {targets.most} are the most allowed", seen)
        needed = math.ceil(load.wanted * (1 - targets.wait) / max(1 - load.wait, 1e-9))
        wanted = min(max(needed, load.wanted + 1), 2 * load.wanted, targets.most)
        return Decision(wanted, "the learner starves", seen)

    def _idle(self, load: Load) -> Decision:
        seen = _seen(load)
        share = min(load.busy / ((1 + self.targets.busy) / 2), 1.0)
        floor = max(self.targets.least, self.starved_at + 1, math.ceil(load.wanted / 2))
        wanted = max(min(math.ceil(load.wanted * share), load.wanted - 1), floor)
        if wanted >= load.wanted:
            below = f"the learner starved with {self.starved_at}" if self.starved_at else "that is the least"
            return Decision(load.wanted, f"fewer workers would do, but {below}", seen)
        return Decision(wanted, "workers generate more than is trained", seen)

    def _forget_other_pace(self, load: Load) -> None:
        paces = sorted((load.train_s, self.starved_pace_s))
        if self.starved_at and paces[0] * OTHER_PACE < paces[1]:
            self.starved_at = 0


def steps_made(status: RunStatus) -> int:
    """Returns the number of steps that the run has made."""
    return status.last_step.step + 1 if status.last_step is not None else 0


def busy_share(workers: Sequence[WorkerInfo]) -> float:
    """Returns the share of the engines' places that is in use at this moment."""
    capacity = sum(worker.capacity for worker in workers)
    # A worker also holds samples that are scored, or wait for a place.
    return sum(min(worker.active, worker.capacity) for worker in workers) / capacity if capacity else 0.0


def _mean_lag(steps: Sequence[StepMetrics]) -> float:
    return sum(step.lag_mean for step in steps) / len(steps) if steps else 0.0


def _age(ages: QueueAges, steps: Sequence[StepMetrics], ahead: float) -> float:
    ahead_s = ahead * sum(step.step_s for step in steps) / len(steps) if steps else 0.0
    return (ages.oldest_ready_s or 0.0) / ahead_s if ahead_s else 0.0


def _seen(load: Load) -> str:
    return (
        f"The learner waits {load.wait:.0%} of its time, engines are {load.busy:.0%} busy, lag is {load.lag:.0%} and"
        f" the queue's age {load.age:.0%} of the steps for which samples are begun ahead"
    )


LOOK_S = 2.0
"""Seconds between two observations of the run."""
LOOKS = 5
"""Looks over which the engines' use is averaged: within a step it comes and goes."""


class Observation(msgspec.Struct, frozen=True, kw_only=True):
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
        for observation in Autoscaling(client, pool, targets, cooldown_s, dry_run).observations():
            decided = (observation.load.wanted, observation.decision.wanted, observation.decision.reason)
            if decided != said:
                said = decided
                _print(observation, as_json)
    if not as_json:
        say("The run is over.")


@dataclass
class Autoscaling:
    """The observations of one pool of one run."""

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

    def observations(self) -> Iterator[Observation]:
        """Yield a look every LOOK_S seconds until the run is over."""
        while (status := self._status()).state not in RUN_OVER:
            if not self._is_cooling_down():
                yield self._observe(status)
            time.sleep(LOOK_S)

    def _is_cooling_down(self) -> bool:
        return time.monotonic() - self._changed < self.cooldown_s

    def _observe(self, status: RunStatus) -> Observation:
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
        return Observation(pool=info.pool, load=load, decision=decision)

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
        progress = self.client.call(self.client.broker.progress.read())
        return progress.ahead if progress is not None else 0.0


def _print(observation: Observation, as_json: bool) -> None:
    if as_json:
        say_json(observation, in_one_line=True)
        return
    wanted, before = observation.decision.wanted, observation.load.wanted
    change = f"{before} stays" if wanted == before else f"{before} -> {wanted}"
    say(f"Workers of pool {observation.pool}: {change}. {observation.decision}")


TOLERANCE = 0.1
"""Kubernetes leaves a pool as it is where the number wanted differs from its own by no more than this share."""


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a request."""

    pool: str
    wanted: int
    """Workers that the pool should have."""
    running: int
    """Workers that run."""
    reason: str


def serve_autoscale(
    url: str | None, run: str | None, pool: str, targets: Targets, *, host: str, port: int, cooldown_s: float
) -> None:
    """Serve until a signal. Pools that are called `pool`, or `pool` and a dot before the rest, count together.

    An observer's password will do. Raises ConfigError for a port that is taken.
    """
    signal.signal(signal.SIGTERM, _leave)
    where, name = locate_run(url, run)
    with client_of(where, name) as client:
        pooled = PooledAutoscaling(client, pool, targets, cooldown_s, False)
        with serving(pooled, host, port) as address:
            say(f"Serving the number of workers wanted in pool {pool} at {address}. Ctrl-C ends it.")
            said = None
            while True:
                now = pooled.look()
                if (now.wanted, now.reason) != said:
                    said = now.wanted, now.reason
                    say(f"Pool {pool}: {now.wanted} workers wanted, {now.running} run. {now.reason}")
                time.sleep(LOOK_S)


@dataclass
class PooledAutoscaling(Autoscaling):
    """Looks at many pools as at one, and remembers itself how many workers it wants."""

    now: Wanted = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._wanted = 0
        self.now = Wanted(pool=self.pool, wanted=self.targets.least, running=0, reason="No look yet.")

    def look(self) -> Wanted:
        """Return what is wanted now: what was wanted before, while the broker or the run is away; none of a run that is
        finished."""
        try:
            status = self._status()
            if status.state == "finished":
                self.now = msgspec.structs.replace(self.now, wanted=0, running=0, reason="The run is finished.")
            elif not self._is_cooling_down():
                self.now = self._decided(status)
        except BrokerError as error:
            self.now = msgspec.structs.replace(self.now, wanted=self._wanted or self.targets.least, reason=str(error))
        return self.now

    def _decided(self, status: RunStatus) -> Wanted:
        look = self._observe(status)
        return Wanted(pool=self.pool, wanted=self._wanted, running=look.load.running, reason=str(look.decision))

    def _pool(self, status: RunStatus) -> PoolInfo:
        running = sum(pool.running for pool in status.pools if pool.pool.partition(".")[0] == self.pool)
        if not self._wanted:
            self._wanted = min(max(running, self.targets.least), self.targets.most)
        return PoolInfo(pool=self.pool, host="", pid=0, running=running, wanted=self._wanted)

    def _workers(self, status: RunStatus, info: PoolInfo) -> Sequence[WorkerInfo]:
        together = [pool for pool in status.pools if pool.pool.partition(".")[0] == self.pool]
        found = {worker.worker: worker for pool in together for worker in workers_of(status, pool)}
        return tuple(found.values()) or status.workers

    def _ask(self, pool: str, wanted: int) -> None:
        self._wanted = beyond_tolerance(self._wanted, wanted, self.targets)


def beyond_tolerance(before: int, wanted: int, targets: Targets) -> int:
    """Return the number wanted, or the next one that differs from the one before by more than TOLERANCE. Where the
    limits allow none, it stays."""
    if wanted > before:
        wanted = max(wanted, math.floor(before * (1 + TOLERANCE)) + 1)
    elif wanted < before:
        wanted = min(wanted, math.ceil(before * (1 - TOLERANCE)) - 1)
    wanted = min(max(wanted, targets.least), targets.most)
    return wanted if abs(wanted - before) > TOLERANCE * before else before


@contextmanager
def serving(pooled: PooledAutoscaling, host: str, port: int) -> Iterator[str]:
    """Answer requests, and yield the address. Raises ConfigError."""

    class Answer(QuietRequestHandler):
        def do_GET(self) -> None:  # noqa: N802 - the base class finds it by this name
            body = msgspec.json.encode(pooled.now)
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    try:
        server = BoundedServer(host, port, Answer).start()
    except OSError as error:
        raise ConfigError(f"Nothing can be served at {host}, port {port}: {error.strerror or error}.") from error
    try:
        yield f"http://{host}:{server.server_port}/"
    finally:
        server.stop()


def _leave(number: int, frame: FrameType | None) -> None:
    sys.exit(0)
