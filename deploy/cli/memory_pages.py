"""The pages that `headway plan-memory` prints: each rank's memory, and the setting that would save most of it."""

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from broker.errors import ConfigError
from deploy.recipe.loading import with_overrides
from deploy.recipe.recipe import Recipe
from deploy.tables import WholeWords
from deploy.terminal import styled
from learner.models.model import load_config
from learner.models.shape import shape_of
from learner.objective.composition import needs_critic, needs_reference
from learner.planning.memory import plan_memory
from learner.planning.planned import PlannedModel, RankMemory
from rollout_workers.engines.gpus import gpus_of
from weightsync.transports.abilities import abilities_of, broadcast_device

GB, MB = 10**9, 10**6
USABLE = 0.95
"""The part of a device's memory that can be used. The rest goes to CUDA's context and to gaps between tensors."""

NOTE = """
Parameters, gradients and optimizer state are exact, the rest is an estimate of the peak. A sequence longer than
learner.micro_batch_tokens is a micro-batch of its own, and takes more."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """One changed setting, and the bytes of the largest rank with it."""

    setting: str
    """The setting as an override: `learner.compute.recompute=full`."""
    largest_bytes: int


@dataclass(frozen=True, kw_only=True)
class Turns:
    """Memory that a learner keeps while the engines of a colocated run generate, in bytes."""

    host: int
    """The state of the largest rank, in host memory."""
    device: int
    """Published weights, on the GPU that keeps most of them."""


@dataclass(frozen=True, kw_only=True)
class MemoryReport:
    """The memory of a learner's ranks, as far as it is known before the learner starts."""

    planned: PlannedModel
    ranks: list[RankMemory]
    """The ranks, largest first."""
    activations: dict[str, int]
    """Bytes on the rank that has most activations, by `learner.compute.recompute`."""
    changes: list[Change]
    """Changes that save memory, best first."""
    device_bytes: int | None
    turns: Turns | None = None
    """None: learner and engines have devices of their own."""

    @property
    def fits(self) -> bool | None:
        """Whether the largest rank fits; None if no device's size is known."""
        return None if self.device_bytes is None else is_enough(self.device_bytes, self.ranks[0].total)


def is_enough(device_bytes: int, total: int) -> bool:
    return total <= USABLE * device_bytes


def report(recipe: Recipe, device_gb: float | None = None) -> MemoryReport:
    """Plan the recipe's memory. Raises ConfigError if the model cannot be read or the layout is impossible."""
    planned = PlannedModel(
        shape=shape_of(load_config(recipe.model)),
        learner=recipe.learner,
        dtype=recipe.model.dtype,
        has_reference=needs_reference(recipe.algorithm),
        has_critic=needs_critic(recipe.algorithm),
        versions=_versions(recipe),
    )
    ranks = plan_memory(planned)
    return MemoryReport(
        planned=planned,
        ranks=ranks,
        activations={how: _activations(recipe, planned, how) for how in ("none", "selective", "full")},
        changes=sorted(_changes(recipe, planned, ranks[0].total), key=lambda change: change.largest_bytes),
        device_bytes=None if device_gb is None else round(device_gb * GB),
        turns=_turns(ranks) if recipe.run.is_colocated else None,
    )


def _versions(recipe: Recipe) -> dict[int, int]:
    """Return by rank how many versions its GPU keeps: the first rank's GPU has the version that is sent, and the first
    rank of each colocated engine the version that has come."""
    weights, each = recipe.weights, gpus_of(recipe.engine)
    sent = [0] if broadcast_device(weights, abilities_of(weights.transport)) == "cuda" else []
    is_beside = recipe.run.is_colocated and weights.staging == "device"
    return Counter([*sent, *(engine * each for engine in range(recipe.workers.count) if is_beside)])


def _turns(ranks: list[RankMemory]) -> Turns:
    return Turns(
        host=max(held.parameters + held.optimizer + held.other_models for held in ranks),
        device=max(held.published for held in ranks),
    )


def _activations(recipe: Recipe, planned: PlannedModel, recompute: str) -> int:
    learner = with_overrides(recipe, [f"learner.compute.recompute={recompute}"]).learner
    return max(held.activations for held in plan_memory(replace(planned, learner=learner)))


def _changes(recipe: Recipe, planned: PlannedModel, largest: int) -> Iterator[Change]:
    for setting in _settings(recipe):
        try:
            changed = with_overrides(recipe, setting.split())
            total = plan_memory(replace(planned, learner=changed.learner, versions=_versions(changed)))[0].total
        except ConfigError:
            continue  # this model, number of ranks or transport does not allow the setting
        if total < largest:
            yield Change(setting=setting, largest_bytes=total)


def _settings(recipe: Recipe) -> Iterator[str]:
    """Yield overrides that may save memory, one at a time."""
    learner = recipe.learner
    yield from ("learner.compute.recompute=selective", "learner.compute.recompute=full")
    yield "learner.compute.offload_optimizer=true"
    yield "weights.staging=host"
    yield f"learner.micro_batch_tokens={max(1, learner.micro_batch_tokens // 2)}"
    yield f"learner.processes={2 * learner.processes}"
    for size in ("tensor", "pipeline", "context", "expert"):
        yield f"learner.layout.{size}={2 * getattr(learner.layout, size)}"


