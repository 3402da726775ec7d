"""What commands ask of runs: it finds the run that a command means, prints its status, follows it for the live page,
lists and deletes the runs of a server, and asks pools and workers, wherever they run, for more, less or no work.
"""

import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
from rich.live import Live

from headway.broker.client.broker import BlockingBroker
from headway.broker.client.supervision import RunUsage
from headway.broker.connection.address import without_password
from headway.broker.errors import BrokerError, ConfigError, HeadwayError, RunNotFoundError
from headway.broker.schema.status import PoolInfo, RunStatus
from headway.broker.server.access import Role, url_as
from headway.deploy.observe.bottleneck import Bottleneck, StatusReader, read_status
from headway.deploy.observe.status_tables import pool_of, status_json, status_tables, version_text
from headway.deploy.printing import say, say_json
from headway.deploy.run.figures import learned, spent
from headway.deploy.run.record import METRICS, Record, lineage, read_record, stamp
from headway.deploy.run.run_directory import (
    CONFIG,
    described,
    find_endpoint,
    find_run,
    find_starting,
    is_going_on,
    refuse_if_in_use,
)
from headway.deploy.terminal import Terminal, WordWrapTable, headed_table
from headway.rollout_workers.health import RUN_OVER

T = TypeVar("T")

NOT_YET = "A learner claims its run once the stages before it are done."
WATCH_S = 1.0
PATIENCE_S = 3.0
"""Seconds to wait for the broker: a user waits for the answer."""


def show_status(url: str | None, run: str | None, *, as_json: bool, watch: bool) -> None:
    """Show a run's status once, or again and again. Without --broker it shows the newest run below ./runs."""
    url, run = locate_run(url, run)
    with client_of(url, run) as client:

        def look() -> tuple[RunStatus, Bottleneck | None]:
            return client.call(read_status(client.broker, any_identity=True))

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


def _watch_status(look: StatusReader, as_json: bool) -> None:
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
    is_reported = False
    while True:
        try:
            return look()
        except RunNotFoundError as error:
            if not is_reported:
                say(f"{error} {NOT_YET} Waiting for it.", to_stderr=True)
            is_reported = True
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


LOOK_S = 0.2
DISMISSED = {
    "drain": "Asked to hand their work back and leave",
    "quarantine": "No more leases for",
}
GONE = "The supervisor of pool {} has ended."


def scale_pool(change: str, pool: str, url: str | None, run: str | None, *, until_done: bool, as_json: bool) -> None:
    """Ask for `change` ("4", "+2", "-1") and print what was wanted before and is wanted now."""
    manner, workers = _parsed(change)
    where, run = locate_run(url, run)
    with client_of(as_learner(url, where), run) as client:
        name = pool_of(client.call(client.broker.status.snapshot()), pool).pool
        outcome = client.call(client.broker.pools.scale(name, manner, workers))
        if outcome is None:
            raise BrokerError(GONE.format(name))
        before, wanted = outcome
        if not as_json:
            say(f"Pool {name} of run {run}: {wanted} worker{'s' * (wanted != 1)} wanted, {before} before.")
        found = _await(client, name, wanted) if until_done else None
    if as_json:
        running = {} if found is None else {"pool_now": msgspec.to_builtins(found)}
        say_json({"run": run, "pool": name, "before": before, "wanted": wanted, **running})
    elif found is not None:
        say(f"{found.working} worker{'s run' if found.working != 1 else ' runs'}.")


def _parsed(change: str) -> tuple[Literal["to", "by"], int]:
    if not re.fullmatch(r"[+-]?\d{1,4}", change):
        raise ConfigError(f"{change!r} is no number of workers: give N, +N or -N, such as 4, +2 or -1.")
    return ("by" if change[0] in "+-" else "to"), int(change)


def _await(client: BlockingBroker, name: str, wanted: int) -> PoolInfo:
    """Wait until the wanted workers work and all others have left, and return the pool. Raises BrokerError if its
    supervisor is gone, if another `headway scale` asked for another number meanwhile, or if a worker never will work.
    """
    while True:
        status = client.call(client.broker.status.snapshot())
        found = next((pool for pool in status.pools if pool.pool == name), None)
        if found is None:
            raise BrokerError(GONE.format(name))
        if found.wanted != wanted:
            raise BrokerError(f"Pool {name} was asked for {found.wanted} workers meanwhile, not {wanted}.")
        if found.given_up:
            raise BrokerError(f"Pool {name} gave {found.given_up} workers up: their Headway is of another version.")
        if (found.working, found.running, found.leaving, found.restarting) == (wanted, wanted, 0, 0):
            return found
        time.sleep(LOOK_S)


