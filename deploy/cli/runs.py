"""`headway runs`: lists the runs that a server holds, shows one of them, and deletes one."""

from collections.abc import Callable
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from headway.broker.client.usage import RunUsage
from headway.broker.errors import RunNotFoundError
from headway.deploy.observe.status import status_json, status_tables, version_text
from headway.deploy.observe.waiting import look as look_at
from headway.deploy.printing import say, say_json
from headway.deploy.roles.run_lookup import client_of
from headway.deploy.run.directory import described, refuse_if_in_use
from headway.deploy.tables import WholeWords
from headway.deploy.terminal import Terminal

NO_RUN = "headway-runs"


def print_runs(url: str, *, as_json: bool) -> None:
    """Print a line for every run."""
    usages = [usage for run in _names(url) if (usage := _usage(url, run)) is not None]
    if as_json:
        say_json([_plain(usage) for usage in usages])
    else:
        Terminal().print(_table(usages))


def print_run(url: str, run: str, *, as_json: bool) -> None:
    """Print everything about one run. Raises RunNotFoundError."""
    usage = _usage(url, run)
    with client_of(url, run) as client:
        status, waiting = client.call(look_at(client.broker))
        holder = client.call(client.broker.heartbeat.users()).learner
    assert usage is not None
    learner = None if holder is None else described(holder)
    if as_json:
        say_json(status_json(status, waiting) | {"idle_s": usage.idle_s, "learner": learner})
    else:
        Terminal().print(_table([usage]), status_tables(status, waiting))
        if learner:
            say(f"Its learner is {learner}.")


def remove_run(url: str, run: str, *, is_forced: bool, as_json: bool, confirm: Callable[[str], object]) -> None:
    """Remove the run from the server, and nothing else. Raises HeadwayError if a learner or worker may still use it."""
    usage = _usage(url, run)
    if usage is None:
        raise RunNotFoundError(f"No run {run} there. Runs there: {', '.join(_names(url)) or 'none'}.")
    if not is_forced:
        refuse_if_in_use(url, run)
    confirm(f"Delete run {run} ({usage.state}, idle for {_duration(usage.idle_s)})? Its files stay.")
    with client_of(url, run) as client:
        count = client.call(client.broker.status.delete_run())
    if as_json:
        say_json({"deleted": run, "keys": count})
    else:
        say(f"Deleted run {run}: {count} keys.")


def _names(url: str) -> tuple[str, ...]:
    with client_of(url, NO_RUN) as client:
        return client.call(client.broker.status.runs())


def _usage(url: str, run: str) -> RunUsage | None:
    with client_of(url, run) as client:
        return client.call(client.broker.usage.look())


def _table(usages: list[RunUsage]) -> WholeWords:
    table = Table(box=SIMPLE_HEAD)
    table.add_column("run", overflow="fold")
    for heading in ("state", "incarnation", "weights", "step", "reward", "workers", "MB", "idle"):
        table.add_column(heading, justify="right")
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
    return WholeWords(table)


def _plain(usage: RunUsage) -> dict[str, Any]:
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
