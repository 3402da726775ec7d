"""The calls that sessions are answering: bounded in number, and for each session too."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Coroutine
from typing import Any

from headway.rollout_workers.agents.calls import ChatAnswer

from .problems import Problem, ProblemError, overloaded


class Calls:
    """Runs calls as tasks of their own, so that one handler may wait for a call and speak to its client."""

    def __init__(self, most: int, most_of_session: int, timeout_s: float) -> None:
        self._most = most
        self._most_of_session = most_of_session
        self._timeout_s = timeout_s
        self._tasks = set[asyncio.Task[ChatAnswer]]()
        self._by_session = Counter[str]()

    def __len__(self) -> int:
        return len(self._tasks)

    def start(self, lease: str, call: Coroutine[Any, Any, ChatAnswer]) -> asyncio.Task[ChatAnswer]:
        """Begin to answer a call of a session. Raises ProblemError where there are too many already."""
        try:
            self._check_room(lease)
        except ProblemError:
            call.close()
            raise
        task = asyncio.get_running_loop().create_task(self._bounded(call))
        self._tasks.add(task)
        self._by_session[lease] += 1
        task.add_done_callback(lambda ended: self._forget(lease, ended))
        return task

    async def close(self) -> None:
        """Cancel all calls, and wait until they have ended."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _check_room(self, lease: str) -> None:
        if len(self._tasks) >= self._most:
            raise overloaded(f"the endpoint answers {self._most} calls at a time and no more")
        if self._by_session[lease] >= self._most_of_session:
            message = f"an episode may have {self._most_of_session} calls at a time and no more"
            raise ProblemError(Problem(status=429, kind="busy", message=message, retry_after_s=2))

    async def _bounded(self, call: Coroutine[Any, Any, ChatAnswer]) -> ChatAnswer:
        timeout = asyncio.timeout(self._timeout_s)
        try:
            async with timeout:
                return await call
        except TimeoutError as error:
            if not timeout.expired():
                raise
            message = f"the call had no answer within {self._timeout_s:g} s"
            raise ProblemError(Problem(status=504, kind="timed_out", message=message)) from error

    def _forget(self, lease: str, task: asyncio.Task[ChatAnswer]) -> None:
        self._tasks.discard(task)
        self._by_session[lease] -= 1
        if not self._by_session[lease]:
            del self._by_session[lease]
        with contextlib.suppress(asyncio.CancelledError):
            task.exception()  # its client may have left, and then nobody else looks at it
