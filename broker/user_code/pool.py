"""Calls of one program under a deadline, in hosts that are replaced when a call hangs or ends them."""

import asyncio
import logging
from typing import Any

from headway.broker.errors import UserCodeError

from .host_process import HostProcess, RefusedError
from .wire import Program

MOST_PLACES = 1024
log = logging.getLogger(__name__)


class Host:
    """One place for a process, which is started anew whenever it was lost."""

    def __init__(self, program: Program, most_places: int = MOST_PLACES) -> None:
        self._program = program
        self._most_places = most_places
        self._starting = asyncio.Lock()
        self._process: HostProcess | None = None
        self.calls = 0
        """The number of calls that run in it or wait for it."""

    async def start(self) -> HostProcess:
        """Return the running process, started if need be. Raises ConfigError, UserCodeError."""
        async with self._starting:
            if self._process is None or self._process.is_lost:
                self._process = await HostProcess.start(self._program, self._most_places)
            return self._process

    async def call(self, method: str, arguments: list[Any], deadline_s: float) -> Any:
        """Calls as HostProcess.call does. The deadline begins when a running process has a place for the call."""
        self.calls += 1
        try:
            while True:
                process = await self.start()
                async with process.places:
                    if not process.is_lost:
                        return await process.call(method, arguments, deadline_s)
        finally:
            self.calls -= 1

    async def close(self) -> None:
        """Kill the process."""
        if self._process is not None:
            await self._process.lose("was closed")
            self._process = None


class HostPool:
    """Hosts of one program: some for many calls at once, and one in which lost calls are made again, one by one.

    So a call that hangs interrupts others only once, and in the end that call alone fails.
    """

    def __init__(self, program: Program, *, processes: int = 1) -> None:
        self._program = program
        self._shared = [Host(program) for _ in range(processes)]
        self._alone = Host(program, most_places=1)
        self._warming: asyncio.Future[list[Any]] | None = None
        self.repeated = 0
        """Calls that had to be made once more."""

    async def open(self) -> None:
        """Start the hosts to which calls go first, so that no call waits for an import.

        Raises ConfigError, UserCodeError."""
        await asyncio.gather(*(host.start() for host in self._shared))

    def warm(self) -> None:
        """Begin to start the hosts to which calls go first. It does not wait: a call waits for its host, and raises
        what starting it raises."""
        self._warming = asyncio.gather(*(host.start() for host in self._shared), return_exceptions=True)

    async def call(self, method: str, *arguments: Any, deadline_s: float) -> Any:
        """Returns the result of a method that is called at most twice. Raises UserCodeError, which says how the second
        call ended."""
        host = min(self._shared, key=lambda host: host.calls)
        try:
            return await host.call(method, list(arguments), deadline_s)
        except RefusedError:
            raise
        except UserCodeError as error:
            log.warning(
                "%s: a call, or another one beside it, %s; it is made once more, alone", self._program.name, error
            )
        self.repeated += 1
        return await self._alone.call(method, list(arguments), deadline_s)

    async def close(self) -> None:
        """Kill all hosts. Idempotent; a later call would start them again."""
        if self._warming is not None:
            self._warming.cancel()
            await asyncio.gather(self._warming, return_exceptions=True)  # reads what it ends with
        await asyncio.gather(*(host.close() for host in (*self._shared, self._alone)))
