"""Terminals: the real command line in processes that share nothing but the network.

Each has its own working directory, HOME and TMPDIR, as on machines of its own.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tests.processes import tethered

from .recipes import SEVENS

HEADWAY = str(Path(sys.executable).with_name("headway"))
DEADLINE_S = 900.0
"""A deadline for steps that take seconds: a machine may be busy, but nothing waits for ever."""
TAIL_LINES = 30


class Terminal:
    """One `headway` command and what it printed."""

    def __init__(
        self, directory: Path, arguments: tuple[str, ...], environment: Mapping[str, str], headway: str = HEADWAY
    ) -> None:
        self.directory = directory
        self.log = directory / "terminal.log"
        (directory / "tmp").mkdir(parents=True, exist_ok=True)
        (directory / "sevens.py").write_text(SEVENS)
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                tethered(headway, *arguments),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=directory,
                env={**machine_of(directory), **environment},
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def send(self, number: signal.Signals) -> None:
        """Send the signal, as `kill` does from another terminal."""
        self._process.send_signal(number)

    def exit_code(self) -> int | None:
        """Return the exit code, or None while the command runs."""
        return self._process.poll()

    def wait(self) -> int:
        """Wait until the command has ended by itself, and return its exit code."""
        try:
            return self._process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it still runs after {DEADLINE_S:g} s: {self.tail()}") from None

    def succeeds(self) -> None:
        """Assert that the command ends by itself and succeeds."""
        assert self.wait() == 0, self.tail()

    def tail(self) -> str:
        """Return the last lines of output, under the directory's name."""
        return "\n".join([f"--- {self.directory.name}", *self.said.splitlines()[-TAIL_LINES:]])

    def close(self) -> None:
        """End the command if it still runs; its children are tethered to it."""
        if self.exit_code() is None:
            self._process.kill()
            self._process.wait()


class Terminals:
    """All terminals of one test."""

    def __init__(self, root: Path, environment: Mapping[str, str]) -> None:
        self.root = root
        self._environment = environment
        self._opened: list[Terminal] = []
        self._failing: set[int] = set()

    def directory(self, name: str) -> Path:
        """Return the directory of the terminal `name`, for files that it should find there."""
        path = self.root / name
        path.mkdir(parents=True, exist_ok=True)
        return path

    def open(self, name: str, *arguments: str | Path, headway: str = HEADWAY, **environment: str) -> Terminal:
        """Start `headway ARGUMENTS` in the directory `name`. `headway`: that of another environment."""
        told = tuple(str(argument) for argument in arguments)
        terminal = Terminal(self.directory(name), told, {**self._environment, **environment}, headway)
        self._opened.append(terminal)
        return terminal

    def expect_failure(self, terminal: Terminal) -> None:
        """Expect this command to fail, and have `check` ignore it from now on."""
        self._failing.add(terminal.pid)

    def check(self) -> None:
        """Assert that no command has failed so far; a process that the test itself killed does not count."""
        for terminal in self._opened:
            assert terminal.pid in self._failing or (terminal.exit_code() or 0) <= 0, terminal.tail()

    def close(self) -> None:
        """End all commands, and print their last lines, which pytest shows if the test failed."""
        for terminal in self._opened:
            terminal.close()
            print(terminal.tail())


@contextmanager
def paused(pid: int) -> Iterator[None]:
    """Stop that process meanwhile, so that the run waits for it however long the test's other steps take."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def machine_of(directory: Path) -> dict[str, str]:
    """Return the environment of a terminal that has a machine of its own."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("HEADWAY_")}
    own = {"HOME": str(directory), "TMPDIR": str(directory / "tmp")}
    return {**inherited, **own, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
