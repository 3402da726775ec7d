"""Headway's driver: `headway run` as a user starts it, with nothing but the race's recipe."""

import time
from pathlib import Path
from statistics import fmean

from benchmarks.processes import headway
from headway.broker.schema.step_metrics import StepMetrics
from headway.deploy.run.record import METRICS, lineage, read_lines
from headway.deploy.run.run_directory import CHECKPOINTS
from headway.learner.checkpoint import CheckpointStore

from .figures import Figures, Step, figures_of
from .race import HEADWAY, Race


def arguments(race: Race) -> list[str]:
    """Return the arguments of `headway` that make the run, which writes one checkpoint, at its end."""
    return [
        "run",
        race.recipe,
        "--overwrite",
        *race.own,
        *race.all_overrides,
        f"model.path={race.model}",
        "sft.phases=[]",
        f"run.directory={race.output}",
        f"run.name={HEADWAY}",
        f"checkpoint.every_steps={race.load().learner.steps}",
        "evaluation.prompts=0",
    ]


def drive(race: Race, timeout_s: float) -> tuple[Figures, Path]:
    """Make the run, and return its figures and the directory of its model.

    Raises CalledProcessError or TimeoutExpired, its output on stderr.
    """
    directory, began = Path(race.output) / HEADWAY, time.time()
    headway(arguments(race), timeout_s)
    latest = CheckpointStore(directory / CHECKPOINTS, keep=1).latest()
    assert latest is not None, directory
    return read_figures(directory, began), latest.path


def read_figures(directory: Path, began: float) -> Figures:
    """Return the figures from the files of a run whose command began at that time of the clock."""
    metrics = lineage(read_lines(directory / METRICS, StepMetrics))
    # The last line was written when the last step ended; the lines count from the beginning of the learner's loop.
    loop_s = (directory / METRICS).stat().st_mtime - began - metrics[-1].time_s
    steps = [
        Step(
            end_s=loop_s + step.time_s,
            samples=step.trajectories,
            tokens=step.trained_tokens,
            reward=step.reward_mean,
            learner_idle_s=step.take_s,
        )
        for step in metrics
    ]
    return figures_of(steps, lag_mean=fmean(step.lag_mean for step in metrics))
