"""`headway dashboard`: a run's page, served live."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from headway.broker.client.broker import BlockingBroker
from headway.broker.errors import BrokerError, HeadwayError
from headway.broker.schema.status import RunStatus
from headway.deploy.observe.bottleneck import Bottleneck, StatusReader, read_status
from headway.deploy.observe.page.live_page import PageServer, Watcher
from headway.deploy.printing import say, say_json
from headway.deploy.roles.run_client import client_of, locate_run
from headway.deploy.run.figures import learned, spent
from headway.deploy.run.record import METRICS, Record, lineage, read_record, stamp
from headway.deploy.run.run_directory import CONFIG, find_endpoint, find_run, find_starting, is_going_on
from headway.rollout_workers.health import RUN_OVER

KEPT_STEPS = 512


def serve_dashboard(run: str | None, url: str | None, name: str | None, *, host: str, port: int, as_json: bool) -> None:
    """Serve the page until Ctrl-C. Raises HeadwayError."""
    source = _source(run, url, name)
    with Watcher(source.connect, source.read) as watcher, PageServer(watcher, host, port) as server:
        if as_json:
            say_json({"url": server.url, "token": server.token or None}, in_one_line=True)
        else:
            say(f"Dashboard: {server.url}  (Ctrl-C ends it)")
        with suppress(KeyboardInterrupt):
            server.serve_forever()


@dataclass
class Source:
    """A run's directory, its server, or both."""

    directory: Path | None
    locate: Callable[[], tuple[str, str]]
    """Returns the server's URL and the run's name. A run that is resumed may have another server each time."""
    _stamp: Any = field(default=None)
    _settings: dict[str, Any] = field(default_factory=dict)

    @contextmanager
    def connect(self) -> Iterator[StatusReader]:
        """Yield what looks at the run. Raises HeadwayError."""
        url, name = self.locate()
        with client_of(url, name) as client:
            yield lambda: self._look(client)

    def _look(self, client: BlockingBroker) -> tuple[RunStatus, Bottleneck | None]:
        status, waiting = client.call(read_status(client.broker, any_identity=True))
        if self.directory is None and not self._settings:
            with suppress(BrokerError, msgspec.DecodeError):  # rules of an older version let no observer read it
                self._settings = msgspec.json.decode(client.call(client.broker.status.config()) or b"{}")
        return status, waiting

    def read(self, status: RunStatus | None) -> Record | None:
        """Return the run's files, or else what the broker keeps of its steps; None if they are as they were."""
        now = stamp(self.directory) if self.directory is not None else _steps_of(status)
        if now == self._stamp:
            return None
        self._stamp = now
        if self.directory is not None:
            return read_record(str(self.directory), again=True)
        return None if status is None else _record_of(status, self._settings)


def _source(run: str | None, url: str | None, name: str | None) -> Source:
    if run is not None:
        directory = find_run(run, (CONFIG, METRICS))
        here = directory.resolve()
        return Source(directory, lambda: (url, name or here.name) if url else _endpoint(here))
    try:
        found = locate_run(url, name)
    except HeadwayError:  # the newest run may have no broker yet
        starting = None if url or name else find_starting(Path("runs"))
        if starting is None:
            raise
        return Source(starting, lambda: _endpoint(starting))
    directory = Path("runs", found[1])
    is_here = not url and (directory / CONFIG).exists()
    return Source(directory if is_here else None, (lambda: _endpoint(directory)) if is_here else (lambda: found))


def _endpoint(directory: Path) -> tuple[str, str]:
    try:
        found = find_endpoint(directory.parent, directory.name)
    except HeadwayError as error:
        why = "has no broker yet" if is_going_on(directory) else "has no process"
        raise HeadwayError(f"{directory} {why}; its figures are those of its files.") from error
    return found.url, found.run


def _steps_of(status: RunStatus | None) -> Any:
    return None if status is None else (status.identity, status.state, status.last_step)


def _record_of(status: RunStatus, settings: dict[str, Any]) -> Record:
    steps = list(status.recent_steps)
    notes = [f"The broker keeps the last {KEPT_STEPS} steps and no evaluations; the run's directory has all of them."]
    return Record(
        directory=Path(status.run),
        steps=steps,
        evaluations=[],
        stages={},
        summary={**learned(lineage(steps)), **spent(steps)},
        settings=settings,
        is_running=status.state not in RUN_OVER,
        notes=notes,
    )
