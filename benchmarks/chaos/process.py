"""One role as a process: forked from a warm one, which makes a restart cheap, and started again when it dies."""

import asyncio
import faulthandler
import logging
import multiprocessing
import os
import signal
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.context import ForkServerProcess
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil

RESTART_S = 0.2
BEGIN_ANEW = 3
"""The exit code of a process that wants to be started again."""
_POLL_S = 0.02
_FORKS = multiprocessing.get_context("forkserver")

Start = Callable[[str], tuple[Callable[..., None], tuple[Any, ...]]]
"""Returns the function of the process of this name, with its arguments."""


def warm_up(*modules: str) -> None:
    """Import these once, for all processes."""
    _FORKS.set_forkserver_preload(list(modules))


def enter(directory: Path, name: str) -> None:
    """Set up a new process: it ends with its parent and writes its logs and files into the directory.

    At SIGUSR1 it also writes the place of each of its threads there.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None, "enter is for children"
    threading.Thread(target=_end_with, args=(parent,), name="parent", daemon=True).start()
    for folder in ("logs", "tmp"):
        (directory / folder).mkdir(parents=True, exist_ok=True)
    tempfile.tempdir = str(directory / "tmp")
    descriptor = os.open(directory / "logs" / f"{name}.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    faulthandler.register(signal.SIGUSR1)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(process)d %(name)s: %(message)s")


def _end_with(parent: BaseProcess) -> None:
    parent.join()
    os._exit(1)


class Role:
    """A name whose process is replaced when it ends with an error. The orchestrator's event loop runs it.

    Each process has a name of its own, as the product's supervisor gives it one: for two minutes the server keeps a
    worker's name for the process that had it.
    """

    def __init__(self, name: str, start: Start) -> None:
        self.name = name
        self._start = start
        self._process: ForkServerProcess | None = None
        self._killed: set[int] = set()
        self.process_name = name
        """The name of the newest process."""
        self.begun = 0
        """The number of processes begun."""
        self.crashes = 0
        """The number of unexpected ends."""
        self.begun_anew = 0
        """The number of ends because its run was another one by then, or had another configuration."""
        self.finished = asyncio.Event()

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None and self._process.is_alive() else None

    async def supervise(self) -> None:
        """Restart the process until it ends with code 0."""
        while not self.finished.is_set():
            if self._process is None:
                self._process = self._begin()
            elif (code := self._process.exitcode) is not None:
                await self._after(self._process, code)
            await asyncio.sleep(_POLL_S)

    def kill(self) -> None:
        """Send SIGKILL."""
        if self._process is not None and self._process.pid is not None:
            self._killed.add(self._process.pid)
            self.signal(signal.SIGKILL)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process, if there is one."""
        if self.pid is not None:
            send(self.pid, number)

    def detach(self) -> ForkServerProcess | None:
        """Give up the process; the next one is started in its place."""
        process, self._process = self._process, None
        return process

    def end(self) -> None:
        """End the role for good."""
        self.finished.set()
        if self._process is not None:
            self._process.kill()
            self._process.join()

    def _begin(self) -> ForkServerProcess:
        self.begun += 1
        self.process_name = f"{self.name}-{self.begun}"
        return begin(self.process_name, *self._start(self.process_name))

    async def _after(self, process: ForkServerProcess, code: int) -> None:
        if code == 0:
            self.finished.set()
            return
        if code == BEGIN_ANEW:
            self.begun_anew += 1
        elif process.pid not in self._killed:
            self.crashes += 1
        await asyncio.sleep(RESTART_S)
        if self._process is process:
            self._process = None


def begin(name: str, target: Callable[..., None], arguments: tuple[Any, ...]) -> ForkServerProcess:
    """Start a process, which ends with this one."""
    process = _FORKS.Process(target=target, args=arguments, name=name, daemon=True)
    process.start()
    return process


def descendants(pid: int, is_meant: Callable[[str], bool]) -> list[int]:
    """Return the processes below one whose command is meant."""
    with suppress(psutil.Error):
        below = psutil.Process(pid).children(recursive=True)
        return [one.pid for one in below if is_meant(_command(one))]
    return []


def _command(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


def send(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process that may have ended."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)
