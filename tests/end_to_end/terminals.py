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

HEADWAY = Path(sys.executable).with_name("headway")
DEADLINE_S = 300.0
"""For what takes seconds: a machine may be busy, but nothing waits for ever."""
TAIL_LINES = 30


class Terminal:
    """One `headway` command and what it printed."""

    def __init__(self, directory: Path, arguments: tuple[str, ...], environment: Mapping[str, str]) -> None:
        self.directory = directory
        self.log = directory / "terminal.log"
        (directory / "tmp").mkdir(parents=True, exist_ok=True)
        (directory / "sevens.py").write_text(SEVENS)
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                tethered(str(HEADWAY), *arguments),
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
        """As `kill` does it from another terminal."""
        self._process.send_signal(number)

    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    def wait(self) -> int:
        """Its exit code, once it has ended by itself."""
        try:
            return self._process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it still runs after {DEADLINE_S:g} s: {self.tail()}") from None

    def succeeds(self) -> None:
        """It ends by itself, and all was well."""
        assert self.wait() == 0, self.tail()

    def tail(self) -> str:
        """The last lines, under the directory's name."""
        return "\n".join([f"--- {self.directory.name}", *self.said.splitlines()[-TAIL_LINES:]])

    def close(self) -> None:
        """What is left of it ends; its children are tethered to it."""
        if self.exit_code() is None:
            self._process.kill()
            self._process.wait()


class Terminals:
    """All of one test."""

    def __init__(self, root: Path, environment: Mapping[str, str]) -> None:
        self.root = root
        self._environment = environment
        self._opened: list[Terminal] = []
        self._failing: set[int] = set()

    def directory(self, name: str) -> Path:
        """That of the terminal `name`, for files which it should find there."""
        path = self.root / name
        path.mkdir(parents=True, exist_ok=True)
        return path

    def open(self, name: str, *arguments: str | Path, **environment: str) -> Terminal:
        """Start `headway ARGUMENTS` in the directory `name`."""
        terminal = Terminal(
            self.directory(name), tuple(str(argument) for argument in arguments), {**self._environment, **environment}
        )
        self._opened.append(terminal)
        return terminal

    def expect_failure(self, terminal: Terminal) -> None:
        """This one fails, as it should; `check` looks at it no more."""
        self._failing.add(terminal.pid)

    def check(self) -> None:
        """None has failed so far; what a test itself has killed did not fail."""
        for terminal in self._opened:
            assert terminal.pid in self._failing or (terminal.exit_code() or 0) <= 0, terminal.tail()

    def close(self) -> None:
        """End all; what they said is shown should the test have failed."""
        for terminal in self._opened:
            terminal.close()
            print(terminal.tail())


@contextmanager
def paused(pid: int) -> Iterator[None]:
    """That process stands still meanwhile: what others do takes as long as it takes, and the run waits for it."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def machine_of(directory: Path) -> dict[str, str]:
    """The environment of a terminal that has a machine of its own."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("HEADWAY_")}
    own = {"HOME": str(directory), "TMPDIR": str(directory / "tmp")}
    return {**inherited, **own, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
