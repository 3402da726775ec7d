"""Learners and workers as processes of their own, forked from one that has already imported what they need."""

import multiprocessing
import os
import queue
import signal
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import psutil

_FORKSERVER = multiprocessing.get_context("forkserver")
_FORKSERVER.set_forkserver_preload(["tests.weightsync.worker_process", "tests.weightsync.learner_process"])
_PATIENCE_S = 240.0


class ForkedProcess:
    """A process that runs `target(*args, connection)`; `next` returns what it sends through the connection."""

    def __init__(self, target: Callable[..., None], *args: Any) -> None:
        self._receiving, sending = _FORKSERVER.Pipe(duplex=False)
        self._process = _FORKSERVER.Process(target=target, args=(*args, sending))
        self._process.start()
        sending.close()
        self._sent: queue.Queue[Any] = queue.Queue()
        self._reader = threading.Thread(target=self._read, args=(self._receiving,))
        self._reader.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def _read(self, connection: Connection) -> None:
        while True:
            try:
                self._sent.put(connection.recv())
            except EOFError:
                return

    def next(self) -> Any:
        return self._sent.get(timeout=_PATIENCE_S)

    def is_silent(self) -> bool:
        """Whether the test has read everything that the process sent."""
        return self._sent.empty()

    def send(self, sent: signal.Signals) -> None:
        os.kill(self.pid, sent)

    def until_stopped(self) -> None:
        """Wait until SIGSTOP has arrived."""
        self._until(lambda: psutil.Process(self.pid).status() == psutil.STATUS_STOPPED)

    def until_killed(self) -> None:
        """Wait until SIGKILL has ended it; any other end is an error."""
        self._process.join(_PATIENCE_S)
        assert self._process.exitcode == -signal.SIGKILL

    def until_ended(self) -> None:
        """Wait until it has ended by itself and without an error."""
        self._process.join(_PATIENCE_S)
        assert self._process.exitcode == 0

    def close(self) -> None:
        self._process.kill()
        self._process.join()
        self._reader.join()
        self._receiving.close()
        self._process.close()

    def _until(self, claim: Callable[[], bool]) -> None:
        done = threading.Event()
        for _ in range(int(_PATIENCE_S / 0.02)):
            if claim():
                return
            done.wait(0.02)
        raise AssertionError(f"process {self.pid} was not stopped in time")
