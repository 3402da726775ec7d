"""The learner repeats its calls while the broker does not answer, as it has nothing else to do meanwhile."""

import logging
import math
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from headway.broker import BlockingBroker
from headway.broker.errors import BrokerUnavailableError, ServerRestartedError

log = logging.getLogger(__name__)
T = TypeVar("T")

RETRY_S = 0.5


class StopRequested(Exception):  # noqa: N818 - no error: the loop ends in order
    """The learner was asked to stop while it waited."""


class WaitTimeout(Exception):  # noqa: N818 - no error: the learner asks again
    """The learner has waited so long that the other ranks must hear from it."""


class BrokerRetries:
    """Repeats one learner's calls to the broker. A call ends by its result, by an error that repeating would not mend,
    by StopRequested once the learner is asked to stop while the broker is away, or, inside `patience`, by
    WaitTimeout."""

    def __init__(
        self, blocking: BlockingBroker, should_stop: Callable[[], bool], on_restart: Callable[[], None]
    ) -> None:
        """`on_restart` tells a server that was restarted what it may have forgotten; it refuses calls until then."""
        self._blocking = blocking
        self._should_stop = should_stop
        self._on_restart = on_restart
        self._is_down = False
        self._patient_until = math.inf

    def retry(self, verb: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Repeats a verb of the broker until the server has answered it, and returns the answer."""
        return self.retry_until_available(lambda: self._blocking.call(verb()))

    def retry_until_available(self, act: Callable[[], T]) -> T:
        """Does the same for an action that talks to the broker by itself."""
        while True:
            try:
                result = act()
            except ServerRestartedError:
                self._on_restart()
            except BrokerUnavailableError as error:
                if self._should_stop():
                    raise StopRequested from error
                if not self._is_down:
                    log.warning("%s Training waits for it.", error)
                self._is_down = True
                self.check_patience()
                time.sleep(RETRY_S)
            else:
                if self._is_down:
                    log.warning("The broker answers again.")
                self._is_down = False
                return result

    @contextmanager
    def patience(self, seconds: float) -> Iterator[None]:
        """Limits every wait inside to this time, as other ranks wait for the learner."""
        self._patient_until = time.monotonic() + seconds
        try:
            yield
        finally:
            self._patient_until = math.inf

    def check_patience(self) -> None:
        """Raises WaitTimeout once the time of `patience` has passed."""
        if time.monotonic() > self._patient_until:
            raise WaitTimeout
