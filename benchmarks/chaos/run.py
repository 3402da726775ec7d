"""One trial from its first process to its audit, and the leftovers of an earlier run, whose name it has taken."""

import asyncio
import multiprocessing.sharedctypes as shared
import socket
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from ctypes import c_int64
from functools import partial
from typing import Any

import uvloop

from headway.broker.schema.status import RunStatus
from headway.deploy.run.events import EvaluationEvent
from headway.deploy.run.record import EVALUATIONS, read_lines
from headway.deploy.run.run_directory import identity_of

from .audit import MUST_BE_ZERO, Beginning, Lineage, audit
from .faults import Faults, Leftovers, Scene
from .journal import MUST_BE_ZERO as TURNS_MUST_BE_ZERO
from .journal import audit_turns, read_journal
from .learner import author_of, run_learner
from .network import Link
from .outcome import LONG_MINUTES, EpisodeFigures, Outcome, Vitals
from .pills import Hostile
from .process import Role, warm_up
from .protections import PROTECTIONS, mean_s_against
from .server import Disk, FragileServer
from .trial import AGENT_PROCESSES, GROUP_SIZE, SCORERS, WORKERS, Trial
from .witness import Witness
from .worker import Tally, run_agents, run_scorer, run_worker

LEARNER = "learner"
BEGINS_WITHIN_S = 300.0
MORE_AT_MOST = 2.0
"""Faults strike for up to so many times the trial's minutes more."""
LOOK_S = 1.0
OF_TRIAL = ("seed", "minutes", "agents", "rarely", "without", "against", "broadcasts")
STRIKES = (
    *("cuts", "power_losses", "revived_learners", "unfenced_learners", "unreplaced_learners", "floods"),
    *("full_disks", "full_memory", "damaged"),
)
"""Fields of the outcome that the trial has, and that the faults count, by the same names."""


def run_trial(trial: Trial) -> Outcome:
    """Run a trial: block for about `minutes`, and then until the run is finished or hangs."""
    warm_up("benchmarks.chaos.warm")
    return uvloop.run(_Stage(trial).play())


