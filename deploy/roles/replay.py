"""`headway replay`: trains a run's learner again from its experience log, offline, with the same or other settings.

runs/RUN/replays/NAME/    metrics.jsonl  trained.jsonl  summary.json  model/
"""

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from rich.table import Table

from headway.broker.schema.step_metrics import StepMetrics
from headway.deploy.observe.sinks.base import SinkRun
from headway.deploy.observe.sinks.jsonl import JsonlSink
from headway.deploy.recipe.recipe import Recipe
from headway.deploy.recipe.resolve import with_overrides
from headway.deploy.run.record import METRICS, leaves, lineage, read_lines, summarize
from headway.deploy.run.run_directory import CHECKPOINTS, EXPERIENCE, REPLAYS
from headway.deploy.run.stage_output import after_stages
from headway.deploy.terminal import headed_table
from headway.learner.algorithm_config import AlgorithmConfig, preset_defaults
from headway.learner.backends.adapter import FOLDER
from headway.learner.backends.base import Backend
from headway.learner.checkpoint import Checkpoint, CheckpointStore
from headway.learner.config import LayoutConfig
from headway.learner.experience.log import ExperienceLog
from headway.learner.ranks import Ranks
from headway.learner.stages.loop import ReplayError, TrainedStep, replay, saved_tensors, weights_digest

from .learner import recipe_updater, seed_generators
from .observer import step_event
from .recipe_backends import recipe_backend

ALGORITHM_COLUMNS = {"ess": "ess", "clip_fraction": "clipped", "kl_behavior": "kl"}
"""The metrics of the loss that the table shows, with their headings. metrics.jsonl has all metrics."""
MAX_ROWS = 50
MISSING = "-"


class ComparedWeights(msgspec.Struct, frozen=True, kw_only=True):
    """The weights after the steps below `step`, in the replay and in the run's checkpoint."""

    step: int
    checkpoint: str
    replayed_digest: str
    original_digest: str

    @property
    def is_equal(self) -> bool:
        return self.replayed_digest == self.original_digest


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of one replay."""

    run: str
    directory: str
    changed: tuple[str, ...]
    """Paths of the settings that differ from the run's."""
    ranks: int
    """Ranks of the run's learner; a replay has one."""
    replayed: tuple[StepMetrics, ...]
    original: dict[int, StepMetrics]
    weights: tuple[ComparedWeights, ...]

    @property
    def first_difference(self) -> int | None:
        """The first step whose loss or gradient norm differs from the original's in any bit."""
        for step in self.replayed:
            before = self.original.get(step.step)
            if before is not None and (step.loss, step.grad_norm) != (before.loss, before.grad_norm):
                return step.step
        return None

    @property
    def is_identical(self) -> bool:
        """Whether every step that both have is equal, and the weights of every checkpoint on the way."""
        return self.first_difference is None and all(weights.is_equal for weights in self.weights)

    @property
    def is_as_promised(self) -> bool:
        """Whether the same settings gave the same bits. Other settings promise nothing."""
        return bool(self.changed) or self.is_identical


def changed_settings(original: Recipe, replayed: Recipe) -> tuple[str, ...]:
    """Return the paths of the values that differ."""
    before, after = (dict(leaves(msgspec.to_builtins(recipe))) for recipe in (original, replayed))
    return tuple(sorted(path for path in before.keys() | after.keys() if before.get(path) != after.get(path)))


def comparison_json(comparison: Comparison) -> dict[str, Any]:
    """Return the comparison for programs: figures of every step, and the verdict."""
    return {
        "run": comparison.run,
        "directory": comparison.directory,
        "changed": comparison.changed,
        "is_identical": comparison.is_identical,
        "first_difference": comparison.first_difference,
        "steps": [
            {"step": step.step, "replayed": _figures(step), "original": _figures(comparison.original.get(step.step))}
            for step in comparison.replayed
        ],
        "weights": [{**msgspec.to_builtins(weights), "is_equal": weights.is_equal} for weights in comparison.weights],
    }