def as_builtins(found: MemoryReport) -> dict[str, Any]:
    """Return the report for JSON, with all numbers in bytes."""
    planned, learner = found.planned, found.planned.learner
    return {
        "parameters": planned.shape.num_parameters,
        "backend": learner.backend,
        "dtype": planned.dtype,
        "processes": learner.processes,
        "replicas": planned.replicas,
        "micro_batch_tokens": learner.micro_batch_tokens,
        "recompute": learner.compute.recompute,
        "ranks": [asdict(held) | {"total": held.total} for held in found.ranks],
        "activations": found.activations,
        "changes": [asdict(change) for change in found.changes],
        "device_bytes": found.device_bytes,
        "fits": found.fits,
        "turns": asdict(found.turns) if found.turns else None,
    }


def page(found: MemoryReport) -> RenderableType:
    """Return the report for people: largest ranks first, equal ranks in one line."""
    return Group(
        styled(_headline(found)),
        _ranks_table(found.ranks),
        _activations_line(found),
        *_turns_line(found),
        *_verdict(found),
        styled(NOTE),
    )


def _headline(found: MemoryReport) -> str:
    planned, learner = found.planned, found.planned.learner
    sizes = [f"{key} {size}" for key, size in _sizes(planned).items() if size > 1]
    parts = [
        f"{planned.shape.num_parameters:,} parameters in {planned.dtype}",
        f"{learner.backend} on {learner.processes} rank{'s' * (learner.processes > 1)}"
        f" ({', '.join([*sizes, f'replicas {planned.replicas}'])})",
        f"{learner.micro_batch_tokens:,} tokens a micro-batch",
    ]
    return ", ".join(parts)


def _sizes(planned: PlannedModel) -> dict[str, int]:
    layout = planned.learner.layout
    return {name: getattr(layout, name) for name in layout.__struct_fields__}


def _ranks_table(ranks: list[RankMemory]) -> WholeWords:
    table = Table(box=SIMPLE_HEAD)
    columns = [field.name for field in fields(RankMemory) if field.name not in ("rank", "part")]
    used = [name for name in (*columns, "total") if any(getattr(held, name) for held in ranks)]
    for heading in ("ranks", "of the model", *used):
        justify: Literal["left", "right"] = "right" if heading in used else "left"
        table.add_column(heading.replace("_", " "), justify=justify, overflow="fold")
    for same, members in itertools.groupby(ranks, key=lambda held: replace(held, rank=0)):
        numbers = [held.rank for held in members]
        table.add_row(_spans(numbers), same.part, *(_amount(getattr(same, name)) for name in used))
    return WholeWords(table)


def _spans(numbers: list[int]) -> str:
    """Return ascending numbers in the form 0-3, 6."""
    places = itertools.count()
    runs = [list(run) for _, run in itertools.groupby(numbers, key=lambda number: number - next(places))]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _activations_line(found: MemoryReport) -> Text:
    now = found.planned.learner.compute.recompute
    parts = [f"{how} {_amount(number)}" for how, number in found.activations.items()]
    return styled(f"Activations by learner.compute.recompute: {', '.join(parts)}. The recipe's is {now}.")


def _turns_line(found: MemoryReport) -> Iterator[Text]:
    if found.turns is None:
        return
    kept = found.turns.device
    yield styled(
        f"While engines generate, {_amount(found.turns.host)} of the largest rank lie in host memory. A GPU keeps up to"
        f" {_amount(kept)} of published weights; besides there are CUDA's contexts, and an engine's graphs while it"
        " sleeps."
    )
    if found.device_bytes is not None:
        left = max(0, round(USABLE * found.device_bytes) - kept)
        yield styled(f"That leaves an engine {_amount(left)} of {_amount(found.device_bytes)}.")


def _verdict(found: MemoryReport) -> Iterator[Text | WholeWords]:
    if found.device_bytes is not None:
        does, style = ("fits", "green") if found.fits else ("does not fit", "red")
        device = f"a device of {_amount(found.device_bytes)}, of which {USABLE:.0%} can be used"
        yield styled((f"The largest rank {does} {device}.", style))
    if found.changes and not found.fits:
        yield _changes_table(found)


def _changes_table(found: MemoryReport) -> WholeWords:
    table = Table("one change at a time", "largest rank", "saved", box=SIMPLE_HEAD)
    for change in found.changes:
        fits = found.device_bytes is not None and is_enough(found.device_bytes, change.largest_bytes)
        saved = found.ranks[0].total - change.largest_bytes
        table.add_row(change.setting, _amount(change.largest_bytes) + (" fits" if fits else ""), _amount(saved))
    return WholeWords(table)


def _amount(number: int) -> str:
    return f"{number / GB:,.2f} GB" if number >= GB / 10 else f"{number / MB:,.2f} MB"
