"""One trial from its first process to its audit."""

import asyncio
import multiprocessing.sharedctypes as shared
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

import msgspec
import uvloop

from broker.schema import RunStatus

from .audit import MUST_BE_ZERO, audit
from .backend import author_of
from .engine import Tally
from .faults import Faults
from .learner import run_learner
from .link import Link
from .process import Role, warm_up
from .protections import PROTECTIONS, mean_s_against
from .server import FragileServer
from .trail import Beginning, Lineage
from .trial import GROUP_SIZE, WORKERS, Trial
from .witness import Witness
from .worker import run_worker

LEARNER = "learner"
BEGINS_WITHIN_S = 60.0
HANGS_AFTER_S = 30.0
"""Without faults and without a step."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """The benchmark's JSON."""

    seed: int
    minutes: float
    without: str
    against: str
    """The protection whose faults struck more often."""
    tasks: int
    steps: int
    seconds: float
    finished: bool
    """False: it hung, and what it had not trained by then counts as lost."""
    kills: dict[str, int]
    effective_kills: dict[str, int]
    """Those that hit a held lease, a batch not yet committed, or weights on their way."""
    stops: dict[str, int]
    crashes: dict[str, int]
    """Ends with an error that nobody asked for; the logs say which."""
    cuts: int
    power_losses: int
    revived_learners: int
    unfenced_learners: int
    """Of these, those that did not end by themselves."""
    full_memory: int
    damaged: int
    repeated_submissions: int
    lost: int
    trained_twice: int
    over_lag_bound: int
    corrupt: int
    off_lineage: int
    tokens_generated: int
    tokens_resumed: int
    tokens_regenerated: int
    """Generated and not trained."""
    dead_letters: int
    dropped_by_rule: int
    shows: tuple[str, ...]
    """What must not be, and is."""
    covered_by: str
    """What was taken out along with the protection, or makes good its absence."""

    @property
    def is_clean(self) -> bool:
        return self.finished and not self.shows


def run_trial(trial: Trial) -> Outcome:
    """Blocks for about `minutes`, and then until the run is finished or hangs."""
    warm_up("benchmarks.chaos.warm")
    return uvloop.run(_Stage(trial).play())


class _Stage:
    """All processes of one trial, and the links between them."""

    def __init__(self, trial: Trial) -> None:
        self._trial = trial
        self._server = FragileServer(trial)
        self._tallies: list[Tally] = []
        self._workers = [f"worker-{number}" for number in range(WORKERS)]
        self._links = {name: Link(self._server.port) for name in (LEARNER, *self._workers)}
        self._roles = {name: Role(name, partial(self._command, name)) for name in self._links}

    async def play(self) -> Outcome:
        """Faults, then calm, then the audit."""
        began = time.monotonic()
        async with self._everything_runs() as witness:
            workers = [self._roles[name] for name in self._workers]
            faults = Faults(
                self._trial.seed,
                mean_s_against(self._trial.against),
                self._roles[LEARNER],
                workers,
                self._links,
                self._server,
                witness,
            )
            async with asyncio.timeout(BEGINS_WITHIN_S):
                await witness.sees_generation()  # the first imports are no part of the trial
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(faults.strike())
                await self._finished_within(60 * self._trial.minutes)
                faults.end()
            finished = await self._finishes()
            status = await witness.status()
        return self._outcome(faults, status, finished, time.monotonic() - began)

    @asynccontextmanager
    async def _everything_runs(self) -> AsyncIterator[Witness]:
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._server.close)
            await self._server.start()
            for link in self._links.values():
                await stack.enter_async_context(link)
            witness = Witness(self._server.url)
            stack.push_async_callback(witness.close)
            supervisors = [asyncio.create_task(role.supervise()) for role in self._roles.values()]
            try:
                yield witness
            finally:
                for role, supervisor in zip(self._roles.values(), supervisors, strict=True):
                    supervisor.cancel()
                    role.end()

    def _command(self, name: str) -> tuple[Any, tuple[Any, ...]]:
        url = self._links[name].url
        if name == LEARNER:
            return run_learner, (self._trial, url)
        tally = shared.RawValue(Tally)
        self._tallies.append(tally)
        return run_worker, (self._trial, url, name, tally)

    async def _finished_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                return await self._roles[LEARNER].finished.wait()
        except TimeoutError:
            return False

    async def _finishes(self) -> bool:
        """Undisturbed; False where nothing moves any more."""
        reached = self._trial.checkpoints.latest()
        while not await self._finished_within(HANGS_AFTER_S):
            if reached == (reached := self._trial.checkpoints.latest()):
                return False
        return True

    def _outcome(self, faults: Faults, status: RunStatus | None, finished: bool, seconds: float) -> Outcome:
        trails = self._trial.trails
        found = audit(Lineage.of(_last(self._trial), trails), trails, self._trial.groups)
        generated = sum(tally.generated for tally in self._tallies)
        queues = status.queues if status else None
        return Outcome(
            seed=self._trial.seed,
            minutes=self._trial.minutes,
            without=self._trial.without,
            against=self._trial.against,
            tasks=self._trial.groups * GROUP_SIZE,
            steps=found.steps,
            seconds=round(seconds, 1),
            finished=finished,
            kills=dict(faults.kills),
            effective_kills=dict(faults.effective),
            stops=dict(faults.stops),
            crashes={name: role.crashes for name, role in self._roles.items()},
            cuts=faults.others["cuts"],
            power_losses=faults.others["power_losses"],
            revived_learners=faults.others["revived_learners"],
            unfenced_learners=faults.others["unfenced_learners"],
            full_memory=faults.others["full_memory"],
            damaged=faults.others["damaged"],
            repeated_submissions=sum(tally.repeated for tally in self._tallies),
            lost=found.lost,
            trained_twice=found.trained_twice,
            over_lag_bound=found.over_lag_bound,
            corrupt=found.corrupt,
            off_lineage=found.off_lineage,
            tokens_generated=generated,
            tokens_resumed=sum(tally.resumed for tally in self._tallies),
            tokens_regenerated=generated - found.trained_tokens,
            dead_letters=queues.rejected if queues else 0,
            dropped_by_rule=queues.dropped_stale if queues else 0,
            shows=tuple(name for name in MUST_BE_ZERO if getattr(found, name)),
            covered_by=PROTECTIONS[self._trial.without].covered_by if self._trial.without else "",
        )


def _last(trial: Trial) -> Beginning:
    """Where the next learner would begin."""
    checkpoint = trial.checkpoints.latest()
    return Beginning(author_of(checkpoint.path), checkpoint.state.step) if checkpoint else Beginning()