def comparison_table(comparison: Comparison) -> Table:
    """Return the steps as rows. The original's figures stand below where they differ."""
    steps = comparison.replayed
    reported = [name for name in ALGORITHM_COLUMNS if any(name in step.algorithm for step in steps)]
    headings = ("step", "loss", "grad norm", "reward", *(ALGORITHM_COLUMNS[name] for name in reported))
    table = headed_table(title=f"Replay of {comparison.run}", numbers=headings)
    for step in _thinned(steps):
        before, after = _figures(comparison.original.get(step.step)), _figures(step)
        columns = ("loss", "grad_norm", "reward_mean", *reported)
        table.add_row(str(step.step), *(_short(after, name) for name in columns))
        if before != after:
            table.add_row("original", *(_short(before, name) for name in columns), style="dim")
    return table


def verdict(comparison: Comparison) -> Iterator[str]:
    """Yield the outcome, in sentences."""
    steps, step = comparison.replayed, comparison.first_difference
    if step is None:
        yield f"Loss and gradient norm of all {len(steps)} steps equal the original's, bit for bit."
    else:
        yield f"Loss or gradient norm differ from the original's from step {step} on."
    for weights in comparison.weights:
        how = "equal" if weights.is_equal else "differ from"
        yield f"The weights at step {weights.step} {how} those of {weights.checkpoint} ({weights.replayed_digest})."
    if comparison.changed:
        yield f"Changed settings: {', '.join(comparison.changed)}."
    elif not comparison.is_identical:
        yield (
            "The settings are the same. Bits also depend on the machine, on the versions of its libraries"
            f" (`headway doctor`), on settings that were changed before a --resume, and on ranks: the run's learner had"
            f" {comparison.ranks}, a replay has 1."
        )


def _figures(step: StepMetrics | None) -> dict[str, float | None]:
    if step is None:
        return {}
    return {"loss": step.loss, "grad_norm": step.grad_norm, "reward_mean": step.reward_mean, **step.algorithm}


def _short(figures: dict[str, float | None], name: str) -> str:
    value = figures.get(name)
    return MISSING if value is None else f"{value:.4g}"


