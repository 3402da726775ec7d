"""`headway top`: a run on the whole screen, with keys that change its number of workers and send single ones away."""

import asyncio
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, ClassVar, Literal

from textual.app import App, ComposeResult
from textual.binding import BindingType
from textual.containers import Horizontal
from textual.css.query import NoMatches
from textual.widgets import DataTable, Footer, RichLog, Static

from headway.broker.connection.address import without_password
from headway.broker.errors import ConfigError, HeadwayError
from headway.broker.schema.status import PoolInfo, RunStatus, WorkerInfo
from headway.deploy.observe.bottleneck import Bottleneck, StatusReader, read_status
from headway.deploy.observe.live import changes
from headway.deploy.observe.status_tables import recent, state_text, version_text
from headway.deploy.roles.run_client import DISMISSED, as_learner, client_of, locate_run
from headway.deploy.run.figures import generated_per_s, trained_per_s, wait_fraction
from headway.deploy.terminal import styled

LOOK_S = 1.0
MOST_EVENTS = 1000
WORKER_COLUMNS = ("worker", "host", "state", "version", "lag", "leases", "tokens/s", "sent", "error")
POOL_COLUMNS = ("pool", "wanted", "running", "leaving", "restarting", "given up")
HELP = (
    "+ and - ask the pool under the cursor for a worker more or less. d asks the worker under the cursor to hand its"
    " work back and leave, without another in its place; x lets it have no more samples, and another replaces it."
    " y confirms either, n does not. tab goes from table to table, the arrows move in it. The keys need the learner's"
    " password. 'lag' is how many steps a worker's weights are behind the announced ones. q quits and leaves the run as"
    " it is; ? hides this."
)
QUESTIONS = {
    "drain": "Ask worker {} to hand its work back and leave? No other takes its place. y: yes, n: no",
    "quarantine": "Let worker {} have no more samples? Its supervisor replaces it. y: yes, n: no",
}

Scale = Callable[[str, int], str]
"""Asks a pool for so many workers more, and returns what to tell the user. Raises HeadwayError."""

Manner = Literal["drain", "quarantine"]

Dismiss = Callable[[str, Manner], str]
"""Sends a worker away in this manner, and returns what to tell the user. Raises HeadwayError."""


def watch_on_screen(url: str | None, run: str | None) -> None:
    """Show a run until the user quits. Raises ConfigError without a terminal."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ConfigError("headway top needs a terminal; `headway status` prints one look, and --watch repeats it.")
    where, run = locate_run(url, run)
    with client_of(where, run) as client:
        Top(
            f"{run} at {without_password(where)}",
            lambda: client.call(read_status(client.broker, any_identity=True)),
            scaler(as_learner(url, where), run),
            dismisser(as_learner(url, where), run),
        ).run()


def scaler(url: str, run: str) -> Scale:
    """Return the function that scales this run's pools, with the user that the URL names."""

    def scale(pool: str, workers: int) -> str:
        with client_of(url, run) as client:
            outcome = client.call(client.broker.pools.scale(pool, "by", workers))
        if outcome is None:
            return f"The supervisor of pool {pool} has ended."
        return f"Pool {pool}: {outcome[1]} wanted, {outcome[0]} before."

    return scale


def dismisser(url: str, run: str) -> Dismiss:
    """Return the function that sends this run's workers away, with the user that the URL names."""

    def dismiss(worker: str, manner: Manner) -> str:
        with client_of(url, run) as client:
            is_alive = client.call(client.broker.status.exclude(worker, manner))
        return f"{DISMISSED[manner]}: {worker}." if is_alive else f"Worker {worker} has left."

    return dismiss


