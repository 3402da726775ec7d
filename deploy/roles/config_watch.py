"""A role without a recipe joins a run: it waits for the run's configuration, and notices when that changes."""

import asyncio
import logging
import signal
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any, TypeVar

import uvloop

from headway.broker.client.broker import Broker
from headway.broker.errors import LASTING_EXIT, BrokerError, ConfigError, ForeignRunError, HeadwayError

T = TypeVar("T")

STOPS = (signal.SIGTERM, signal.SIGINT)
CONFIG_POLL_S = 0.2
CONFIG_CHECK_S = 5.0

log = logging.getLogger(__name__)


class ConfigChangedError(HeadwayError):
    """A learner took the run over with another configuration than the one that this process started with."""


class Signals:
    """Whether SIGTERM or SIGINT has asked this process to leave."""

    def __init__(self) -> None:
        self.came = False

    def drain(self, event: asyncio.Event) -> None:
        """Set the event at such a signal, from now on."""

        def note() -> None:
            self.came = True
            event.set()

        for number in STOPS:
            asyncio.get_running_loop().add_signal_handler(number, note)

    def run(self, work: Coroutine[Any, Any, None]) -> bool:
        """Run the role to its end, and return whether such a signal came. Once its work is done none does anything: a
        second one, such as its supervisor's after one to the whole group, would have the process die as it ends."""
        uvloop.run(work)
        for number in STOPS:
            signal.signal(number, signal.SIG_IGN)
        return self.came


@contextmanager
def lasting_config_errors() -> Iterator[None]:
    """Have a ConfigError end the process with the code by which its supervisor does not start it again.

    To be put around what the run's configuration and the process's arguments alone decide, which would be the same: an
    engine or a scorer's model that does not fit them, too. A ConfigError of opening something of the world's, such as a
    user's environment or a port, may pass.
    """
    try:
        yield
    except ConfigError as error:
        error.exit_code = LASTING_EXIT
        raise


async def fetch_config(broker: Broker) -> bytes:
    """Wait for a learner to store the run's resolved configuration, and return it."""
    from headway.broker.client.broker import Outages

    outages = Outages(broker.url)
    stored = await outages.retry_until_available(broker.status.config)
    if stored is None:
        log.info("run %s has no learner yet; waiting for one", broker.run)
    while stored is None:
        await asyncio.sleep(CONFIG_POLL_S)
        stored = await outages.retry_until_available(broker.status.config)
    return stored


@asynccontextmanager
async def drained_when_changed(
    broker: Broker, stored: bytes, drain: asyncio.Event, part: Callable[[bytes], object]
) -> AsyncIterator[None]:
    """Drain the role once its `part` of the run's configuration has changed; then raise ConfigChangedError.

    Workers and scorers get no leases from the claim with another configuration on, until they have seen that their part
    is the same.
    """
    broker.leases.obey(stored)
    watch = asyncio.create_task(_watch_config(broker, stored, part))
    watch.add_done_callback(lambda _: drain.set())
    try:
        yield
    finally:
        watch.cancel()
        await asyncio.wait([watch])
    if not watch.cancelled() and (error := watch.exception()) is not None:
        raise error


async def _watch_config(broker: Broker, stored: bytes, part: Callable[[bytes], object]) -> None:
    while True:
        with suppress(TimeoutError):
            async with asyncio.timeout(CONFIG_CHECK_S):
                await broker.leases.recipe_changed.wait()
        try:
            now = await broker.status.config() or stored
        except ForeignRunError:
            raise
        except BrokerError:  # an outage, which the role logs itself
            await asyncio.sleep(CONFIG_POLL_S)
            continue
        if now != stored and part(now) != part(stored):
            raise ConfigChangedError(f"The configuration of run {broker.run} has changed since this process started.")
        broker.leases.obey(now)


async def drain_when_asked(request_drain: Callable[[], object], drain: asyncio.Event) -> None:
    """Ask the role to drain once the event is set."""
    await drain.wait()
    log.info("draining: leases go back to the broker")
    request_drain()


async def unless_drained(wanted: Coroutine[Any, Any, T], drain: asyncio.Event) -> T | None:
    """Return the result, or None if the role was asked to drain before it was there."""
    tasks = asyncio.ensure_future(wanted), asyncio.ensure_future(drain.wait())
    done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()
    return tasks[0].result() if tasks[0] in done else None