def _thinned(steps: Sequence[StepMetrics]) -> Sequence[StepMetrics]:
    """Return so few steps that a terminal can show them, with the last one among them."""
    stride = -(-len(steps) // MAX_ROWS) or 1
    return steps[::-1][::stride][::-1]


log = logging.getLogger(__name__)


def replayed_recipe(original: Recipe, preset: str | None, overrides: Sequence[str]) -> Recipe:
    """Return the same recipe with a preset's algorithm, if one is named, and with overrides. Raises ConfigError."""
    if preset is None:
        return with_overrides(original, overrides)
    algorithm = msgspec.convert({**preset_defaults(preset), "preset": preset}, AlgorithmConfig)
    chosen = msgspec.structs.replace(original, algorithm=algorithm)
    return with_overrides(chosen, (f"algorithm.preset={preset}", *overrides))


@dataclass(kw_only=True)
class Replay:
    """Runs one replay in this process, however many ranks the run's learner had."""

    original: Recipe
    recipe: Recipe
    first_step: int
    steps: int | None
    """Most steps to replay; None: all that were logged."""

    def __post_init__(self) -> None:
        directory = self.original.run_directory
        self._log = ExperienceLog(directory / EXPERIENCE)
        self._checkpoints = {
            checkpoint.state.step: checkpoint
            for checkpoint in CheckpointStore(directory / CHECKPOINTS, self.original.checkpoint.keep).lineage()
        }
        self._before = {step.step: step for step in lineage(read_lines(directory / METRICS, StepMetrics))}
        self._output = _free_directory(directory / REPLAYS / self.recipe.algorithm.preset)

    def run(self) -> Comparison:
        """Train, write a run's files, and compare. Raises ReplayError if the log or a checkpoint is missing."""
        start, steps = self._start(), self._range()
        seed_generators(self.recipe.run.seed)
        recipe = _on_one_rank(after_stages(self.recipe))
        backend = recipe_backend(recipe)
        if start is not None:
            backend.load(start.path)
        updater = recipe_updater(recipe, backend, Ranks.of(backend))
        if start is not None:
            updater.load(start.path)
        record, weights, metrics = JsonlSink(), [], []
        record.open(SinkRun(name=self.original.run.name, identity="", directory=self._output))
        started = time.monotonic()
        for step in replay(updater, self._log, steps):
            metrics.append(_write(record, step, steps.stop, time.monotonic() - started))
            weights += self._compared(backend, step.version.step + 1)
        summarize(self._output, {"max_lag_allowed": recipe.staleness.max_lag})
        backend.save(self._output / "model")
        return self._comparison(metrics, weights)

    def _start(self) -> Checkpoint | None:
        """Return the checkpoint to start from; None: the run's first weights."""
        if self.first_step and self.first_step not in self._checkpoints:
            raise ReplayError(
                f"There is no checkpoint at step {self.first_step} to start from; --from can be"
                f" {', '.join(map(str, (0, *self._checkpoints)))}."
            )
        return self._checkpoints.get(self.first_step) if self.first_step else None

    def _range(self) -> range:
        """Return the trained steps, as far as the log holds them."""
        stop = min(self._log.held_until(self.first_step), 1 + max(self._before, default=-1))
        if stop <= self.first_step:
            held = ", ".join(str(step) for step in self._checkpoints if self._log.held_until(step) > step)
            raise ReplayError(
                f"The experience log of {self.original.run_directory} does not hold step {self.first_step}"
                f" (checkpoint.log_bytes is its limit). --from can be: {held or 'none of the checkpoints'}."
            )
        return range(self.first_step, stop if self.steps is None else min(stop, self.first_step + self.steps))

    def _compared(self, backend: Backend, step: int) -> list[ComparedWeights]:
        if step not in self._checkpoints:
            return []
        path = self._checkpoints[step].path
        # Of a model with an adapter a checkpoint holds the adapter alone.
        folder, tensors = path, backend.named_tensors
        if getattr(backend, "trains_adapter", False):
            folder, tensors = path / FOLDER, backend.adapter_tensors  # type: ignore[attr-defined]
        return [
            ComparedWeights(
                step=step,
                checkpoint=str(path),
                replayed_digest=weights_digest(tensors()),
                original_digest=weights_digest(saved_tensors(folder)),
            )
        ]

    def _comparison(self, metrics: Sequence[StepMetrics], weights: Sequence[ComparedWeights]) -> Comparison:
        return Comparison(
            run=self.original.run.name,
            directory=str(self._output),
            changed=changed_settings(self.original, self.recipe),
            ranks=self.original.learner.processes,
            replayed=tuple(metrics),
            original=self._before,
            weights=tuple(weights),
        )


def _on_one_rank(recipe: Recipe) -> Recipe:
    """Return the recipe for this process, whose one rank holds the whole model, over however many it was split."""
    learner = msgspec.structs.replace(recipe.learner, processes=1, layout=LayoutConfig())
    return msgspec.structs.replace(recipe, learner=learner)


def _write(record: JsonlSink, step: TrainedStep, total_steps: int, time_s: float) -> StepMetrics:
    event = step_event(step, total_steps, time_s)
    record.write(event)
    metrics = event.metrics
    log.info("step %d/%d  loss %s  grad norm %s", metrics.step + 1, total_steps, metrics.loss, metrics.grad_norm)
    return metrics


def _free_directory(wanted: Path) -> Path:
    """Return the first of NAME, NAME-2, NAME-3 ... that does not exist."""
    number, path = 1, wanted
    while path.exists():
        number += 1
        path = wanted.with_name(f"{wanted.name}-{number}")
    return path
