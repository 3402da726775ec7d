"""All faults and their durations, drawn from the seed, each kind from a sequence of its own."""

import asyncio
import multiprocessing.sharedctypes as shared
import random
import signal
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from ctypes import c_int64
from dataclasses import dataclass
from functools import partial
from multiprocessing.process import BaseProcess

from headway.broker import Broker

from .learner import run_learner
from .network import Link, flood, listening_ports
from .pills import Hostile
from .process import Role, begin, descendants, send
from .server import Disk, FragileServer, no_file_grows
from .trial import LEASE_TTL_S, RUN, Trial
from .witness import Witness, fate_of
from .worker import Tally, run_worker

Act = Callable[[random.Random], Awaitable[None]]

HOST, SANDBOX = "headway.broker.user_code.host", "monty"
"""Words in the commands of these processes."""
BLOBS = ("payload", "payload", "segment", "prompt")
"""The kinds of blobs that are damaged, by the names of their keys."""
SLOW_DISK_S = 3.0
FLOODS_SERVER, FILLS_SERVERS = 0.5, 0.5
"""The shares of these faults that strike the server."""


LEFT_WORKERS = 3
LEFT_STEPS = 6
"""The steps that the earlier run trains before it ends, so that it has weights beyond the first."""
LEFT_WITHIN_S = 15.0
"""The seconds within which a woken process must find out."""
LEFT_POLL_S = 0.1


class Leftovers:
    """A learner and its workers, whose samples and knowledge are of a run that is gone."""

    def __init__(self, trial: Trial, url: str) -> None:
        self._trial = trial.overwritten
        self._url = url
        self._asleep: list[BaseProcess] = []
        self._incarnation = shared.RawValue(c_int64)
        self._tallies = [shared.RawValue(Tally) for _ in range(LEFT_WORKERS)]
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
            has_trained = status is not None and status.announced is not None and status.announced.step >= LEFT_STEPS
            if status is not None and has_trained and sum(info.active > 0 for info in status.workers) == LEFT_WORKERS:
                return
            await asyncio.sleep(LEFT_POLL_S)


def _signal(process: BaseProcess, number: signal.Signals) -> None:
    if process.pid is not None:
        send(process.pid, number)


@dataclass(frozen=True, kw_only=True)
class Scene:
    """The processes, links and disks that faults strike, and the hostile programs."""

    learner: Role
    workers: list[Role]
    scorers: list[Role]
    agents: list[Role]
    links: dict[str, Link]
    server: FragileServer
    learners_disk: Disk
    witness: Witness
    hostile: Hostile
    leftovers: Leftovers
    incarnation_of: Callable[[str], int]
    """The incarnation that the learner's process of this name has claimed; 0: none yet."""


