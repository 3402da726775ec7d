"""Shows progress while a run runs, from the broker's StatusBoard alone: a live panel, one line for each step, or the
events between two looks.
"""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Self

from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from headway.broker.client.broker import BlockingBroker
from headway.broker.errors import HeadwayError, RunNotFoundError
from headway.broker.schema.status import RunStatus
from headway.broker.schema.step_metrics import StepMetrics
from headway.deploy.run.figures import WINDOW, generated_per_s, moving_average, trained_per_s
from headway.deploy.terminal import Terminal, styled
from headway.rollout_workers.health import RUN_OVER

from .bottleneck import Bottleneck, Reminder, StatusReader, read_status
from .run_warnings import FaultReporter, FlatRewardReporter, fault_text, flat_reward_text
from .status_tables import recent, version_text

POLL_S = 0.5
LAST_PATIENCE_S = 1.0
"""Seconds that the last look waits for a server that is away."""
SPARKS = "▁▂▃▄▅▆▇█"
SPARK_STEPS = 40


STATES = {
    "claimed": "The learner has taken the run and prepares its first weights.",
    "training": "Training.",
    "finished": "Finished.",
    "stopped": "Stopped; --resume goes on from the last checkpoint.",
}
"""The run's states in words for people. Other states are shown as they are."""
NO_LEARNER = "Waiting for a learner to take the run."
NOTHING_TRAINED = (
    "The run had finished before, so nothing was trained. To train on, resume it with a larger learner.steps, or with a"
    " larger prompts.epochs where its prompts had ended."
)


class Monitor:
    """Looks at a run in a thread of its own and shows it on `console`, inside a `with` block."""

    def __init__(self, look: StatusReader, console: Terminal, max_lag: int | None = None) -> None:
        self._read_status, self._console, self._max_lag = look, console, max_lag
        self._reminder, self._faults, self._flat = Reminder(), FaultReporter(), FlatRewardReporter()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="monitor", daemon=True)
        self._live = Live(console=console, refresh_per_second=4, transient=False) if console.is_terminal else None
        self._long_prompts = 0
        """Those that were told last."""
        self._started = time.monotonic()
        self._printed = (-1, -1)
        self._found = (-1, -1)
        """The last step before this monitor, perhaps of a learner that has ended."""
        self._found_state = ""
        self._has_begun_again = False
        self._is_first_look = True
        self._state = ""
        self._named = set[str]()
        """The other runs that were named since this monitor waits for a learner."""
        self.last: RunStatus | None = None

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(timeout=5.0)
        if self._live is not None:
            self._live.stop()

    def is_over(self) -> bool:
        """Return whether its block has ended. Any thread may ask."""
        return self._over.is_set()

    def say(self, text: str) -> None:
        """Print a line above the panel."""
        self._console.print(text, soft_wrap=True)

    def _watch(self) -> None:
        while True:
            self._refresh()
            if self._over.wait(POLL_S):
                self._refresh()
                return

    def _refresh(self) -> None:
        try:
            status, waiting = self._read_status()
        except RunNotFoundError as error:
            self._say_no_learner(str(error))
            return
        except HeadwayError as error:
            if not self.is_over():  # a server that is away may be the reason why its user ends this
                self._say_state(f"broker: {error}")
            return
        if self.last is None:
            self._found = max(map(_place, status.recent_steps), default=(-1, -1))
            self._found_state = status.state
        self.last = status
        for text in self._faults.news(status):
            self.say(text)
        if self._live is not None:
            with suppress(OSError):  # the terminal may be gone
                self._live.update(panel(status, self._max_lag, time.monotonic() - self._started, waiting))
        else:
            self._print_lines(status)
            if news := self._reminder.news(waiting):
                self.say(news)
        if warning := self._flat.news([step for step in status.recent_steps if _place(step) > self._found]):
            self.say(warning)
        if warning := self._long_prompts_warning(status.last_step):
            self.say(warning)
        if self._found_state == "finished":
            self._say_nothing_trained(status)

    def _long_prompts_warning(self, step: StepMetrics | None) -> str:
        """Return the warning on prompts that were passed over, and again once there are twice as many."""
        count = step.long_prompts if step is not None and _place(step) > self._found else 0
        if count < max(1, 2 * self._long_prompts):
            return ""
        self._long_prompts = count
        return (
            f"{count} prompts so far were too long and are passed over: they have more tokens than"
            " engine.max_model_len - sampling.max_new_tokens leaves. The learner's log names them. Raise"
            " engine.max_model_len, lower sampling.max_new_tokens, or shorten them."
        )

    def _say_nothing_trained(self, status: RunStatus) -> None:
        has_ended_again = self._has_begun_again and status.state == "finished"
        if has_ended_again and max(map(_place, status.recent_steps), default=(-1, -1)) == self._found:
            self.say(NOTHING_TRAINED)
        self._has_begun_again = status.state not in RUN_OVER

    def _say_no_learner(self, error: str) -> None:
        others = error.partition("Runs there: ")[2]
        is_other = bool(others) and others != "none."  # perhaps our run's name is misspelt
        text = f"{NO_LEARNER} Runs there: {others}" if is_other else NO_LEARNER
        if self._live is not None:
            with suppress(OSError):  # the terminal may be gone
                self._live.update(Text(text))
            return
        named = set(others.rstrip(".").split(", ")) if is_other else set[str]()
        if self._state != NO_LEARNER or not named <= self._named:
            self.say(text)
        self._named = self._named | named if self._state == NO_LEARNER else named
        self._state = NO_LEARNER

    def _print_lines(self, status: RunStatus) -> None:
        if self._is_first_look:
            self._is_first_look = False
            self._printed = _last_but_one(status.recent_steps)
            self._state = (
                status.state if status.state in RUN_OVER else ""
            )  # the old state of a run that is being resumed
        if status.state not in RUN_OVER:
            self._say_state(status.state)
        for step in status.recent_steps:
            if _place(step) > self._printed:
                self._printed = _place(step)
                self.say(step_line(step) + f"  {_load(status)}")
        self._say_state(status.state)

    def _say_state(self, state: str) -> None:
        if state != self._state and self._live is None:
            self.say(STATES.get(state, state))
        self._state = state


