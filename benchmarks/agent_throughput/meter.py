"""CPU time by the part of the program that takes it."""

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Generator
from typing import Any

import psutil


class _Thread(threading.local):
    """What runs in a thread: the parts, each called by the one before it, and when the last of them went on."""

    def __init__(self) -> None:
        self.parts: list[str] = []
        self.since_s = 0.0


class Meter:
    """Measures the functions that it is given, each without those of others that it calls."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._thread = _Thread()

    def measure(self, owner: Any, name: str, part: str) -> None:
        """Count a function of a module, a class or an object as a part."""
        function = getattr(owner, name)

        def measured(*arguments: Any, **named: Any) -> Any:
            self._enter(part)
            try:
                return function(*arguments, **named)
            finally:
                self._leave()

        setattr(owner, name, measured)

    def measure_coroutine(self, owner: Any, name: str, part: str) -> None:
        """Count a coroutine function of a class or an object as a part, and not what runs while it waits."""
        function = getattr(owner, name)

        async def measured(*arguments: Any, **named: Any) -> Any:
            return await _Steps(function(*arguments, **named), part, self._enter, self._leave)

        setattr(owner, name, measured)

    def _enter(self, part: str) -> None:
        self._switch()
        self._thread.parts.append(part)

    def _leave(self) -> None:
        self._switch()
        self._thread.parts.pop()

    def _switch(self) -> None:
        now, thread = time.thread_time(), self._thread
        if thread.parts:
            self.seconds[thread.parts[-1]] += now - thread.since_s
        thread.since_s = now


class _Steps:
    """Awaits a coroutine, and tells when each of its steps begins and ends."""

    def __init__(
        self, coroutine: Coroutine[Any, Any, Any], part: str, enter: Callable[[str], None], leave: Callable[[], None]
    ) -> None:
        self._coroutine = coroutine
        self._part, self._enter, self._leave = part, enter, leave

    def __await__(self) -> Generator[Any, Any, Any]:
        step: Callable[[], Any] = lambda: self._coroutine.send(None)  # noqa: E731
        while True:
            self._enter(self._part)
            try:
                waits_for = step()
            except StopIteration as end:
                return end.value
            finally:
                self._leave()
            try:
                sent = yield waits_for
            except BaseException as error:  # noqa: BLE001 - the coroutine is to handle it
                step = _throw(self._coroutine, error)
            else:
                step = _send(self._coroutine, sent)


def _throw(coroutine: Coroutine[Any, Any, Any], error: BaseException) -> Callable[[], Any]:
    return lambda: coroutine.throw(error)


def _send(coroutine: Coroutine[Any, Any, Any], value: Any) -> Callable[[], Any]:
    return lambda: coroutine.send(value)


def process_s(pid: int) -> float:
    """Return the CPU seconds that a process has had."""
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)