class _Stage:
    """All processes of one trial, and the links between them."""

    def __init__(self, trial: Trial) -> None:
        self._trial = trial
        self._server = FragileServer(trial)
        self._disk = Disk(trial.recipe.run_directory)
        self._vitals = Vitals(self._pids)
        self._tallies = defaultdict[str, list[Tally]](list)
        """The tallies of each worker's processes, in their order."""
        self._incarnations: dict[str, c_int64] = {}
        """The incarnations that the learner's processes have claimed."""
        self._workers = [f"worker-{number}" for number in range(WORKERS)]
        self._scorers = [f"scorer-{number}" for number in range(SCORERS if trial.has_scorers else 0)]
        self._links = {name: Link(self._server.port) for name in (LEARNER, *self._workers, *self._scorers)}
        self._ports = {name: _free_port() for name in self._workers if trial.agents == "outside"}
        """Those of gateways, which a new process takes over."""
        self._agents = [f"agents-{number}" for number in range(AGENT_PROCESSES if self._ports else 0)]
        self._roles = {name: Role(name, partial(self._command, name)) for name in (*self._links, *self._agents)}

    async def play(self) -> Outcome:
        """Run faults, then calm, then the audit."""
        began = time.monotonic()
        mean_s = {name: self._trial.rarely * s for name, s in self._mean_s().items()}
        async with self._servers_and_disks(), self._leftovers("wake leftover" in mean_s) as leftovers:
            async with self._everything_runs(leftovers) as scene:
                faults = Faults(self._trial.seed, mean_s, scene)
                async with asyncio.timeout(BEGINS_WITHIN_S):
                    await scene.witness.sees_generation()  # the first imports are no part of the trial
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(faults.strike())
                    await self._strikes_long_enough(faults)
                    faults.end()
                finished = await self._finishes()
                status = await scene.witness.status()
            return self._outcome(faults, scene, status, finished, time.monotonic() - began)

    def _mean_s(self) -> Mapping[str, float]:
        trial = self._trial
        there_are = {"sandbox": trial.sandbox, "host": trial.agents == "hosted", "agents": trial.agents == "outside"}
        rates = mean_s_against(trial.against, trial.agents)
        return {name: s for name, s in rates.items() if there_are.get(name.removeprefix("kill "), True)}

    async def _strikes_long_enough(self, faults: Faults) -> None:
        """Wait for the trial's minutes, and for up to twice as many more while a fault has not hit anything: on a busy
        machine faults strike as often, and the run does less. A run that has finished has nothing more to hit."""
        is_long = not self._trial.against and self._trial.minutes / self._trial.rarely >= LONG_MINUTES
        if await self._finished_within(60 * self._trial.minutes) or not is_long:
            return
        longest = time.monotonic() + MORE_AT_MOST * 60 * self._trial.minutes
        while faults.unmet() and time.monotonic() < longest and not await self._finished_within(LOOK_S):
            pass

    @asynccontextmanager
    async def _servers_and_disks(self) -> AsyncIterator[None]:
        disks = self._disk, self._server.disk
        for disk in disks:
            disk.mount()
        try:
            await self._server.start()
            yield
        finally:
            await self._server.close()
            for disk in disks:
                disk.unmount()

    @asynccontextmanager
    async def _leftovers(self, are_wanted: bool) -> AsyncIterator[Leftovers]:
        leftovers, witness = Leftovers(self._trial, self._server.url), Witness(self._server.url)
        try:
            if are_wanted:
                async with asyncio.timeout(BEGINS_WITHIN_S):
                    await leftovers.leave_behind(witness)
            yield leftovers
        finally:
            leftovers.close()
            await witness.close()

    @asynccontextmanager
    async def _everything_runs(self, leftovers: Leftovers) -> AsyncIterator[Scene]:
        async with AsyncExitStack() as stack:
            for link in self._links.values():
                await stack.enter_async_context(link)
            witness = Witness(self._server.url)
            stack.push_async_callback(witness.close)
            hostile = Hostile(self._server.url)
            stack.push_async_callback(hostile.close)
            supervisors = [asyncio.create_task(role.supervise()) for role in self._roles.values()]
            watch = asyncio.create_task(self._vitals.watch())
            try:
                yield Scene(
                    learner=self._roles[LEARNER],
                    workers=[self._roles[name] for name in self._workers],
                    scorers=[self._roles[name] for name in self._scorers],
                    agents=[self._roles[name] for name in self._agents],
                    links=self._links,
                    server=self._server,
                    learners_disk=self._disk,
                    witness=witness,
                    hostile=hostile,
                    leftovers=leftovers,
                    incarnation_of=lambda process: self._incarnations[process].value,
                )
            finally:
                watch.cancel()
                for role, supervisor in zip(self._roles.values(), supervisors, strict=True):
                    supervisor.cancel()
                    role.end()

    def _pids(self) -> dict[str, list[int]]:
        workers = [self._roles[name].pid for name in self._workers]
        scorers = [self._roles[name].pid for name in self._scorers]
        found = {"learner": [self._roles[LEARNER].pid], "server": [self._server.pid], "worker": workers}
        found |= {"scorer": scorers} if scorers else {}
        found |= {"agents": [self._roles[name].pid for name in self._agents]} if self._agents else {}
        return {role: [pid for pid in pids if pid is not None] for role, pids in found.items()}

    def _command(self, name: str, process: str) -> tuple[Any, tuple[Any, ...]]:
        if name in self._agents:
            return run_agents, (self._trial, list(self._ports.values()), process)
        url = self._links[name].url
        if name == LEARNER:
            incarnation = self._incarnations[process] = shared.RawValue(c_int64)
            return run_learner, (self._trial, url, incarnation)
        if name in self._scorers:
            return run_scorer, (self._trial, url, name, process)
        tally = shared.RawValue(Tally)
        self._tallies[name].append(tally)
        return run_worker, (self._trial, url, name, process, tally, self._ports.get(name, 0))

    async def _finished_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                return await self._roles[LEARNER].finished.wait()
        except TimeoutError:
            return False

    async def _finishes(self) -> bool:
        """Whether the undisturbed run finishes; False where nothing moves any more."""
        reached = self._trial.checkpoints.latest()
        while not await self._finished_within(self._trial.hangs_after_s):
            if reached == (reached := self._trial.checkpoints.latest()):
                return False
        return True

    def _outcome(
        self, faults: Faults, scene: Scene, status: RunStatus | None, finished: bool, seconds: float
    ) -> Outcome:
        trails, identity = self._trial.trails, identity_of(self._trial.recipe.run_directory)
        lineage = Lineage.of(_last(self._trial), trails)
        found = audit(lineage, trails, self._trial.groups, identity)
        turns = audit_turns((one for step in lineage.steps for one in step.trained), read_journal(self._trial.journal))
        tallies = [tally for of_one in self._tallies.values() for tally in of_one]
        generated = sum(tally.generated for tally in tallies)
        queues = status.queues if status else None
        same: dict[str, Any] = {name: getattr(self._trial, name) for name in OF_TRIAL}
        same |= {name: dict(getattr(faults, name)) for name in ("struck", "kills", "held_by_killed", "stops")}
        same |= {name: faults.others[name] for name in STRIKES}
        same |= {name: getattr(found, name) for name in MUST_BE_ZERO}
        return Outcome(
            tasks=self._trial.groups * GROUP_SIZE,
            steps=found.steps,
            seconds=round(seconds, 1),
            finished=finished,
            **same,
            effective_kills=dict(faults.effective),
            expired_leases=queues.expired_leases if queues else 0,
            copied_leases=queues.copied_leases if queues else 0,
            crashes={name: role.crashes for name, role in self._roles.items()},
            leftovers=scene.leftovers.woken,
            unexpelled_leftovers=scene.leftovers.unexpelled,
            pills=dict(scene.hostile.sent),
            quarantined=scene.hostile.quarantined,
            junk_requests=dict(scene.hostile.asked),
            evaluations=len(read_lines(self._trial.recipe.run_directory / EVALUATIONS, EvaluationEvent)),
            skipped_evaluations=queues.skipped_evaluations if queues else 0,
            hoards=scene.hostile.hoards,
            hoarded=scene.hostile.hoarded,
            rewards_repeated=self._rewards_repeated(),
            received=sum(tally.received for tally in tallies),
            received_by_replacements=sum(t.received for of_one in self._tallies.values() for t in of_one[1:]),
            repeated_submissions=sum(tally.repeated for tally in tallies),
            forgotten_renewals=sum(tally.forgotten for tally in tallies),
            tokens_generated=generated,
            tokens_resumed=sum(tally.resumed for tally in tallies),
            tokens_regenerated=generated - found.trained_tokens,
            dead_letters=queues.rejected if queues else 0,
            dropped_by_rule=queues.dropped_stale if queues else 0,
            episodes=EpisodeFigures.of(turns, tallies) if self._trial.agents else None,
            shows=(
                *(name for name in MUST_BE_ZERO if getattr(found, name)),
                *(name for name in TURNS_MUST_BE_ZERO if getattr(turns, name) and name not in self._excused(faults)),
            ),
            vitals=self._vitals.trend(),
            covered_by=PROTECTIONS[self._trial.without].covered_by if self._trial.without else "",
        ).with_missing()

    def _excused(self, faults: Faults) -> tuple[str, ...]:
        """Return what may happen where a server that does not sync every write loses its last second, in which an agent
        was told an answer."""
        loses = self._trial.appendfsync == "everysec" and faults.others["power_losses"]
        return ("unrecorded",) if loses else ()

    def _rewards_repeated(self) -> int:
        logs = [self._trial.directory / "logs" / f"{name}.log" for name in self._workers]
        return sum(log.read_text(errors="replace").count("it is made once more, alone") for log in logs)


def _last(trial: Trial) -> Beginning:
    """Return the place where the next learner would begin."""
    checkpoint = trial.checkpoints.latest()
    return Beginning(author_of(checkpoint.path), checkpoint.state.step) if checkpoint else Beginning()


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port