class Top(App[None]):
    """Workers, pools, versions, queues, rates and events of one run."""

    CSS = """
    #head, #waits, #help, #question { height: auto; padding: 0 1; }
    #waits { color: $warning; }
    #question { background: $warning; color: $text; }
    #workers { height: 2fr; }
    #lower { height: 1fr; }
    #pools { width: auto; max-width: 60%; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        ("plus,equals_sign", "scale(1)", "worker more"),
        ("minus", "scale(-1)", "worker less"),
        ("d", "dismiss('drain')", "drain"),
        ("x", "dismiss('quarantine')", "quarantine"),
        ("y", "answer(True)", "yes"),
        ("n,escape", "answer(False)", "no"),
        ("question_mark", "help", "help"),
        ("q", "quit", "quit"),
    ]
    ENABLE_COMMAND_PALETTE = False

    def __init__(self, where: str, look: StatusReader, scale: Scale, dismiss: Dismiss, every_s: float = LOOK_S) -> None:
        super().__init__()
        self._where, self._look, self._every_s = where, look, every_s
        self._scale, self._dismiss = scale, dismiss
        self._asked: tuple[str, Manner] | None = None
        self._last: RunStatus | None = None
        self._last_error = ""

    def compose(self) -> ComposeResult:
        yield Static(id="head")
        yield Static(id="waits")
        yield Static(styled(HELP), id="help")
        yield DataTable[Any](id="workers", cursor_type="row")
        yield Static(id="question")
        with Horizontal(id="lower"):
            yield DataTable[Any](id="pools", cursor_type="row")
            yield RichLog(id="events", max_lines=MOST_EVENTS, wrap=True)
        yield Footer()

    def on_mount(self) -> None:
        self.query_one("#help").display = False
        self.query_one("#question").display = False
        self._table("#workers").add_columns(*WORKER_COLUMNS)
        self._table("#pools").add_columns(*POOL_COLUMNS)
        self._table("#pools").focus()
        self.run_worker(self._follow(), exclusive=True)

    async def _follow(self) -> None:
        with suppress(NoMatches):  # the user has quit during a look, and the widgets are gone
            while True:
                await self._refresh()
                await asyncio.sleep(self._every_s)

    async def _refresh(self) -> None:
        try:
            status, waiting = await asyncio.to_thread(self._look)
        except HeadwayError as error:
            self._log_error(f"{error}")
        else:
            self._last_error = ""
            self._show(status, waiting)

    def _show(self, status: RunStatus, waiting: Bottleneck | None) -> None:
        self.query_one("#head", Static).update(styled("\n".join(_head(self._where, status))))
        self.query_one("#waits", Static).update(styled(waiting.text if waiting else ""))
        _fill(self._table("#workers"), [_worker(info, status) for info in status.workers])
        _fill(self._table("#pools"), [_pool(pool) for pool in status.pools])
        for event in changes(self._last, status):
            self._log_event(event)
        self._last = status

    def _log_event(self, event: str) -> None:
        self.query_one("#events", RichLog).write(styled(f"{time.strftime('%H:%M:%S')} {event}"))

    def _log_error(self, text: str) -> None:
        if text != self._last_error:
            self._log_event(text)
        self._last_error = text

    def _table(self, name: str) -> DataTable[Any]:
        return self.query_one(name, DataTable)

    async def action_scale(self, workers: int) -> None:
        """Ask the pool under the cursor for so many workers more."""
        pools, row = self._last.pools if self._last else (), self._table("#pools").cursor_row
        if not 0 <= row < len(pools):
            self._log_event("No supervisor of a pool is alive: start workers with `headway run` or `headway workers`.")
            return
        await self._log_outcome(lambda: self._scale(pools[row].pool, workers))

    def action_dismiss(self, manner: Manner) -> None:
        """Ask the user whether to send the worker under the cursor away."""
        if (worker := _under_cursor(self._table("#workers"))) is None:
            self._log_event("No worker is alive.")
            return
        self._ask((worker, manner))

    async def action_answer(self, is_confirmed: bool) -> None:
        """Send the worker of the question away, or leave it."""
        asked = self._asked
        self._ask(None)
        if asked is not None and is_confirmed:
            await self._log_outcome(lambda: self._dismiss(*asked))

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Say whether a key has a meaning now: yes and no have one while a question is asked."""
        return self._asked is not None if action == "answer" else True

    def _ask(self, asked: tuple[str, Manner] | None) -> None:
        question = self.query_one("#question", Static)
        if asked is not None:
            question.update(styled(QUESTIONS[asked[1]].format(asked[0])))
        question.display, self._asked = asked is not None, asked
        self.refresh_bindings()

    async def _log_outcome(self, act: Callable[[], str]) -> None:
        try:
            self._log_event(await asyncio.to_thread(act))
        except HeadwayError as error:
            self._log_event(f"{error}")

    def action_help(self) -> None:
        """Show what the keys do, or hide it."""
        shown = self.query_one("#help")
        shown.display = not shown.display


def _fill(table: DataTable[Any], rows: Sequence[Sequence[str]]) -> None:
    """Show these rows, and leave the cursor at its worker or pool; at its place if that one is gone."""
    row, name = table.cursor_row, _under_cursor(table)
    table.clear()
    for cells in rows:
        table.add_row(*map(styled, cells))
    if rows:
        names = [cells[0] for cells in rows]
        table.move_cursor(row=names.index(name) if name in names else min(row, len(rows) - 1))


def _under_cursor(table: DataTable[Any]) -> str | None:
    """Return the name of the worker or pool under the cursor, or None for an empty table."""
    if not table.is_valid_row_index(table.cursor_row):
        return None
    return f"{table.get_row_at(table.cursor_row)[0]}"


def _head(name: str, status: RunStatus) -> Iterator[str]:
    steps, queues = recent(status), status.queues
    yield f"{name}: {status.state}, incarnation {status.incarnation}, version {version_text(status.announced)}"
    if steps:
        last = steps[-1]
        yield (
            f"step {last.step + 1} of {last.total_steps}, reward {last.reward_mean:.3f}, lag {last.lag_mean:.2f}"
            f" (max {last.lag_max}), learner waiting {wait_fraction(steps):.0%}"
        )
    yield f"{generated_per_s(status.workers):,.0f} tokens/s generated, {trained_per_s(steps):,.0f} trained"
    yield (
        f"groups: {queues.pool} waiting, {queues.open} generating, {queues.ready} ready, {queues.pinned} taken;"
        f" samples: {queues.retry} waiting, {queues.leased} leased; {queues.payload_bytes / 1e6:,.1f} MB stored"
    )


def _worker(info: WorkerInfo, status: RunStatus) -> tuple[str, ...]:
    lag = "-"
    if info.version is not None and status.announced is not None:
        lag = f"{max(0, status.announced.step - info.version.step)}"
    return (
        info.worker,
        info.host,
        state_text(info, status),
        version_text(info.version),
        lag,
        f"{info.active}/{info.capacity}",
        f"{info.tokens_per_s:,.0f}",
        f"{info.submitted:,}",
        info.last_error.partition("\n")[0],  # last, as a column never becomes narrower again
    )


def _pool(pool: PoolInfo) -> tuple[str, ...]:
    return (pool.pool, f"{pool.wanted}", f"{pool.running}", f"{pool.leaving}", f"{pool.restarting}", f"{pool.given_up}")
