"""The class inside a Ray actor: it starts one child process on the node where Ray placed it, and watches it.

Ray starts this class wherever it finds room; the child is the same one that the `local` launcher starts. It
watches the actor's process, so it ends with the actor, whose end Ray brings about when the node or the driver is gone.
"""

import asyncio
import shutil
import socket
import sys
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from .base import ERROR_PREFIX, Command
from .processes import Child

POLL_S = 0.1
CANNOT_START = 127
"""The exit code of a command that could not be started, as a shell gives it."""


@dataclass(frozen=True)
class Outcome:
    """The end of a command."""

    code: int
    """Its exit code; negative: the signal that ended it."""
    is_done: bool = False
    """Whether it did its work, see `Handle.is_done`: its exit notice lies on its own node."""


class RayActor:
    """The actor of one command. All its methods run in one thread, and only `ended` takes long."""

    def __init__(self, command: Command, python: str, home: str) -> None:
        """Start the command. `python`: the driver's interpreter, for which this node's is put in its place. `home`: the
        driver's directory, in which a command without a directory of its own runs; it must exist here too."""
        here = tuple(sys.executable if word == python else word for word in command.argv)
        self._command = replace(command, argv=here, cwd=command.cwd or Path(home))
        self._temporary = command.cwd if command.cwd is not None and not command.cwd.exists() else None
        self._made: Path | None = None
        """The directory of exit notices that this host made. On the driver's node the driver made it, for itself."""
        self._child: Child | None = None
        self._failure = ""
        try:
            if command.cwd is None and not Path(home).is_dir():
                raise FileNotFoundError(f"this node has no {home}: let it and the nodes share a file system")
            if command.exit_notice is not None and not command.exit_notice.parent.exists():
                self._made = command.exit_notice.parent
                self._made.mkdir(parents=True, exist_ok=True)
            self._child = Child(self._command)
        except OSError as error:
            self._failure = f"{ERROR_PREFIX}{command.name} cannot start on {socket.gethostname()}: {error}\n"

    def node(self) -> str:
        """Return the name of the machine. It answers once Ray has placed the actor."""
        return socket.gethostname()

    async def ended(self) -> Outcome:
        """Wait for the command's end."""
        while self._child is not None and self._child.exit_code() is None:  # noqa: ASYNC110 - a process sets no event
            await asyncio.sleep(POLL_S)
        return self._outcome()

    def terminate(self) -> None:
        """Ask the command to end in an orderly way."""
        if self._child is not None:
            self._child.terminate()

    def log(self) -> str:
        """Return the end of what the command has printed."""
        return self._failure if self._child is None else self._child.log()

    def kill(self) -> tuple[Outcome, str]:
        """End the command and all that it started, and return how it ended and its log."""
        if self._child is not None:
            self._child.kill()
        outcome, log = self._outcome(), self.log()
        self._clear()
        return outcome, log

    def _outcome(self) -> Outcome:
        code = CANNOT_START if self._child is None else self._child.exit_code()
        assert code is not None
        return Outcome(code, self._child is not None and self._child.is_done())

    def _clear(self) -> None:
        """Remove the directory that was made for the command, as far as no other command on this node uses it."""
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)
        if self._command.exit_notice is not None:
            self._command.exit_notice.unlink(missing_ok=True)
        if self._made is not None:
            with suppress(OSError):  # other processes of the run are there
                self._made.rmdir()
