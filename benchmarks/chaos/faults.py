"""What goes wrong, how often, and for how long; drawn from the seed, each kind from a sequence of its own."""

import asyncio
import random
import signal
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping

from .link import Link
from .process import Role, send
from .server import FragileServer
from .trial import LEASE_TTL_S
from .witness import Witness

Act = Callable[[random.Random], Awaitable[None]]

MEAN_S = {
    "kill worker": 4.0,
    "kill learner": 11.0,
    "kill server": 30.0,
    "power loss": 14.0,
    "stop worker": 16.0,
    "stop learner": 40.0,
    "revive learner": 25.0,
    "stop server": 40.0,
    "cut link": 8.0,
    "fill memory": 45.0,
    "damage blob": 6.0,
}
"""Between two of a kind, exponentially distributed. A `blackout` strikes only where it is asked for."""
BLOBS = ("payload", "payload", "segment", "prompt")
"""What is damaged, by the names of their keys."""
SLOW_DISK_S = 3.0
FENCED_WITHIN_S = 15.0
"""A learner that was replaced must have noticed by then."""


class Faults:
    """Strikes until told to stop; counts what it did."""

    def __init__(
        self,
        seed: int,
        mean_s: Mapping[str, float],
        learner: Role,
        workers: list[Role],
        links: dict[str, Link],
        server: FragileServer,
        witness: Witness,
    ) -> None:
        self._seed = seed
        self._mean_s = mean_s
        self._learner = learner
        self._workers = workers
        self._links = links
        self._server = server
        self._witness = witness
        self._over = asyncio.Event()
        self._learner_lock = asyncio.Lock()
        self.kills: Counter[str] = Counter()
        self.effective: Counter[str] = Counter()
        self.stops: Counter[str] = Counter()
        self.others: Counter[str] = Counter()

    async def strike(self) -> None:
        """All kinds at once, until `end`; what was broken is mended when it returns."""
        acts: dict[str, Act] = {
            "kill worker": self._kill_worker,
            "kill learner": self._kill_learner,
            "kill server": self._kill_server,
            "blackout": self._black_out,
            "power loss": self._lose_power,
            "stop worker": self._stop_worker,
            "stop learner": self._stop_learner,
            "revive learner": self._revive_learner,
            "stop server": self._stop_server,
            "cut link": self._cut_link,
            "fill memory": self._fill_memory,
            "damage blob": self._damage_blob,
        }
        async with asyncio.TaskGroup() as tasks:
            for name, mean_s in self._mean_s.items():
                tasks.create_task(self._repeat(random.Random(f"{self._seed} {name}"), mean_s, acts[name]))

    def end(self) -> None:
        """No more from now on."""
        self._over.set()

    async def _repeat(self, rng: random.Random, mean_s: float, act: Act) -> None:
        while not await self._is_over_after(rng.expovariate(1 / mean_s)):
            await act(rng)

    async def _is_over_after(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                return await self._over.wait()
        except TimeoutError:
            return False

    async def _kill(self, what: str, role: Role) -> None:
        """Stopped first, so that what the broker says of it is true when it dies."""
        role.signal(signal.SIGSTOP)
        self._note_kill(what, await self._witness.is_effective(role.name))
        role.kill()

    def _note_kill(self, what: str, is_effective: bool) -> None:
        self.kills[what] += 1
        self.effective[what] += is_effective

    async def _kill_worker(self, rng: random.Random) -> None:
        await self._kill("worker", rng.choice(self._workers))

    async def _kill_learner(self, rng: random.Random) -> None:
        async with self._learner_lock:
            await self._kill("learner", self._learner)

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
        """One machine had both the server and the learner, and a slow disk: what is lost reaches past a checkpoint."""
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
        """Often for longer than its leases last."""
        pid = role.pid
        if pid is not None:
            self.stops[what] += 1
            send(pid, signal.SIGSTOP)
            await asyncio.sleep(seconds)
            send(pid, signal.SIGCONT)

    async def _revive_learner(self, rng: random.Random) -> None:
        """One that was taken for dead comes back when another has claimed the run."""
        async with self._learner_lock:
            self._learner.signal(signal.SIGSTOP)
            old = self._learner.detach()
            await asyncio.sleep(rng.uniform(0.5, 2) * LEASE_TTL_S)
        if old is None or old.pid is None:
            return
        self.others["revived_learners"] += 1
        send(old.pid, signal.SIGCONT)
        await asyncio.to_thread(old.join, FENCED_WITHIN_S)
        if old.exitcode is None:
            self.others["unfenced_learners"] += 1
            old.kill()

    async def _stop_server(self, rng: random.Random) -> None:
        async with self._server.lock:
            self.stops["server"] += 1
            self._server.stop()
            await asyncio.sleep(rng.uniform(0.5, 2) * LEASE_TTL_S)
            self._server.resume()

    async def _cut_link(self, rng: random.Random) -> None:
        """Dead, silent or slow."""
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

    async def _damage_blob(self, rng: random.Random) -> None:
        async with self._server.lock:
            self.others["damaged"] += await self._server.damage(rng, rng.choice(BLOBS))
