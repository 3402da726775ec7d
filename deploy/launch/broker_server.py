"""The broker's server: `headway run` supervises an embedded one, and `headway broker` runs one in its own terminal.

An embedded server that dies is started again, on the same data and address. A server of the user's own is checked: what
is risky about it is printed, and one that would lose samples is refused."""

import asyncio
import shlex
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

from headway.broker.client.broker import BlockingBroker
from headway.broker.connection.address import without_password
from headway.broker.connection.server_traits import inspect, may_work
from headway.broker.errors import BrokerError, BrokerUnavailableError, HeadwayError, RefusedByServerError
from headway.broker.server.access import Role
from headway.broker.server.embedded import LOOPBACK, EmbeddedServer
from headway.deploy.printing import complain, say
from headway.deploy.run.run_directory import held, writable
from headway.learner.disk import free_mib

from .local_launcher import guarded
from .process_pool import HEALTHY_S
from .supervisor import RoleFailedError

MAX_RESTARTS = 5
"""Restarts in a row; after more of them the cause is one that another start does not cure."""
LOG_LINES = 12
LOOK_S = 1.0
"""Seconds between two questions whether the server can write."""


class WriteWatch:
    """Says once when an embedded server cannot write its data, and once when it can again. While it does not answer,
    nothing is said."""

    def __init__(self, server: EmbeddedServer, say: Callable[[str], None]) -> None:
        self._server, self._say = server, say
        self._can_write, self._look_again = True, 0.0

    def look(self) -> None:
        """Ask the server, at most once in LOOK_S."""
        if time.monotonic() < self._look_again:
            return
        can_write = self._server.can_write()
        self._look_again = time.monotonic() + LOOK_S
        if can_write is None or can_write == self._can_write:
            return
        self._can_write = can_write
        if can_write:
            self._say("The server can write its data again.")
            return
        free = ""
        with suppress(OSError):  # a disk that fails tells nothing
            free = f" ({free_mib(self._server.log):.1f} MiB are free there)"
        self._say(
            f"The server cannot write its data to {self._server.directory}{free}, and takes no writes meanwhile. Make"
            f" room, or look for another reason in its log, {self._server.log}. All that write to it wait, and go on"
            " by themselves."
        )


class SupervisedServer:
    """Runs an embedded server inside a `with` block. Its owner calls `check` now and then."""

    def __init__(self, directory: Path, say: Callable[[str], None]) -> None:
        self._server = EmbeddedServer(directory, has_users=True)
        self._say = say
        self._watch = WriteWatch(self._server, say)
        self._guard = ExitStack()
        self._started = 0.0
        self._failures = 0
        """Restarts in a row."""
        self.restarts = 0
        """Restarts in the whole run, for the summary."""

    def url_of(self, role: Role) -> str:
        """Return the URL by which this role reaches the server; it is the same after every start."""
        return self._server.url_of(role)

    @property
    def pid(self) -> int:
        """The process id of the server that runs now."""
        return self._server.pid

    def check(self) -> None:
        """Start a dead server again, and say if it cannot write. Raises RoleFailedError if it keeps dying, HeadwayError
        if it does not start."""
        if self._server.is_alive():
            self._watch.look()
            return
        self._failures = 1 if time.monotonic() - self._started > HEALTHY_S else self._failures + 1
        if self._failures > MAX_RESTARTS:
            raise RoleFailedError(
                f"The server has died again after {MAX_RESTARTS} restarts: the run has been stopped."
                f" Its log, {self._server.log}, ends with:\n{self._last_lines()}"
            )
        self._say(
            f"The server has died. Starting it again with its data ({self._failures} of {MAX_RESTARTS})."
            f" Its log: {self._server.log}"
        )
        self.restarts += 1
        self._start()

    def __enter__(self) -> Self:
        self._start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._guard.close()
        self._server.stop()

    def _start(self) -> None:
        self._guard.close()  # the dead server's guard could later signal another process with that number
        self._server.start()
        self._started = time.monotonic()
        self._guard.enter_context(guarded(self._server.pid))

    def _last_lines(self) -> str:
        lines = self._server.log.read_text(errors="replace").splitlines()
        return "\n".join(lines[-LOG_LINES:])