def _last_but_one(steps: Sequence[StepMetrics]) -> tuple[int, int]:
    """Return incarnation and step of the last step but one. A monitor that joins a run tells only later steps, because
    earlier ones had another load."""
    return _place(steps[-2]) if len(steps) > 1 else (-1, -1)


def _place(step: StepMetrics) -> tuple[int, int]:
    return step.incarnation, step.step


@contextmanager
def watch(url: str, run: str, console: Terminal, max_lag: int | None = None) -> Iterator[Monitor]:
    """Yield a Monitor of the run, with a connection of its own."""
    broker = BlockingBroker(url, run)

    def look() -> tuple[RunStatus, Bottleneck | None]:
        return broker.call(read_status(broker.broker, any_identity=True))

    try:
        with Monitor(look, console, max_lag) as monitor:
            broker.broker.end_when(monitor.is_over, LAST_PATIENCE_S)
            yield monitor
    finally:
        broker.close()


def step_line(step: StepMetrics) -> str:
    """Return one learner step in one line."""
    return (
        f"step {step.step + 1:>4}/{step.total_steps}  reward {step.reward_mean:.3f}"
        f"  lag {step.lag_mean:.2f} (max {step.lag_max})  {step.response_tokens_mean:.0f} tokens/response"
        f"  trained {trained_per_s([step]):,.0f} tokens/s"
    )


def panel(
    status: RunStatus, max_lag: int | None, elapsed_s: float, waiting: Bottleneck | None = None
) -> RenderableType:
    """Return the whole picture in a few lines; who waits is told once nothing has moved for a while."""
    rows = Table.grid(padding=(0, 2))
    rows.add_column(style="bold", min_width=9)
    rows.add_column(ratio=1)
    for name, content in _rows(status, max_lag):
        rows.add_row(name, content)
    if waiting is not None and waiting.is_quiet:
        rows.add_row("waits", styled((waiting.text, "yellow")))
    return Group(_title(status, elapsed_s), rows)


def sparkline(values: Sequence[float], low: float, high: float) -> str:
    """Return one block character for each value."""
    scale = (len(SPARKS) - 1) / (high - low) if high > low else 0.0
    return "".join(SPARKS[min(max(round((value - low) * scale), 0), len(SPARKS) - 1)] for value in values)


def _title(status: RunStatus, elapsed_s: float) -> RenderableType:
    step = status.last_step
    done, total = (step.step + 1, step.total_steps) if step is not None else (0, 1)
    row = Table.grid(padding=(0, 2))
    row.add_row(
        styled((status.run, "bold"), f" {status.state}"),
        f"step {done}/{total}" if step is not None else "",
        ProgressBar(total=total, completed=done, width=30),
        f"{_clock(elapsed_s)}{_remaining(status)}",
    )
    return row


def _rows(status: RunStatus, max_lag: int | None) -> list[tuple[str, str | Text]]:
    rows: list[tuple[str, str | Text]] = []
    if status.last_step is not None:
        rows += [("reward", _reward(status.recent_steps)), ("lag", _lag(status.last_step, max_lag))]
    rows.append(
        ("tokens/s", f"{generated_per_s(status.workers):,.0f} generated, {trained_per_s(recent(status)):,.0f} trained")
    )
    rows.append(("queue", _queue(status)))
    rows += [("workers" if not index else "", text) for index, text in enumerate(_workers(status))]
    return rows


