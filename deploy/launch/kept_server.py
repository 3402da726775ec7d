"""The server that `headway run` keeps: one that dies is started again, on the same data and address."""

import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from headway.broker.server.access import Role
from headway.broker.server.embedded import EmbeddedServer
from headway.learner.checkpoints.disk import free_mib

from .pool import HEALTHY_S
from .processes import guarded
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


class KeptServer:
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