class Faults:
    """Strikes until told to stop, and counts its strikes."""

    def __init__(self, seed: int, mean_s: Mapping[str, float], scene: Scene) -> None:
        self._seed = seed
        self._mean_s = mean_s
        self._scene = scene
        self._learner = scene.learner
        self._workers = scene.workers
        self._links = scene.links
        self._server = scene.server
        self._witness = scene.witness
        self._over = asyncio.Event()
        self._learner_lock = asyncio.Lock()
        self.kills: Counter[str] = Counter()
        self.effective: Counter[str] = Counter()
        self.held_by_killed: Counter[str] = Counter()
        """Samples of killed workers, and requests of killed scorers."""
        self.stops: Counter[str] = Counter()
        self.others: Counter[str] = Counter()
        self.struck: Counter[str] = Counter()
        """Acts by kind, those that found nothing to strike among them."""

    async def strike(self) -> None:
        """Run all kinds of faults at once, until `end`; everything broken is mended when it returns."""
        acts: dict[str, Act] = {
            "kill worker": self._kill_worker,
            "kill learner": self._kill_learner,
            "kill server": self._kill_server,
            "blackout": self._black_out,
            "power loss": self._lose_power,
            "kill scorer": self._kill_scorer,
            "stop worker": self._stop_worker,
            "stop learner": self._stop_learner,
            "revive learner": self._revive_learner,
            "stop server": self._stop_server,
            "cut link": self._cut_link,
            "fill memory": self._fill_memory,
            "damage blob": self._damage_blob,
            "send pill": self._scene.hostile.send,
            "hoard leases": self._scene.hostile.hoard,
            "ask junk": self._scene.hostile.ask,
            "wake leftover": self._scene.leftovers.wake,
            "flood": self._flood,
            "fill disk": self._fill_disk,
            "kill host": self._kill_host,
            "kill sandbox": self._kill_sandbox,
            "kill agents": self._kill_agents,
        }
        async with asyncio.TaskGroup() as tasks:
            for name, mean_s in self._mean_s.items():
                tasks.create_task(self._repeat(name, mean_s, acts[name]))

    def unmet(self) -> list[str]:
        """Return the roles of which no kill, and the other faults of which no strike, has hit anything so far."""
        roles = {"worker", "learner", "server", *(["scorer"] if self._scene.scorers else [])}
        roles |= {name for name in ("host", "sandbox", "agents") if f"kill {name}" in self._mean_s}
        kills = [role for role in sorted(roles) if f"kill {role}" in self._mean_s and not self.effective[role]]
        others = {
            "power loss": "power_losses",
            "revive learner": "revived_learners",
            "cut link": "cuts",
            "flood": "floods",
            "fill disk": "full_disks",
            "damage blob": "damaged",
        }
        return kills + [act for act, name in others.items() if act in self._mean_s and not self.others[name]]

    def end(self) -> None:
        """Begin no more faults."""
        self._over.set()

    async def _repeat(self, name: str, mean_s: float, act: Act) -> None:
        rng = random.Random(f"{self._seed} {name}")
        while not await self._is_over_after(rng.expovariate(1 / mean_s)):
            try:
                await act(rng)
            except asyncio.CancelledError:
                task = asyncio.current_task()
                assert task is not None
                assert task.cancelling(), f"{name}: a task that ends so ends without a word"
                raise
            self.struck[name] += 1

    async def _is_over_after(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                return await self._over.wait()
        except TimeoutError:
            return False

    async def _kill(self, what: str, role: Role) -> None:
        """Stop the role before the kill, so that the broker's status is still true when it dies."""
        role.signal(signal.SIGSTOP)
        held = 0 if role.pid is None else await self._witness.held_by(role.process_name)
        self.held_by_killed[what] += held
        self._note_kill(what, held > 0)
        role.kill()

    def _note_kill(self, what: str, is_effective: bool) -> None:
        self.kills[what] += 1
        self.effective[what] += is_effective

    async def _kill_worker(self, rng: random.Random) -> None:
        await self._kill("worker", rng.choice(self._workers))

    async def _kill_scorer(self, rng: random.Random) -> None:
        if self._scene.scorers:
            await self._kill("scorer", rng.choice(self._scene.scorers))

    async def _kill_agents(self, rng: random.Random) -> None:
        if self._scene.agents:
            role = rng.choice(self._scene.agents)
            self._note_kill("agents", role.pid is not None)
            role.kill()

    async def _kill_host(self, rng: random.Random) -> None:
        """Kill a process in which a worker runs agents."""
        self._kill_one("host", rng, lambda command: HOST in command)

    async def _kill_sandbox(self, rng: random.Random) -> None:
        """Kill a process in which the agents' tool runs."""
        self._kill_one("sandbox", rng, lambda command: SANDBOX in command)

    def _kill_one(self, what: str, rng: random.Random, is_meant: Callable[[str], bool]) -> None:
        roles = [*self._workers, *self._scene.agents]
        found = [pid for role in roles if role.pid for pid in descendants(role.pid, is_meant)]
        self._note_kill(what, bool(found))
        if found:
            send(rng.choice(found), signal.SIGKILL)

    async def _kill_learner(self, rng: random.Random) -> None:
        async with self._learner_lock:
            self._learner.signal(signal.SIGSTOP)
            is_there = self._learner.pid is not None
            self._note_kill("learner", is_there and await self._witness.is_effective("learner"))
            self._learner.kill()

    async def _kill_server(self, rng: random.Random) -> None:
        async with self._server.lock:
            self._note_kill("server", await self._witness.is_effective("server"))
            await self._server.kill()
            await asyncio.sleep(rng.uniform(0, 1))
            await self._server.start()

    async def _lose_power(self, rng: random.Random) -> None:
        async with self._server.lock:
            self._note_kill("server", await self._witness.is_effective("server"))
            await self._server.lose_power()
            self.others["power_losses"] += 1
            await asyncio.sleep(rng.uniform(0, 1))
            await self._server.start()

    async def _black_out(self, rng: random.Random) -> None:
        """Kill server and learner, as on one machine with a slow disk: the loss reaches past a checkpoint."""
        async with self._learner_lock, self._server.lock:
            self._note_kill("server", await self._witness.is_effective("server"))
            self._note_kill("learner", await self._witness.is_effective("learner"))
            self.others["power_losses"] += 1
            await self._server.lose_power(SLOW_DISK_S)
            self._learner.kill()
            await asyncio.sleep(rng.uniform(0, 1))
            await self._server.start()

    async def _stop_worker(self, rng: random.Random) -> None:
        await self._stop("worker", rng.choice(self._workers), rng.uniform(0.5, 2.5) * LEASE_TTL_S)

    async def _stop_learner(self, rng: random.Random) -> None:
        async with self._learner_lock:
            await self._stop("learner", self._learner, rng.uniform(0.5, 2) * LEASE_TTL_S)

    async def _stop(self, what: str, role: Role, seconds: float) -> None:
        """Stop a role, often for longer than its leases last."""
        pid = role.pid
        if pid is not None:
            self.stops[what] += 1
            send(pid, signal.SIGSTOP)
            await asyncio.sleep(seconds)
            send(pid, signal.SIGCONT)

    async def _revive_learner(self, rng: random.Random) -> None:
        """Stop a learner that is taken for dead, and resume it, as a rule when another one has claimed the run."""
        async with self._learner_lock:
            self._learner.signal(signal.SIGSTOP)
            incarnation = partial(self._scene.incarnation_of, self._learner.process_name)
            old = self._learner.detach()
            await asyncio.sleep(rng.uniform(0.5, 2) * LEASE_TTL_S)
        if old is None or old.pid is None:
            return
        self.others["revived_learners"] += 1
        send(old.pid, signal.SIGCONT)
        fate = await fate_of(old, incarnation, self._witness)
        self.others[f"{fate}_learners"] += 1
        if fate == "unfenced":
            send(old.pid, signal.SIGUSR1)  # the log shows what it is at
            await asyncio.sleep(1.0)
        old.kill()

    async def _stop_server(self, rng: random.Random) -> None:
        async with self._server.lock:
            self.stops["server"] += 1
            self._server.stop()
            await asyncio.sleep(rng.uniform(0.5, 2) * LEASE_TTL_S)
            self._server.resume()

    async def _cut_link(self, rng: random.Random) -> None:
        """Cut, stall or slow a link."""
        link = self._links[rng.choice(sorted(self._links))]
        self.others["cuts"] += 1
        match rng.choice(("cut", "stall", "delay")):
            case "cut":
                link.cut()
            case "stall":
                link.stall()
            case "delay":
                link.delay_s = rng.uniform(0.02, 0.3)
        await asyncio.sleep(rng.uniform(0.2, 2) * LEASE_TTL_S)
        link.mend()

    async def _fill_memory(self, rng: random.Random) -> None:
        async with self._server.lock, self._server.full_memory():
            self.others["full_memory"] += 1
            await asyncio.sleep(rng.uniform(0.5, 3))

    async def _flood(self, rng: random.Random) -> None:
        """Flood the server, or another listening process."""
        self.others["floods"] += 1
        roles = [self._learner, *self._workers]
        ports = listening_ports([role.pid for role in roles if role.pid is not None])
        if not ports or rng.random() < FLOODS_SERVER:
            async with self._server.lock:
                await flood(self._server.port, rng.uniform(0.5, 2) * LEASE_TTL_S)
        else:
            await flood(rng.choice(ports), rng.uniform(0.5, 2) * LEASE_TTL_S)

    async def _fill_disk(self, rng: random.Random) -> None:
        """Fill the server's disk, or the learner's."""
        self.others["full_disks"] += 1
        seconds, server, disk = rng.uniform(0.5, 1.5) * LEASE_TTL_S, self._server, self._scene.learners_disk
        if rng.random() < FILLS_SERVERS and server.disk.is_mounted:
            async with server.lock:
                async with server.disk.full():
                    await asyncio.sleep(seconds)
                await server.start()  # a server that syncs every write ends where it cannot
        elif disk.is_mounted:
            async with disk.full():
                await asyncio.sleep(seconds)
        elif (pid := self._learner.pid) is not None:
            async with no_file_grows(pid):
                await asyncio.sleep(seconds)

    async def _damage_blob(self, rng: random.Random) -> None:
        async with self._server.lock:
            self.others["damaged"] += await self._server.damage(rng, rng.choice(BLOBS))
