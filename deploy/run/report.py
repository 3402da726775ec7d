"""The files that a run leaves behind: metrics.jsonl, trained.jsonl, evaluations.jsonl, last_look.json, summary.json and
a plot.

A killed and resumed learner repeats the steps since its checkpoint, so the files hold abandoned lines too. `lineage`
returns the lines whose training is part of the final weights, and every figure is computed from those.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec

from headway.broker.errors import HeadwayError
from headway.broker.installation import is_installed, pip_install
from headway.broker.schema.metrics import StepMetrics

from . import figures
from .atomic_files import replace_file, told
from .events import EvaluationEvent, HeartbeatEvent, StageEvent
from .figures import WINDOW, moving_average

if TYPE_CHECKING:
    from matplotlib.axes import Axes


log = logging.getLogger(__name__)

METRICS, TRAINED, EVALUATIONS, SUMMARY = "metrics.jsonl", "trained.jsonl", "evaluations.jsonl", "summary.json"
LAST_LOOK = "last_look.json"
"""The workers, the queues and the tallies as the learner saw them last."""


class TrainedLine(msgspec.Struct, frozen=True, kw_only=True):
    """One line of trained.jsonl: the trajectories of one step."""

    identity: str = ""
    """The run's identity; empty in lines of older versions, whose runs had none."""
    incarnation: int
    step: int
    tids: tuple[str, ...]
    oldest_step: int
    """The step of the oldest weights that sampled a token trained here."""


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
        **_unknown(),
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
    path = directory / SUMMARY
    if not path.exists():
        return {}
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise HeadwayError(
            f"{path} is damaged ({error}). Remove it: all that it says, but for what the server counted, is in"
            f" {METRICS} and {TRAINED} beside it."
        ) from error


def read_last_look(directory: Path) -> HeartbeatEvent | None:
    """Return the learner's last look at the run; None if it left none. Raises HeadwayError if the file is damaged."""
    path = directory / LAST_LOOK
    if not path.exists():
        return None
    try:
        return msgspec.json.decode(path.read_bytes(), type=HeartbeatEvent)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise HeadwayError(
            f"{path} is damaged ({error}). Remove it: only the workers, the weight versions and the begun groups of the"
            " run's end are in no other file."
        ) from error


def _unknown() -> dict[str, Any]:
    """Return the keys that keep these values unless `extras` has others."""
    return {
        "dropped_stale": 0,
        "max_lag_allowed": None,
        "generated_tokens": 0,
        "worker_restarts": 0,
    }


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
    with told(path):
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
