"""The files that a run leaves behind: metrics.jsonl, trained.jsonl, evaluations.jsonl, last_look.json, summary.json and
a plot; and `Record`, which reads all of them, however many are there, and says in words what is not.

A killed and resumed learner repeats the steps since its checkpoint, so the files hold abandoned lines too. `lineage`
returns the lines whose training is part of the final weights, and every figure is computed from those.
"""

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec

from headway.broker.connection.address import without_secrets
from headway.broker.errors import HeadwayError
from headway.broker.installation import is_installed, pip_install
from headway.broker.schema.step_metrics import StepMetrics
from headway.deploy.recipe.parse import read_yaml
from headway.learner.disk import replace_file, write_errors

from . import figures
from .events import EvaluationEvent, HeartbeatEvent, StageEvent
from .figures import WINDOW, moving_average
from .run_directory import CONFIG, find_run, is_going_on
from .stage_output import records_in

if TYPE_CHECKING:
    from matplotlib.axes import Axes


log = logging.getLogger(__name__)

METRICS, TRAINED, EVALUATIONS, SUMMARY = "metrics.jsonl", "trained.jsonl", "evaluations.jsonl", "summary.json"
LAST_LOOK = "last_look.json"
"""The workers, the queues and the tallies as the learner saw them last."""


UNKNOWN = {"dropped_stale": 0, "max_lag_allowed": None, "generated_tokens": 0, "worker_restarts": 0}
"""The figures of the summary that only the caller of `summarize` knows, where it does not."""


class TrainedLine(msgspec.Struct, frozen=True, kw_only=True):
    """One line of trained.jsonl: the trajectories of one step."""

    identity: str = ""
    """The run's identity; empty in lines of older versions, whose runs had none."""
    incarnation: int
    step: int
    tids: tuple[str, ...]
    oldest_step: int
    """The step of the oldest weights that sampled a token trained here."""


T = TypeVar("T")
Line = TypeVar("Line", StepMetrics, TrainedLine, EvaluationEvent)
AnyLine = TypeVar("AnyLine", StepMetrics, TrainedLine, EvaluationEvent, StageEvent)


class FileLines(Generic[AnyLine]):
    """The values of a file of JSON lines, and the lines that could not be read."""

    def __init__(self, path: Path, kind: type[AnyLine]) -> None:
        """Read the file; a missing one has no lines. Raises HeadwayError if the system refuses it."""
        self.is_missing = not path.exists()
        whole, torn = _split(path) if not self.is_missing else ([], b"")
        self.is_torn = bool(torn)
        """Whether the last line has no end: a crash has torn it, or its writer is not done."""
        self.lines: list[AnyLine] = []
        self.unreadable = 0
        """The damaged lines before it."""
        for number, line in enumerate(whole, start=1):
            try:
                self.lines.append(msgspec.json.decode(line, type=kind))
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                log.warning("%s:%d is left out, it cannot be read: %s", path, number, error)
                self.unreadable += 1


def read_lines(path: Path, kind: type[Line]) -> list[Line]:
    """Return the file's whole lines; none if there is no file. A last line that a crash has torn is left out.

    A damaged line before it is left out too, with a warning that names it. Raises HeadwayError if the file cannot be
    read.
    """
    return FileLines(path, kind).lines


def _split(path: Path) -> tuple[list[bytes], bytes]:
    """Return the file's whole lines, and what follows the last of them."""
    try:
        *whole, torn = path.read_bytes().split(b"\n")
    except OSError as error:
        raise HeadwayError(f"{path} cannot be read: {error.strerror}. It should be a file of JSON lines.") from error
    return whole, torn


def lineage(lines: Sequence[Line]) -> list[Line]:
    """Return the lines that lead to the last weights, in order.

    An incarnation forks where it logs its first step: it replaces what earlier ones logged from that step on.
    """
    kept: list[Line] = []
    incarnation = None
    for line in sorted(lines, key=lambda line: line.incarnation):
        if line.incarnation != incarnation:
            kept = [earlier for earlier in kept if earlier.step < line.step]
            incarnation = line.incarnation
        kept.append(line)
    return kept