def send_away(
    workers: Sequence[str], manner: Literal["drain", "quarantine"], url: str | None, run: str | None, *, as_json: bool
) -> None:
    """Ask workers to leave, or let them have no more leases. A part of a name will do if one living worker's name alone
    has it. Raises BrokerError for names that no living worker has, after all others were asked."""
    where, run = locate_run(url, run)
    with client_of(as_learner(url, where), run) as client:
        alive = [info.worker for info in client.call(client.broker.status.workers())]
        meant = {name: _meant(name, alive) for name in workers}
        unknown = [name for name in workers if not client.call(client.broker.status.exclude(meant[name], manner))]
    found = [meant[name] for name in workers if name not in unknown]
    if as_json:
        say_json({"run": run, manner: found, "unknown": unknown})
    elif found:
        say(f"{DISMISSED[manner]}: {', '.join(found)}.")
    if unknown:
        raise BrokerError(
            f"No worker {', '.join(unknown)} is alive in run {run}. Its workers: {', '.join(alive) or 'none'}."
        )


def _meant(name: str, alive: Sequence[str]) -> str:
    """Return the living worker of that name, or the only one whose name has that part; else the name as it is. Raises
    BrokerError for a part of several names."""
    found = [name] if name in alive else [worker for worker in alive if name in worker]
    if len(found) > 1:
        raise BrokerError(f"{name} may be any of {', '.join(found)}: give more of the name. None was asked.")
    return found[0] if found else name


NO_RUN = "headway-runs"


def print_runs(url: str, *, as_json: bool) -> None:
    """Print a line for every run."""
    usages = [usage for run in _run_names(url) if (usage := _usage(url, run)) is not None]
    if as_json:
        say_json([_usage_json(usage) for usage in usages])
    else:
        Terminal().print(_runs_table(usages))


def print_run(url: str, run: str, *, as_json: bool) -> None:
    """Print everything about one run. Raises RunNotFoundError."""
    usage = _usage(url, run)
    with client_of(url, run) as client:
        status, waiting = client.call(read_status(client.broker))
        holder = client.call(client.broker.heartbeat.users()).learner
    assert usage is not None
    learner = None if holder is None else described(holder)
    if as_json:
        say_json(status_json(status, waiting) | {"idle_s": usage.idle_s, "learner": learner})
    else:
        Terminal().print(_runs_table([usage]), status_tables(status, waiting))
        if learner:
            say(f"Its learner is {learner}.")


def remove_run(url: str, run: str, *, is_forced: bool, as_json: bool, confirm: Callable[[str], object]) -> None:
    """Remove the run from the server, and nothing else. Raises HeadwayError if a learner or worker may still use it."""
    usage = _usage(url, run)
    if usage is None:
        raise RunNotFoundError(f"No run {run} there. Runs there: {', '.join(_run_names(url)) or 'none'}.")
    if not is_forced:
        refuse_if_in_use(url, run)
    confirm(f"Delete run {run} ({usage.state}, idle for {_duration(usage.idle_s)})? Its files stay.")
    with client_of(url, run) as client:
        count = client.call(client.broker.status.delete_run())
    if as_json:
        say_json({"deleted": run, "keys": count})
    else:
        say(f"Deleted run {run}: {count} keys.")


def _run_names(url: str) -> tuple[str, ...]:

    with client_of(url, NO_RUN) as client:
        return client.call(client.broker.status.runs())


def _usage(url: str, run: str) -> RunUsage | None:

    with client_of(url, run) as client:
        return client.call(client.broker.usage.read())


def _runs_table(usages: list[RunUsage]) -> WordWrapTable:

    headings = ("state", "incarnation", "weights", "step", "reward", "workers", "MB", "idle")
    table = headed_table("run", numbers=headings)
    for usage in usages:
        step = usage.last_step
        table.add_row(
            usage.run,
            usage.state,
            f"{usage.incarnation}",
            version_text(usage.announced),
            "-" if step is None else f"{step.step + 1}/{step.total_steps}",
            "-" if step is None else f"{step.reward_mean:.3f}",
            f"{usage.workers}",
            f"{usage.payload_bytes / 1e6:,.1f}",
            _duration(usage.idle_s),
        )
    return WordWrapTable(table)


def _usage_json(usage: RunUsage) -> dict[str, Any]:

    step = usage.last_step
    return {
        "run": usage.run,
        "state": usage.state,
        "incarnation": usage.incarnation,
        "announced": version_text(usage.announced),
        "steps": 0 if step is None else step.step + 1,
        "reward_mean": None if step is None else step.reward_mean,
        "workers": usage.workers,
        "payload_bytes": usage.payload_bytes,
        "idle_s": usage.idle_s,
    }


def _duration(seconds: int) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds // size} {unit}"
    return f"{seconds} s"


KEPT_STEPS = 512


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
            yield lambda: self._read_status(client)

    def _read_status(self, client: BlockingBroker) -> tuple[RunStatus, Bottleneck | None]:
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


def find_source(run: str | None, url: str | None, name: str | None) -> Source:
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
