"""Rides out a broker that does not answer: the worker keeps generating, repeats its calls, and logs the outage once."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from headway.broker.connection.connection import without_password
from headway.broker.errors import BrokerError, FencedError, QuarantinedError

T = TypeVar("T")
log = logging.getLogger(__name__)


class Outages:
    """Tracks whether the broker answers this process."""

    def __init__(self, url: str, *, shortest_s: float = 0.1, longest_s: float = 2.0) -> None:
        self._url = without_password(url)
        self._shortest_s = shortest_s
        self._longest_s = longest_s
        self._is_down = False
        self.last_error = ""

    async def retry_until_available(self, call: Callable[[], Awaitable[T]]) -> T:
        """Repeat the call until the broker answers, and return its result. Only cancelling ends the wait."""
        wait_s = self._shortest_s
        while True:
            with self:
                return await call()
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, self._longest_s)

    def __enter__(self) -> None:
        """Inside `with outages:` an error of an absent broker is swallowed, and the log says when an outage begins and
        ends. An error that no waiting can cure is raised, and ends the worker."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        is_outage = isinstance(error, BrokerError) and not isinstance(error, (FencedError, QuarantinedError))
        if is_outage:
            self._begin(error)
        elif error is None:
            self._end()
        return is_outage

    def _begin(self, error: BaseException | None) -> None:
        self.last_error = str(error)
        if not self._is_down:
            self._is_down = True
            log.warning("broker %s: %s Running samples go on, calls are repeated.", self._url, error)

    def _end(self) -> None:
        if self._is_down:
            self._is_down = False
            self.last_error = ""
            log.warning("broker %s answers again", self._url)
