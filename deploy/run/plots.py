"""The picture of a run: reward above, lag below, over learner steps."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from headway.broker.schema.metrics import StepMetrics

from .events import EvaluationEvent
from .figures import WINDOW, moving_average
from .report import EVALUATIONS, METRICS, lineage, read_lines
from .whole_files import told

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's palette: its colours differ for any colour vision, and in lightness when printed in grey.
BLUE, ORANGE, GREEN, VERMILION, GREY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#7F7F7F"


def plot(directory: Path, max_lag: int | None = None) -> Path:
    """Draw `directory`/plots/reward_lag.png from the run's files, with the bound on lag if it is given.

    Raises HeadwayError if it cannot be written.
    """
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
