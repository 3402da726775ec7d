"""Finds the run that a command means, opens a client of its server, and prints `headway status`."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from rich.live import Live

from headway.broker.client.broker import BlockingBroker
from headway.broker.connection.address import without_password
from headway.broker.errors import ConfigError, RunNotFoundError
from headway.broker.server.access import Role, url_as
from headway.deploy.observe.bottleneck import look as look_at
from headway.deploy.observe.live import Look
from headway.deploy.observe.status import status_json, status_tables
from headway.deploy.printing import say, say_json
from headway.deploy.run.directory import find_endpoint
from headway.deploy.terminal import Terminal

T = TypeVar("T")

NOT_YET = "A learner claims its run once the stages before it are done."
WATCH_S = 1.0
PATIENCE_S = 3.0
"""Seconds to wait for the broker: a user waits for the answer."""


def show_status(url: str | None, run: str | None, *, as_json: bool, watch: bool) -> None:
    """Show a run's status once, or again and again. Without --broker it shows the newest run below ./runs."""
    url, run = locate_run(url, run)
    with _looks(url, run) as look:
        if watch:
            _watch_status(look, as_json)
            return
        try:
            status, waiting = look()
        except RunNotFoundError as error:
            raise RunNotFoundError(f"{error} {NOT_YET} --watch waits for it.") from error
        if as_json:
            say_json(status_json(status, waiting))
        else:
            Terminal().print(status_tables(status, waiting))


def _watch_status(look: Look, as_json: bool) -> None:
    """Show the status until Ctrl-C. Waits for a run that no learner has claimed yet."""
    status, waiting = awaited(look)
    if as_json:
        while True:
            say_json(status_json(status, waiting), in_one_line=True)
            time.sleep(WATCH_S)
            status, waiting = look()
    with Live(status_tables(status, waiting), console=Terminal(), auto_refresh=False, screen=True) as live:
        while True:
            time.sleep(WATCH_S)
            live.update(status_tables(*look()), refresh=True)


def awaited(look: Callable[[], T]) -> T:
    """Return the first look at a run. Waits, and says so, until a learner has claimed it."""
    is_told = False
    while True:
        try:
            return look()
        except RunNotFoundError as error:
            if not is_told:
                say(f"{error} {NOT_YET} Waiting for it.", to_stderr=True)
            is_told = True
            time.sleep(WATCH_S)


def as_learner(url: str | None, found: str) -> str:
    """Return the URL for what only the learner's user may do: `url` as the caller gave it, or else the one that was
    `found` below ./runs with the learner's user, whose password lies beside."""
    return url or url_as(Role.LEARNER, found)


def locate_run(url: str | None, run: str | None) -> tuple[str, str]:
    """Return the URL and the name of the run that is meant: by default the newest one below ./runs. Raises ConfigError,
    also where a server holds several runs and none is named."""
    if url and run:
        return url, run
    if url:
        with client_of(url, "headway-status") as client:
            runs = client.call(client.broker.status.runs())
        if len(runs) == 1:
            return url, runs[0]
        raise ConfigError(
            f"{without_password(url)} holds {len(runs)} runs ({', '.join(runs)}); name one with --run."
            if runs
            else f"{without_password(url)} holds no run. {NOT_YET}"
        )
    found = find_endpoint(Path("runs"), run)
    return found.url, found.run


@contextmanager
def _looks(url: str, run: str) -> Iterator[Look]:
    with client_of(url, run) as client:
        yield lambda: client.call(look_at(client.broker, any_identity=True))


@contextmanager
def client_of(url: str, run: str) -> Iterator[BlockingBroker]:
    """Connect for a while to the server of a run. A caller that meets no such run is told when there will be one."""
    client = BlockingBroker(url, run, timeout_s=PATIENCE_S)
    try:
        yield client
    except RunNotFoundError as error:
        if NOT_YET in f"{error}":
            raise
        raise RunNotFoundError(f"{error} {NOT_YET}") from error
    finally:
        client.close()
