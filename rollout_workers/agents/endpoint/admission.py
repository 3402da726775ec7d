"""The calls that sessions are answering: bounded in number, and for each session too."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Coroutine
from typing import Any

import msgspec

from headway.rollout_workers.agents.calls import ChatAnswer, ChatCall, Session

from .problems import Problem, ProblemError, overloaded


class Calls:
    """Runs calls as tasks of their own, so that one handler may wait for a call and speak to its client."""

    def __init__(self, most: int, most_of_session: int, timeout_s: float) -> None:
        self._most = most
        self._most_of_session = most_of_session
        self._timeout_s = timeout_s
        self._tasks = set[asyncio.Task[ChatAnswer]]()
        self._by_session = Counter[str]()
        self._turned_away = dict[tuple[str, str], int]()

    def __len__(self) -> int:
        return len(self._tasks)

    def start(self, session_name: str, session: Session, call: ChatCall) -> asyncio.Task[ChatAnswer]:
        """Begin to answer a call of a session. Raises ProblemError where there are too many already.

        The retry of a call that was turned away here is no retry to the session, which has not heard of it.
        """
        if call.is_retry and self._forgive(session_name, call.digest):
            call = msgspec.structs.replace(call, is_retry=False)
        try:
            self._check_room(session_name)
        except ProblemError:
            if not call.is_retry:
                self._remember(session_name, call.digest)
            raise
        task = asyncio.get_running_loop().create_task(self._bounded(session.chat(call)))
        self._tasks.add(task)
        self._by_session[session_name] += 1
        task.add_done_callback(lambda ended: self._forget(session_name, ended))
        return task

    async def close(self) -> None:
        """Cancel all calls, and wait until they have ended."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _check_room(self, session_name: str) -> None:
        if len(self._tasks) >= self._most:
            raise overloaded(f"the endpoint answers {self._most} calls at a time and no more")
        if self._by_session[session_name] >= self._most_of_session:
            message = f"an episode may have {self._most_of_session} calls at a time and no more"
            raise ProblemError(Problem(status=429, kind="busy", message=message, retry_after_s=2))

    def _remember(self, session_name: str, digest: str) -> None:
        """Note that a call was turned away. The oldest of very many are forgotten: clients may have given them up."""
        number = self._turned_away.pop((session_name, digest), 0)
        self._turned_away[session_name, digest] = number + 1
        if len(self._turned_away) > 4 * self._most:
            del self._turned_away[next(iter(self._turned_away))]

    def _forgive(self, session_name: str, digest: str) -> bool:
        """Return whether such a call was turned away, and forget one."""
        number = self._turned_away.pop((session_name, digest), 0)
        if number > 1:
            self._turned_away[session_name, digest] = number - 1
        return number > 0

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

    def _forget(self, session_name: str, task: asyncio.Task[ChatAnswer]) -> None:
        self._tasks.discard(task)
        self._by_session[session_name] -= 1
        if not self._by_session[session_name]:
            del self._by_session[session_name]
        with contextlib.suppress(asyncio.CancelledError):
            task.exception()  # its client may have left, and then nobody else looks at it
