"""All runs of a study, those that are left to do, and the processes that do them. Imports no torch itself."""

import os
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks import command

from .compositions import COMPOSITIONS
from .trial import Outcome, Settings, Trial, append_outcome, read_outcomes


class Study:
    """All runs of these compositions, lags and seeds, in a directory of their own."""

    def __init__(
        self, directory: Path, settings: Settings, names: Sequence[str], lags: Sequence[int], seeds: Iterable[int]
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self._file = directory / "runs.jsonl"
        # Seed by seed: a study that is stopped has compared everything on some seeds.
        self._trials = [
            Trial(name=name, algorithm=COMPOSITIONS[name], lag=lag, seed=seed, settings=settings)
            for seed in seeds
            for lag in lags
            for name in names
        ]

    def outcomes(self) -> list[Outcome]:
        """Return the outcomes of this study's runs, in their order; other runs in the file do not count."""
        found = {key(outcome.trial): outcome for outcome in read_outcomes(self._file)}
        return [found[key(trial)] for trial in self._trials if key(trial) in found]

    def run(self, processes: int) -> list[str]:
        """Do the runs that are left, and return the names of those that failed."""
        done = {key(outcome.trial) for outcome in self.outcomes()}
        left = [trial for trial in self._trials if key(trial) not in done]
        command.tell(f"{len(self._trials)} runs, {len(left)} to do")
        if not left:
            return []
        check(left)
        os.environ["OMP_NUM_THREADS"] = "1"  # before its processes import torch
        pool = ProcessPoolExecutor(min(processes, len(left)), get_context("spawn"), initializer=_enter)
        try:
            starts = {trial.start: trial for trial in left if not (self._start(trial)).exists()}
            failed = self._all(
                {pool.submit(_warm_up, trial, self._start(trial)): name for name, trial in starts.items()}
            )
            ready = [trial for trial in left if self._start(trial).exists()]
            tasks = {pool.submit(_train, trial, self._start(trial)): trial.title for trial in ready}
            return failed + self._all(tasks, lambda outcome: append_outcome(self._file, outcome))
        finally:
            pool.shutdown(cancel_futures=True)

    def _start(self, trial: Trial) -> Path:
        return self.directory / "starts" / trial.start

    def _all(self, tasks: dict[Future[Any], str], keep: Callable[[Any], None] = lambda result: None) -> list[str]:
        """Wait for the tasks and keep their results as they come; a failed task leaves the others running."""
        failed, began = [], time.monotonic()
        for count, task in enumerate(as_completed(tasks), start=1):
            name, error = tasks[task], task.exception()
            if error is None:
                keep(task.result())
                result = task.result()
                said = f"pass rate {result if isinstance(result, float) else result.final:.3f}"
            else:
                failed.append(name)
                said = f"failed: {type(error).__name__}: {error}"
            command.tell(f"[{count}/{len(tasks)}, {time.monotonic() - began:.0f} s] {name}: {said}")
        return failed


def check(trials: Iterable[Trial]) -> None:
    """Raise for a composition that the learner refuses, before hours go by."""
    import msgspec

    from headway.learner.algorithm_config import AlgorithmConfig
    from headway.learner.objective.composition import check_algorithm

    for keys in {trial.name: trial.algorithm for trial in trials}.values():
        check_algorithm(msgspec.convert(keys, AlgorithmConfig))


def key(trial: Trial) -> bytes:
    """Return the same bytes for equal trials, whatever the order of their keys."""
    import msgspec

    return msgspec.json.encode(trial, order="deterministic")


# What follows runs in the processes of the pool, which alone import torch.


def _enter() -> None:
    from .exact_lag import enter

    enter()


def _warm_up(trial: Trial, start: Path) -> float:
    from .exact_lag import make_start

    return make_start(trial.seed, trial.settings, start)


def _train(trial: Trial, start: Path) -> Outcome:
    from .exact_lag import run_trial

    return run_trial(trial, start)
