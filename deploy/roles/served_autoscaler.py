"""`headway autoscale --serve`: says over HTTP how many workers a pool should have, for an autoscaler of a cluster.

On Kubernetes each pod is a pool of one worker, called POOL.POD. KEDA asks for the number and starts or stops pods:

    headway autoscale ──GET /──► {"pool": ..., "wanted": 4, "running": 3, "reason": ...} ──► KEDA ──► pods
"""

import math
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType

import msgspec

from headway.broker.errors import BrokerError, ConfigError
from headway.broker.schema.status import PoolInfo, RunStatus, WorkerInfo
from headway.deploy.observe.autoscaling import Targets
from headway.deploy.observe.bounded_server import BoundedServer, Quiet
from headway.deploy.observe.pools import workers_of
from headway.deploy.printing import say

from . import autoscaler
from .autoscaler import Autoscaling
from .looking import client_of, locate_run

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
        together = Together(client, pool, targets, cooldown_s, False)
        with answering(together, host, port) as address:
            say(f"Serving the number of workers wanted in pool {pool} at {address}. Ctrl-C ends it.")
            said = None
            while True:
                now = together.look()
                if (now.wanted, now.reason) != said:
                    said = now.wanted, now.reason
                    say(f"Pool {pool}: {now.wanted} workers wanted, {now.running} run. {now.reason}")
                time.sleep(autoscaler.LOOK_S)


@dataclass
class Together(Autoscaling):
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
        look = self._look(status)
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
        self._wanted = noticeable(self._wanted, wanted, self.targets)


def noticeable(before: int, wanted: int, targets: Targets) -> int:
    """Return the number wanted, or the next one that differs from the one before by more than TOLERANCE. Where the
    limits allow none, it stays."""
    if wanted > before:
        wanted = max(wanted, math.floor(before * (1 + TOLERANCE)) + 1)
    elif wanted < before:
        wanted = min(wanted, math.ceil(before * (1 - TOLERANCE)) - 1)
    wanted = min(max(wanted, targets.least), targets.most)
    return wanted if abs(wanted - before) > TOLERANCE * before else before


@contextmanager
def answering(together: Together, host: str, port: int) -> Iterator[str]:
    """Answer requests, and yield the address. Raises ConfigError."""

    class Answer(Quiet):
        def do_GET(self) -> None:  # noqa: N802 - the base class finds it by this name
            body = msgspec.json.encode(together.now)
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