def count_trained_twice(lines: Sequence[TrainedLine]) -> int:
    """Return how many trajectories within one lineage were trained again; every time counts. Headway promises 0."""
    tids = [line.tids for line in lineage(lines)]
    return sum(map(len, tids)) - len(set[str]().union(*tids))


def max_lag_seen(lines: Sequence[TrainedLine]) -> int:
    """Return the largest lag of any token trained in the lineage."""
    return max((line.step - line.oldest_step for line in lineage(lines)), default=0)


def summarize(directory: Path, extras: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Write summary.json from the files and from what only the caller knows (`extras` wins), and return it.

    `unreadable_lines` counts what the figures lack because files were damaged. Raises HeadwayError.

    Expected in extras: max_lag_allowed, dropped_stale, generated_tokens; worker_restarts where counted.
    """
    return _write_summary(directory, summary_of(directory, extras))


def summary_of(directory: Path, extras: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return what `summarize` would write now, and write nothing. Raises HeadwayError."""
    steps = FileLines(directory / METRICS, StepMetrics)
    trained = FileLines(directory / TRAINED, TrainedLine)
    evaluations = FileLines(directory / EVALUATIONS, EvaluationEvent)
    summary = {
        **UNKNOWN,
        **figures.learned(lineage(steps.lines)),
        **figures.evaluated(lineage(evaluations.lines)),
        **figures.spent(steps.lines),
        "trained_trajectories": sum(len(line.tids) for line in lineage(trained.lines)),
        "trained_twice": count_trained_twice(trained.lines),
        "max_lag_seen": max_lag_seen(trained.lines),
        "unreadable_lines": steps.unreadable + trained.unreadable + evaluations.unreadable,
    }
    return _with(summary, extras or {})


def amend_summary(directory: Path, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Add what the supervisor knows to summary.json, and return it."""
    return _write_summary(directory, _with(read_summary(directory), changes))


def read_summary(directory: Path) -> dict[str, Any]:
    """Return summary.json; empty if the run has none. Raises HeadwayError if it is damaged."""
    remedy = f"all that it says, but for what the server counted, is in {METRICS} and {TRAINED} beside it."
    return _read_json(directory / SUMMARY, dict[str, Any], remedy) or {}


def read_last_look(directory: Path) -> HeartbeatEvent | None:
    """Return the learner's last look at the run; None if it left none. Raises HeadwayError if the file is damaged."""
    remedy = "only the workers, the weight versions and the begun groups of the run's end are in no other file."
    return _read_json(directory / LAST_LOOK, HeartbeatEvent, remedy)


def _read_json(path: Path, kind: type[T], remedy: str) -> T | None:
    if not path.exists():
        return None
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise HeadwayError(f"{path} is damaged ({error}). Remove it: {remedy}") from error


def _with(summary: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the summary with `changes`, except those that are None."""
    merged = {**summary, **{key: value for key, value in changes.items() if value is not None}}
    wall_s = merged.get("wall_s") or 0.0
    rate = merged.get("generated_tokens", 0) / wall_s if wall_s else 0.0
    return {**merged, "generation_tokens_per_s": changes.get("generation_tokens_per_s", rate)}


def _write_summary(directory: Path, summary: dict[str, Any]) -> dict[str, Any]:
    replace_file(directory / SUMMARY, json.dumps(summary, indent=2).encode() + b"\n")
    return summary


# Okabe and Ito's palette: its colours differ for any colour vision, and in lightness when printed in grey.
BLUE, ORANGE, GREEN, VERMILION, GREY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#7F7F7F"


NO_PLOT = f"There is no plot, because matplotlib is not installed. {pip_install('plots')}."


def can_plot() -> bool:
    """Return whether matplotlib is installed."""
    return is_installed("matplotlib")


def plot(directory: Path, max_lag: int | None = None) -> Path | None:
    """Draw `directory`/plots/reward_lag.png from the run's files, with the bound on lag if it is given. Without
    matplotlib, log so and return None.

    Raises HeadwayError if it cannot be written.
    """
    if not can_plot():
        log.warning(NO_PLOT)
        return None
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    steps = lineage(read_lines(directory / METRICS, StepMetrics))
    evaluations = lineage(read_lines(directory / EVALUATIONS, EvaluationEvent))
    figure = Figure(figsize=(8, 5.5), layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    _draw_reward(above, steps, evaluations)
    _draw_lag(below, steps, max_lag)
    figure.suptitle(directory.resolve().name)
    path = directory / "plots" / "reward_lag.png"
    with write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=120)
    return path


def _draw_reward(axes: "Axes", steps: Sequence[StepMetrics], evaluations: Sequence[EvaluationEvent]) -> None:
    numbers = [step.step for step in steps]
    rewards = [step.reward_mean for step in steps]
    axes.plot(numbers, rewards, color=BLUE, alpha=0.35, linewidth=1, label="each step")
    axes.plot(numbers, moving_average(rewards), color=BLUE, linewidth=2, label=f"mean of {WINDOW} steps")
    if evaluations:
        places = [line.step for line in evaluations]
        rates = [line.pass_rate for line in evaluations]
        axes.plot(places, rates, "D", color=ORANGE, markeredgecolor="black", label="held-out pass rate")
    axes.set_ylabel("reward")
    _finish(axes)


def _draw_lag(axes: "Axes", steps: Sequence[StepMetrics], max_lag: int | None) -> None:
    from matplotlib.ticker import MaxNLocator

    numbers = [step.step for step in steps]
    axes.step(numbers, [step.lag_max for step in steps], where="mid", color=GREY, label="largest")
    axes.plot(numbers, [step.lag_mean for step in steps], color=GREEN, linewidth=2, label="mean")
    if max_lag is not None:
        axes.axhline(max_lag, color=VERMILION, linestyle="--", linewidth=1.5, label=f"bound ({max_lag})")
    axes.set_ylim(-0.1, max([max_lag or 1, *(step.lag_max for step in steps)]) + 0.4)
    axes.set_ylabel("lag (steps)")
    axes.set_xlabel("learner step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    _finish(axes)


def _finish(axes: "Axes") -> None:
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="best", frameon=False, fontsize="small")


OF_THE_SERVER = {"dropped_stale", "max_lag_allowed", "generated_tokens", "generation_tokens_per_s", "worker_restarts"}
"""Summary figures that are unknown before the run's end: a zero would be taken for a count."""
FILES = (CONFIG, METRICS, EVALUATIONS, LAST_LOOK, SUMMARY)
MISSING = {
    METRICS: "No step has been trained in this directory yet, or the file was moved away.",
    CONFIG: "The run's recipe is unknown.",
}
"""The meaning of a file that is missing. The others are missing for good reasons: a run need not be evaluated."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """A run's files, read once. Raises nothing for files that are missing, torn or damaged: `notes` name them."""

    directory: Path
    steps: list[StepMetrics]
    """All lines, those of abandoned steps too."""
    evaluations: list[EvaluationEvent]
    """Those of the lineage."""
    stages: dict[str, list[StageEvent]]
    """The steps of the stages without workers, by the names of the directories that they leave, in order."""
    last_look: HeartbeatEvent | None = None
    """The workers, the queues and the tallies as the learner saw them last."""
    summary: dict[str, Any]
    settings: dict[str, Any]
    """The recipe's values without passwords; empty if they are unknown."""
    is_running: bool
    notes: list[str]

    @property
    def lineage(self) -> list[StepMetrics]:
        """The steps that lead to the last weights."""
        return lineage(self.steps)

    @property
    def state(self) -> str:
        """The run's state as its directory shows it: running, finished, or stopped."""
        last = self.lineage[-1] if self.steps else None
        if self.is_running:
            return "running"
        return "finished" if last is not None and last.step + 1 >= last.total_steps else "stopped"


def read_record(run: str, *, again: bool = False) -> Record:
    """Read the run in that directory, or else of that name below ./runs. Raises ConfigError if there is none.

    `again`: for a caller that reads a running run again and again. Its summary then comes from metrics.jsonl alone,
    without `trained_twice`: trained.jsonl names every trajectory, and takes seconds to read once it has millions.
    """
    directory = find_run(run, (CONFIG, METRICS))
    notes: list[str] = []
    steps = _read_lines(directory / METRICS, StepMetrics, notes)
    evaluations = _read_lines(directory / EVALUATIONS, EvaluationEvent, notes)
    stages = {name: _read_lines(path, StageEvent, notes) for name, path in records_in(directory).items()}
    is_running = _is_running(directory)
    return Record(
        directory=directory,
        steps=steps,
        evaluations=lineage(evaluations),
        stages=stages,
        last_look=_noted(lambda: read_last_look(directory), notes),
        summary=_followed(steps, lineage(evaluations))
        if again and is_running
        else _read_summary(directory, len(lineage(steps)), notes),
        settings=_read_settings(directory / CONFIG, notes),
        is_running=is_running,
        notes=notes,
    )


def _followed(steps: list[StepMetrics], evaluations: list[EvaluationEvent]) -> dict[str, Any]:
    """Return the summary's figures that the steps and evaluations tell."""
    kept = lineage(steps)
    return {
        **figures.learned(kept),
        **figures.evaluated(evaluations),
        **figures.spent(steps),
        "trained_trajectories": sum(step.trajectories for step in kept),
        "max_lag_seen": max((step.lag_max for step in kept), default=0),
    }


def stamp(directory: Path) -> tuple[object, ...]:
    """Return what changes whenever the run's files do, or whether it runs; reading it costs almost nothing."""
    files = (*(directory / name for name in FILES), *records_in(directory).values())
    return (_is_running(directory), *map(_size_and_time, files))


def _size_and_time(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns


def _read_lines(path: Path, kind: type[AnyLine], notes: list[str]) -> list[AnyLine]:
    try:
        file = FileLines(path, kind)
    except HeadwayError as error:
        notes.append(str(error))
        return []
    notes.extend(_damage(path.name, file))
    return file.lines


def _damage(name: str, file: FileLines[AnyLine]) -> Iterator[str]:
    if file.is_missing and name in MISSING:
        yield f"{name} is missing. {MISSING[name]}"
    if file.unreadable:
        yield f"{name} has damaged lines, which no figure here counts: {file.unreadable}."
    if file.is_torn:
        yield f"The last line of {name} has no end, and is left out: it is being written, or its writer was killed."


def _read_summary(directory: Path, steps: int, notes: list[str]) -> dict[str, Any]:
    """Return summary.json, or its figures as of now if it is missing, damaged or older than the last step."""
    written = _noted(lambda: read_summary(directory), notes) or {}
    if written.get("steps") == steps:
        return written
    if written:
        notes.append(f"{SUMMARY} is older than the last steps, so these figures were computed from the other files.")
    computed = _noted(lambda: summary_of(directory), notes, "There are no summary figures: ") or {}
    return {key: value for key, value in computed.items() if key not in OF_THE_SERVER}


def _read_settings(path: Path, notes: list[str]) -> dict[str, Any]:
    if not path.exists():
        notes.append(f"{path.name} is missing. {MISSING[path.name]}")
        return {}
    settings = _noted(lambda: read_yaml(path), notes, "The recipe is unknown: ") or {}
    server = settings.get("broker")
    if isinstance(server, dict) and isinstance(server.get("url"), str):
        settings["broker"] = {**server, "url": without_secrets(server["url"])}
    return settings


def _noted(read: Callable[[], T], notes: list[str], head: str = "") -> T | None:
    """Return what it reads; None, and its error in `notes`, where it cannot."""
    try:
        return read()
    except HeadwayError as error:
        notes.append(f"{head}{error}")
        return None


def _is_running(directory: Path) -> bool:
    try:
        return is_going_on(directory)
    except HeadwayError:  # a copy on a disk that cannot be written
        return False


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the path and value of every setting below `value`; a list counts as one value."""
    if not isinstance(value, dict):
        yield path, value
        return
    for key, below in value.items():
        yield from leaves(below, f"{path}.{key}".lstrip("."))