def _reward(steps: Sequence[StepMetrics]) -> Text:
    values = [step.reward_mean for step in steps]
    shown = values[-SPARK_STEPS:]
    line = sparkline(shown, min(0.0, *shown), max(1.0, *shown))
    return styled(
        (line, "green"), f" {values[-1]:.3f}, mean of {min(WINDOW, len(values))}: {moving_average(values)[-1]:.3f}"
    )


def _lag(step: StepMetrics, max_lag: int | None) -> str:
    bound = "" if max_lag is None else f", {max_lag} allowed"
    return f"mean {step.lag_mean:.2f}, max {step.lag_max}{bound}"


def _queue(status: RunStatus) -> str:
    queues = status.queues
    stale = queues.dropped_stale + queues.requeued_stale
    text = f"{queues.ready} groups ready, {queues.open} open, {queues.pool} waiting"
    text += f"; {queues.leased} samples leased"
    return text + (f", {stale} over the bound" if stale else "")


def _workers(status: RunStatus) -> list[Text]:
    if not status.workers:
        return [styled("none")]
    return [
        styled(
            f"{info.worker}  version {version_text(info.version)}  {info.state}  {info.active}/{info.capacity} leases",
            (f"  {info.last_error}" if info.last_error else "", "red"),
        )
        for info in status.workers
    ]


def _load(status: RunStatus) -> str:
    count = len(status.workers)
    workers = f"{count} worker{'s' * (count != 1)}"
    return f"generated {generated_per_s(status.workers):,.0f} tokens/s  {status.queues.ready} ready  {workers}"


def _remaining(status: RunStatus) -> str:
    """Return the remaining time, from the pace of the last steps."""
    step, pace = status.last_step, [step.step_s for step in status.recent_steps[-WINDOW:]]
    if step is None or not pace or step.step + 1 >= step.total_steps:
        return ""
    return f", about {_clock((step.total_steps - step.step - 1) * sum(pace) / len(pace))} left"


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def changes(before: RunStatus | None, now: RunStatus) -> Iterator[str]:
    """Yield the events since the look before; without one, the state alone."""
    if before is None or before.identity != now.identity:
        yield STATES.get(now.state, now.state)
        yield from _fault_events(None, now)
        return
    if now.state != before.state:
        yield STATES.get(now.state, now.state)
    if now.incarnation != before.incarnation:
        yield f"Another learner took the run over, as incarnation {now.incarnation}."
    yield from _step_events(before, now)
    if now.announced != before.announced:
        yield f"Version {version_text(now.announced)} announced."
    yield from _worker_events(before, now)
    yield from _fault_events(before, now)
    yield from _pool_events(before, now)
    yield from _refusal_events(before, now)


def _step_events(before: RunStatus, now: RunStatus) -> Iterator[str]:
    told = {(step.incarnation, step.step) for step in before.recent_steps}
    for step in now.recent_steps:
        if (step.incarnation, step.step) not in told:
            yield step_line(step)
    if (warning := flat_reward_text(now.recent_steps)) and not flat_reward_text(before.recent_steps):
        yield warning


def _worker_events(before: RunStatus, now: RunStatus) -> Iterator[str]:
    were = {info.worker: info for info in before.workers}
    are = {info.worker: info for info in now.workers}
    for name, info in are.items():
        if name not in were:
            yield f"Worker {name} joined."
        elif info.last_error and info.last_error != were[name].last_error:
            yield f"Worker {name}: {info.last_error}"
    for name in were.keys() - are.keys():
        yield f"Worker {name} left."
    for name in set(now.quarantined) - set(before.quarantined):
        yield f"Worker {name} gets no more leases."


def _fault_events(before: RunStatus | None, now: RunStatus) -> Iterator[str]:
    told = before.faults if before is not None else ()
    for fault in now.faults:
        if fault not in told:
            yield fault_text(fault)


def _pool_events(before: RunStatus, now: RunStatus) -> Iterator[str]:
    were = {pool.pool: pool.wanted for pool in before.pools}
    for pool in now.pools:
        if were.get(pool.pool) != pool.wanted:
            yield f"Pool {pool.pool}: {pool.wanted} workers wanted."


def _refusal_events(before: RunStatus, now: RunStatus) -> Iterator[str]:
    for letter in now.dead_letters:
        if letter not in before.dead_letters:
            yield f"Refused: {letter.tid} of {letter.worker or 'no worker'}: {letter.reason}"
    expired = now.queues.expired_leases - before.queues.expired_leases
    if expired > 0:
        yield f"{expired} lease{'s' * (expired > 1)} expired."