@contextmanager
def ignoring_absent_server() -> Iterator[None]:
    """Leave the block where no server answers yet. Raises RefusedByServerError for one that answers and refuses us."""
    try:
        yield
    except RefusedByServerError:
        raise
    except BrokerUnavailableError:
        pass


def check_traits(url: str, say: Callable[[str], object], *, timeout_s: float) -> None:
    """Print what is risky about the server at `url`. Raises BrokerError if it would lose samples silently, and
    BrokerUnavailableError if it does not answer."""
    traits, shown = asyncio.run(inspect(url, timeout_s=timeout_s)), without_password(url)
    if traits.evictions:
        raise BrokerError(
            f"The server at {shown} throws keys away once its memory is full (maxmemory-policy"
            f" {', '.join(traits.evictions)}), and samples, leases and batches with them: set it to noeviction"
            " (`CONFIG SET maxmemory-policy noeviction`, and in its configuration)."
        )
    if traits.is_open:
        say(
            f"Warning: the server at {shown} asks for no password. Anything that reaches its port can write the"
            " configuration, prompts and weights of its runs. `headway acl` prints users for it, one for each role;"
            " `headway broker` starts a server that has them."
        )
    if traits.has_file is False:
        say(
            f"Warning: the server at {shown} keeps no append-only file: when it restarts, all that was generated and"
            " not yet trained is generated anew. `CONFIG SET appendonly yes` mends that, and the same in its"
            " configuration."
        )


def check_may_work(url: str, run: str, *, timeout_s: float) -> None:
    """Raise BrokerError where the URL's user is another role's and has no rights to a worker's samples, and
    BrokerUnavailableError where the server does not answer."""
    if not asyncio.run(may_work(url, run, timeout_s=timeout_s)):
        raise BrokerError(
            f"The user of {without_password(url)} may not do the work of run {run}'s workers. Is it another role's, or"
            " another run's? `headway broker` prints a line for each role: take the one of `headway workers`. Of your"
            " own server, name the user headway-worker and its password, and give it the rights that `headway acl` of"
            " this version prints."
        )


POLL_S = 0.2
PATIENCE_S = 3.0
"""Seconds to wait for the server: a user waits for the answer."""
COMMANDS = {
    Role.LEARNER: "headway learner RECIPE.yaml",
    Role.WORKER: "headway workers --count 2",
    Role.SCORER: "headway scorers --count 1",
    Role.OBSERVER: "headway status --watch",
}


def run_server(directory: Path, port: int | None, host: str = LOOPBACK) -> int:
    """Serve until a signal, with a port also at `host`. The data stay in `directory`, and the next start continues with
    them."""
    stops: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        stops.append(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, note)
    with writable(directory, "--directory"):
        directory.mkdir(parents=True, exist_ok=True)
    with (
        held(directory.resolve(), "directory (--directory)"),  # two servers would spoil each other's files
        EmbeddedServer(directory.resolve(), port=port, has_users=True, host=host) as server,
        guarded(server.pid),
    ):
        say(f"Serving {server.url}, data in {directory}. Ctrl-C stops. In other terminals, each with its own user:")
        for role, command in COMMANDS.items():
            say(f"  export HEADWAY_RUN=NAME HEADWAY_BROKER={shlex.quote(server.url_of(role))}")
            say(f"  {command}")
        say(
            "Passwords are in the files that these URLs name; a reader of the learner's may do"
            " all that the learner does."
        )
        watch = WriteWatch(server, complain)
        while not stops:
            watch.look()
            if not server.is_alive():
                raise HeadwayError(
                    f"The server has died; its log is in {directory}. Starting again goes on with its data."
                )
            time.sleep(POLL_S)
    say("Stopped; starting again with the same --directory goes on with its data.")
    return 0


def check_server(url: str) -> int:
    """Print whether Headway can use the server at `url`, and its runs. Raises HeadwayError if Headway cannot use it."""
    check_traits(url, complain, timeout_s=PATIENCE_S)
    client = BlockingBroker(url, "headway-check", timeout_s=PATIENCE_S)
    try:
        runs = client.call(client.broker.status.runs_for_people())
    finally:
        client.close()
    say(f"{without_password(url)} answers. Runs: {runs}.")
    return 0
