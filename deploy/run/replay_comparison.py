"""Compares a replay with the run that it replays: the settings, every step, and the weights."""

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from rich.box import SIMPLE_HEAD
from rich.table import Table

from headway.broker.schema.metrics import StepMetrics
from headway.deploy.recipe.recipe import Recipe

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


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the path and value of every setting below `value`; a list counts as one value."""
    if not isinstance(value, dict):
        yield path, value
        return
    for key, below in value.items():
        yield from leaves(below, f"{path}.{key}".lstrip("."))


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
    table = Table(title=f"Replay of {comparison.run}", title_justify="left", box=SIMPLE_HEAD)
    for name in ("step", "loss", "grad norm", "reward", *(ALGORITHM_COLUMNS[name] for name in reported)):
        table.add_column(name, justify="right")
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
