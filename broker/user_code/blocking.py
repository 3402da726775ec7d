"""Calls of user code for callers without an event loop: one after the other, each under a deadline."""

import asyncio
import logging
import weakref
from collections.abc import Coroutine
from threading import Thread
from typing import Any, TypeVar

from headway.broker.errors import UserCodeError

from .pool import Host
from .wire import Program

T = TypeVar("T")
log = logging.getLogger(__name__)


class BlockingHost:
    """A host of one program. It ends when this object is deleted, or this process ends."""

    def __init__(self, program: Program, *, deadline_s: float) -> None:
        """Start the host. Raises ConfigError, UserCodeError."""
        self._program = program
        self._deadline_s = deadline_s
        self._host = Host(program, most_places=1)
        self._loop = asyncio.new_event_loop()
        thread = Thread(target=_serve, args=(self._loop, self._host), name=program.name, daemon=True)
        thread.start()
        weakref.finalize(self, self._loop.call_soon_threadsafe, self._loop.stop)
        self._run(self._host.start())

    def call(self, method: str, *arguments: Any) -> Any:
        """Returns the method's result. Raises UserCodeError."""
        try:
            return self._run(self._host.call(method, list(arguments), self._deadline_s))
        except UserCodeError as error:
            asked = f"{method}({', '.join(map(repr, arguments))})"
            raise UserCodeError(f"{self._program.name}: {asked} {error}.") from error

    def call_again(self, method: str, *arguments: Any) -> Any:
        """Returns the result of a method that may be repeated: where its process was lost, it is called once more in a
        new one."""
        try:
            return self.call(method, *arguments)
        except UserCodeError as error:
            log.warning("%s It is called once more.", error)
        return self.call(method, *arguments)

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


def _serve(loop: asyncio.AbstractEventLoop, host: Host) -> None:
    """Run the loop until it is stopped, and then close the host."""
    loop.run_forever()
    loop.run_until_complete(host.close())
    loop.close()
