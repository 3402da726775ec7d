"""The learner looks at its run now and then: its log tells who waits for whom once nothing has moved for a while, and
which workers were set aside."""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from headway.broker.client.broker import BlockingBroker
from headway.broker.errors import HeadwayError
from headway.broker.schema.status import RunStatus

from .faults import FaultNews
from .waiting import Reminder, look

LOOK_S = 10.0
FAREWELL_S = 5.0
log = logging.getLogger(__name__)


@contextmanager
def waits_logged(
    broker: BlockingBroker, on_look: Callable[[RunStatus], None], every_s: float = LOOK_S
) -> Iterator[None]:
    """Look at the run every so many seconds, in a thread of its own, log who waits, and give each look to `on_look`."""
    over = threading.Event()
    thread = threading.Thread(target=_watch, args=(broker, on_look, over, every_s), name="waits", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(FAREWELL_S)


def _watch(broker: BlockingBroker, on_look: Callable[[RunStatus], None], over: threading.Event, every_s: float) -> None:
    reminder, told = Reminder(), FaultNews()
    while not over.wait(every_s):
        with suppress(HeadwayError):  # the learner itself says that the server is away
            status, waiting = broker.call(look(broker.broker))
            on_look(status)
            for text in told.news(status):
                log.warning("%s", text)
            is_us = waiting is not None and waiting.why == "no learner"  # the server takes no writes, ours among them
            if news := reminder.news(None if is_us else waiting):
                log.warning("%s", news)
