"""Headway's driver: `headway run` as a user starts it, with nothing but the race's recipe."""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean

from benchmarks.learns.parts import finish
from broker.schema import StepMetrics
from deploy.run.directory import CHECKPOINTS
from deploy.run.events import HeartbeatEvent
from deploy.run.report import METRICS, lineage, read_last_look, read_lines
from learner.checkpoints.checkpoint import CheckpointStore

from .figures import FIRST, Figures, Step, figures_of
from .race import Race

NAME = "headway"
LOOK_S = 0.5


def arguments(race: Race) -> list[str]:
    """Return the arguments of `headway` that make the run, which writes one checkpoint, at its end."""
    steps = race.load().learner.steps
    return [
        "run",
        race.recipe,
        "--overwrite",
        *race.own,
        *race.all_overrides,
        f"model.path={race.model}",
        "sft.phases=[]",
        f"run.directory={race.output}",
        f"run.name={NAME}",
        f"checkpoint.every_steps={steps}",
        "evaluation.prompts=0",
    ]


def drive(race: Race, timeout_s: float) -> tuple[Figures, Path]:
    """Make the run, and return its figures and the directory of its model.

    Raises CalledProcessError or TimeoutExpired, its output on stderr.
    """
    directory, began = Path(race.output) / NAME, time.time()
    with looking_on(directory) as looks:
        finish(arguments(race), directory, timeout_s)
    latest = CheckpointStore(directory / CHECKPOINTS, keep=1).latest()
    assert latest is not None, directory
    return read_figures(directory, began, looks), latest.path


@contextmanager
def looking_on(directory: Path) -> Iterator[list[HeartbeatEvent]]:
    """Keep the looks that the learner takes at its run until the end of the block, in the list that it gives."""
    looks: list[HeartbeatEvent] = []
    is_over, last = threading.Event(), read_last_look(directory)  # perhaps of a run that was there before

    def look() -> None:
        nonlocal last
        while not is_over.wait(LOOK_S):
            seen = read_last_look(directory)
            if seen is not None and seen != last:
                looks.append(seen)
                last = seen

    thread = threading.Thread(target=look, name="looking-on")
    thread.start()
    try:
        yield looks
    finally:
        is_over.set()
        thread.join()


def read_figures(directory: Path, began: float, looks: Sequence[HeartbeatEvent] = ()) -> Figures:
    """Return the figures from the files of a run whose command began at that time of the clock. `looks`: the learner's
    looks at it while it went on."""
    metrics = lineage(read_lines(directory / METRICS, StepMetrics))
    # The last line was written when the last step ended; the lines count from the beginning of the learner's loop.
    loop_s = (directory / METRICS).stat().st_mtime - began - metrics[-1].time_s
    steps = [
        Step(
            end_s=loop_s + step.time_s,
            samples=step.trajectories,
            tokens=round(step.trajectories * step.response_tokens_mean),
            reward=step.reward_mean,
            learner_idle_s=step.take_s,
        )
        for step in metrics
    ]
    look = read_last_look(directory)
    workers = look.workers if look else ()
    swaps = sum(worker.swaps for worker in workers)
    first_s, last_s = metrics[min(FIRST, len(metrics) - 1) - 1].time_s, metrics[-1].time_s
    return figures_of(
        steps,
        engine_idle=_idle([one for one in looks if first_s <= one.time_s <= last_s]),
        pause_per_update_s=sum(worker.swap_s for worker in workers) / swaps if swaps else None,
        lag_mean=fmean(step.lag_mean for step in metrics),
    )


def _idle(looks: Sequence[HeartbeatEvent]) -> float | None:
    """Return the share of the time between the first and the last look in which a worker's engine had nothing to do;
    None without workers that both saw."""
    if len(looks) < 2:
        return None
    before = {worker.worker: worker.busy_s for worker in looks[0].workers}
    busy_s = [one.busy_s - before[one.worker] for one in looks[-1].workers if one.worker in before]
    return max(0.0, 1 - fmean(busy_s) / (looks[-1].time_s - looks[0].time_s)) if busy_s else None
