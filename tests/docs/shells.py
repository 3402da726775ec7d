"""Shells in terminals of their own, into which a test types commands and presses keys as a reader does."""

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import termios
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import psutil

PROMPT = re.compile(r"⟦(\d+)⟧")
"""The prompt of these shells. It holds the last command's exit code."""
ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[ -/]*[0-~])|\r")
ROWS, COLUMNS = 50, 160
POLL_S = 0.05
MOST_SHOWN = 6000
"""A failure shows this many of the last characters that the shell has printed."""
ENDED_WELL = (0, 128 + signal.SIGINT, 128 + signal.SIGTSTP)
"""Exit codes of a command that has finished, that Ctrl-C ended, or that Ctrl-Z suspended."""


class Shown(Protocol):
    """A description of a terminal's text. Its own text tells the reader of a failure what was looked for."""

    def is_in(self, said: str) -> bool: ...


class Shell:
    """An interactive bash at a terminal. `said` is the text that it printed, without colours and cursor movements."""

    def __init__(self, name: str, directory: Path, environment: Mapping[str, str], deadline_s: float) -> None:
        self.name, self._deadline_s = name, deadline_s
        self._screen, inner = pty.openpty()
        fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        self._process = subprocess.Popen(
            ["bash", "--norc", "--noprofile", "-i"],
            stdin=inner,
            stdout=inner,
            stderr=inner,
            cwd=directory,
            env={**environment, "PS1": "⟦$?⟧ ", "TERM": "xterm-256color", "VIRTUAL_ENV_DISABLE_PROMPT": "1"},
            start_new_session=True,
            preexec_fn=_begin_at_a_terminal,
        )
        os.close(inner)
        self._bytes = bytearray()
        self._typed_at = 0
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.wait_for_prompt()

    @property
    def said(self) -> str:
        """Return the text that the shell has printed since the last line was typed, that line included."""
        return ESCAPES.sub("", self._bytes[self._typed_at :].decode(errors="replace"))

    def type(self, lines: str) -> None:
        """Type the lines, each as soon as the command before it has ended. The last command may go on."""
        for line in lines.splitlines():
            code = self.wait_for_prompt()
            assert code in ENDED_WELL, f"{self.name}: exit code {code}\n{self.said[-MOST_SHOWN:]}"
            self._typed_at = len(self._bytes)
            self.press(line + "\n")
            self._until(lambda: "\n" in self.said, f"{line} is echoed")

    def press(self, keys: str) -> None:
        os.write(self._screen, keys.encode())

    def wait_for_prompt(self) -> int:
        """Wait until the shell's command has ended, and return its exit code."""
        self._until(lambda: PROMPT.search(self.said) is not None, "its command has ended")
        return int(PROMPT.findall(self.said)[-1])

    def wait_for(self, shown: Shown) -> None:
        """Wait until the shell has printed this."""
        self._until(lambda: self._has_printed(shown), f"it prints\n{shown}")

    def _has_printed(self, shown: Shown) -> bool:
        """Whether the shell has printed this. Raises AssertionError where its command ended without printing it."""
        said = self.said
        is_printed = shown.is_in(said)
        assert is_printed or not PROMPT.search(said), f"{self.name} has not printed\n{shown}\nbut\n{said[-MOST_SHOWN:]}"
        return is_printed

    def running(self) -> list[psutil.Process]:
        """Return the processes that still run in the shell."""
        return psutil.Process(self._process.pid).children(recursive=True)

    def close(self) -> None:
        """End the shell and all processes in it, at once."""
        family = self.running()
        self._process.kill()
        for process in family:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait()
        self._reader.join(5)  # the terminal has no user any more, and reading it ends
        os.close(self._screen)

    def _until(self, is_so: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + self._deadline_s
        while not is_so():
            late = f"{self.name}: waited in vain until {what}\nIt has printed\n{self.said[-MOST_SHOWN:]}"
            assert time.monotonic() < deadline, late
            time.sleep(POLL_S)

    def _read(self) -> None:
        with suppress(OSError):  # the terminal is closed
            while data := os.read(self._screen, 65536):
                self._bytes += data


def _begin_at_a_terminal() -> None:
    """Runs in the new process: keys of its terminal send it signals, even where its parent ignores them."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
