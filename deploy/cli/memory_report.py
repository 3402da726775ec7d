"""The report of `headway plan-memory`: each rank's memory in each stage, the scorers' memory, and the setting that
would save most.
"""

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from headway.broker.errors import ConfigError
from headway.deploy.recipe.pools import REWARD_MODEL, Scorer, scorers_of
from headway.deploy.recipe.recipe import Recipe
from headway.deploy.recipe.resolve import with_overrides
from headway.deploy.recipe.stage_graph import REFERENCE
from headway.deploy.terminal import WordWrapTable, headed_table, styled
from headway.learner.backends import BACKENDS
from headway.learner.config import AdapterConfig, ModelConfig, StageConfig
from headway.learner.models.pretrained import load_config
from headway.learner.models.shape import ModelShape, Parameter, adapter_parameters, shape_of
from headway.learner.objective.composition import needs_critic, needs_reference
from headway.learner.objective.update import prefix_sharing_of
from headway.learner.planning.memory import (
    PlannedModel,
    RankMemory,
    plan_distillation,
    plan_memory,
    scorer_bytes,
    with_score_head,
)
from headway.learner.stages.registry import DistillationOptions, options_of
from headway.rollout_workers.engines import gpus_of
from headway.rollout_workers.scorers.runtimes import abilities_of as runtime_abilities
from headway.rollout_workers.scorers.runtimes import cache_tokens
from headway.rollout_workers.scorers.runtimes import gpus_of as gpus_of_runtime
from headway.weightsync.transports.base import abilities_of, broadcast_device


class ModelShapes:
    """The shapes of a recipe's models, each of which is read once."""

    def __init__(self, recipe: Recipe) -> None:
        """Raises ConfigError if the policy's cannot be read."""
        self.policy = shape_of(load_config(recipe.model))
        self._others: dict[str, ModelShape] = {}
        self._adapters: dict[AdapterConfig, tuple[Parameter, ...]] = {}

    def adapter_of(self, recipe: Recipe, stage: StageConfig) -> tuple[Parameter, ...]:
        """Return the parameters of the adapter that the stage trains; none if it trains the whole model."""
        adapter = recipe.adapter_in(stage)
        if adapter is None:
            return ()
        if adapter not in self._adapters:
            self._adapters[adapter] = adapter_parameters(load_config(recipe.model), adapter)
        return self._adapters[adapter]

    def quantized_in(self, recipe: Recipe, stage: StageConfig) -> dict[str, int]:
        """Return the bytes of the weights that the stage holds in few bits, by name."""
        from headway.learner.backends.quantization import quantized_weights

        adapter = recipe.adapter_in(stage)
        if adapter is None or adapter.quantize_base == "none":
            return {}
        return quantized_weights(load_config(recipe.model), adapter.quantize_base)

    def at(self, path: str) -> ModelShape:
        """Return the shape of the model at this path; `stage:NAME` has the policy's. Raises ConfigError."""
        if path.startswith(REFERENCE):
            return self.policy
        if path not in self._others:
            self._others[path] = shape_of(load_config(ModelConfig(path=path)))
        return self._others[path]


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """The memory of the learner's ranks at the largest moment of a stage."""

    name: str
    models: str
    """The models that are on the ranks then, in words."""
    planned: PlannedModel
    """The model that the stage trains."""
    ranks: list[RankMemory]
    """The ranks, largest first."""

    @property
    def largest_bytes(self) -> int:
        return self.ranks[0].total


@dataclass(frozen=True, kw_only=True)
class ScorerMemory:
    """The memory of one process of a scorer."""

    name: str
    path: str
    device: str
    gpus: list[str]
    """The GPUs of its processes; empty where they are not named."""
    total: int | None
    """None: the model's configuration cannot be read."""
    problem: str = ""
    """The reason for that."""
    shared: int | None = None
    """All that scorers take together on the fullest of these GPUs."""


def stages_of(recipe: Recipe, shapes: ModelShapes, device_bytes: int | None) -> list[StageMemory]:
    """Plan the stages in their order, for devices of so much memory; None: the user names no size. Raises ConfigError
    for a model that cannot be read or an impossible layout."""
    return [_stage(recipe, stage, shapes, device_bytes) for stage in recipe.plan if not stage.is_left_out]


def learner_part(recipe: Recipe, device_bytes: int) -> float | None:
    """Return the part of a GPU of so much memory that the largest rank of the learner is planned to take beside
    workers; None for a recipe without workers or with a backend of its own. Raises ConfigError as `stages_of` does."""
    learner = next((stage for stage in recipe.plan if stage.has_workers), None)
    if learner is None or recipe.learner.backend not in BACKENDS:
        return None
    return _stage(recipe, learner, ModelShapes(recipe), device_bytes).largest_bytes / device_bytes


def largest_of(stages: list[StageMemory]) -> StageMemory:
    """Return the stage that decides whether the recipe fits; of equal ones the last, which is the run's own."""
    return max(reversed(stages), key=lambda stage: stage.largest_bytes)


def _stage(recipe: Recipe, stage: StageConfig, shapes: ModelShapes, device_bytes: int | None) -> StageMemory:
    planned = PlannedModel(
        shape=shapes.policy,
        learner=recipe.learner,
        dtype=recipe.model.dtype,
        adapter=shapes.adapter_of(recipe, stage),
        quantized=shapes.quantized_in(recipe, stage),
        sharing=_sharing(recipe, stage),
        device_bytes=device_bytes,
    )
    if stage.has_workers:
        return _of_learner(recipe, stage, planned, shapes)
    if stage.kind == REWARD_MODEL:
        planned = with_score_head(planned)
        return StageMemory(name=stage.name, models="reward model", planned=planned, ranks=plan_memory(planned))
    trained = StageMemory(name=stage.name, models="policy", planned=planned, ranks=plan_memory(planned))
    options = options_of(stage, f"stages.{stage.name}")
    if not isinstance(options, DistillationOptions):
        return trained
    ranks = plan_distillation(planned, shapes.at(options.teacher))
    taught = StageMemory(name=stage.name, models="policy, teacher before the first step", planned=planned, ranks=ranks)
    return largest_of([taught, trained])


def _sharing(recipe: Recipe, stage: StageConfig) -> int:
    """Return how many sequences of a row share tokens: a group's samples, or of a record the two that go together."""
    if prefix_sharing_of(recipe.learner) == "never" or stage.phases:
        return 1
    return recipe.learner.group_size if stage.has_workers else 2


def _of_learner(recipe: Recipe, stage: StageConfig, planned: PlannedModel, shapes: ModelShapes) -> StageMemory:
    has_reference, critic = needs_reference(recipe.algorithm), _critic(recipe, shapes)
    planned = replace(planned, has_reference=has_reference, critic=critic, versions=_versions(recipe))
    models = ["policy", *(["reference"] if has_reference else []), *(["critic"] if critic else [])]
    return StageMemory(name=stage.name, models=", ".join(models), planned=planned, ranks=plan_memory(planned))


def _critic(recipe: Recipe, shapes: ModelShapes) -> ModelShape | None:
    if not needs_critic(recipe.algorithm):
        return None
    path = recipe.algorithm.critic.path
    return shapes.at(path) if path else shapes.policy


def _versions(recipe: Recipe) -> dict[int, int]:
    """Return by rank how many versions its GPU keeps: the first rank's GPU has the version that is sent, and the first
    rank of each colocated engine the version that has come."""
    weights, each = recipe.weights, gpus_of(recipe.engine)
    sent = [0] if broadcast_device(weights, abilities_of(weights.transport)) == "cuda" else []
    is_beside = recipe.run.is_colocated and weights.staging == "device"
    return Counter([*sent, *(engine * each for engine in range(recipe.workers.count) if is_beside)])


def scorers_memory(recipe: Recipe, shapes: ModelShapes) -> list[ScorerMemory]:
    """Plan the scorers' processes. A model that cannot be read is told, and hides no other one."""
    found = [_scorer(recipe, scorer, shapes) for scorer in scorers_of(recipe)]
    by_gpu = Counter[str]()
    for scorer in found:
        by_gpu.update(dict.fromkeys(scorer.gpus, scorer.total or 0))
    return [
        replace(one, shared=max((by_gpu[gpu] for gpu in one.gpus), default=one.total)) if one.total else one
        for one in found
    ]


def _scorer(recipe: Recipe, scorer: Scorer, shapes: ModelShapes) -> ScorerMemory:
    config = recipe.scorers
    gpus = list(_gpus(recipe)) if config.device != "cpu" else []
    one = ScorerMemory(name=scorer.name, path=scorer.path, device=config.device, gpus=gpus, total=None)
    try:
        shape = shapes.at(scorer.path)
    except ConfigError as error:
        return replace(one, problem=str(error))
    return replace(one, total=_bytes(recipe, scorer, shape) // gpus_of_runtime(config.engine))


def _bytes(recipe: Recipe, scorer: Scorer, shape: ModelShape) -> int:
    """Return the bytes of a scorer's model, on all GPUs of its process together."""
    config, abilities = recipe.scorers, runtime_abilities(recipe.scorers.engine)
    step = abilities.step_tokens.get(scorer.kind)
    cache = cache_tokens(config.batch_tokens, recipe.engine.max_model_len) if abilities.keeps_cache else 0
    return scorer_bytes(
        shape,
        config.dtype,
        step or config.batch_tokens,
        has_vocabulary=scorer.kind != REWARD_MODEL,
        logits_tokens=step,
        cache_tokens=cache,
    )


def _gpus(recipe: Recipe) -> Iterator[str]:
    devices = recipe.scorers.devices
    named = (str(devices[number % len(devices)]) for number in range(recipe.scorers.count) if devices)
    yield from dict.fromkeys(gpu for one in named for gpu in one.split(","))


GB, MB = 10**9, 10**6
USABLE = 0.95
"""The part of a device's memory that can be used. The rest goes to CUDA's context and to gaps between tensors."""

NOTE = """
Parameters, gradients and optimizer state are exact, the rest is an estimate of the peak. A sequence longer than
learner.micro_batch_tokens is a micro-batch of its own, and takes more."""


@dataclass(frozen=True, kw_only=True)
class SettingChange:
    """One changed setting, and the bytes of the largest rank with it."""

    setting: str
    """The setting as an override: `learner.compute.recompute=full`."""
    largest_bytes: int


@dataclass(frozen=True, kw_only=True)
class ColocatedMemory:
    """Memory that a learner keeps while the engines of a colocated run generate, in bytes."""

    host: int
    """The state of the largest rank, in host memory."""
    device: int
    """Published weights, on the GPU that keeps most of them."""


@dataclass(frozen=True, kw_only=True)
class MemoryReport:
    """The memory of a learner's ranks, as far as it is known before the learner starts, and of its scorers."""

    planned: PlannedModel
    """The model that the largest stage trains."""
    ranks: list[RankMemory]
    """The ranks in the largest stage, largest first."""
    stages: list[StageMemory]
    """The stages in their order."""
    scorers: list[ScorerMemory]
    activations: dict[str, int]
    """Bytes on the rank that has most activations, by `learner.compute.recompute`."""
    changes: list[SettingChange]
    """Changes that save memory, best first."""
    device_bytes: int | None
    turns: ColocatedMemory | None = None
    """None: learner and engines have devices of their own."""

    @property
    def fits(self) -> bool | None:
        """Whether the largest rank fits, and each scorer on a GPU; None if no device's size is known."""
        size = self.device_bytes
        return None if size is None else is_enough(size, self.ranks[0].total) and self.scorers_fit(size)

    def scorers_fit(self, size: int) -> bool:
        """Whether the scorers on GPUs fit devices of so many bytes. One whose model cannot be read counts as 0."""
        return all(is_enough(size, scorer.shared or 0) for scorer in self.scorers if scorer.device != "cpu")


def is_enough(device_bytes: int, total: int) -> bool:
    return total <= USABLE * device_bytes


def report(recipe: Recipe, device_gb: float | None = None) -> MemoryReport:
    """Plan the memory of the recipe's stages, the largest of which decides, and of its scorers. Raises ConfigError if
    the model cannot be read or the layout is impossible."""
    shapes, device_bytes = ModelShapes(recipe), None if device_gb is None else round(device_gb * GB)
    stages = stages_of(recipe, shapes, device_bytes)
    largest = largest_of(stages)
    return MemoryReport(
        planned=largest.planned,
        ranks=largest.ranks,
        stages=stages,
        scorers=scorers_memory(recipe, shapes),
        activations={how: _activations(recipe, largest.planned, how) for how in ("none", "selective", "full")},
        changes=sorted(_changes(recipe, shapes, largest), key=lambda change: change.largest_bytes),
        device_bytes=device_bytes,
        turns=_turns(stages[-1].ranks) if recipe.run.is_colocated and recipe.has_learner else None,
    )


def _turns(ranks: list[RankMemory]) -> ColocatedMemory:
    return ColocatedMemory(
        host=max(held.parameters + held.optimizer + held.other_models for held in ranks),
        device=max(held.published for held in ranks),
    )


def _activations(recipe: Recipe, planned: PlannedModel, recompute: str) -> int:
    learner = with_overrides(recipe, [f"learner.compute.recompute={recompute}"]).learner
    return max(held.activations for held in plan_memory(replace(planned, learner=learner)))


def _changes(recipe: Recipe, shapes: ModelShapes, largest: StageMemory) -> Iterator[SettingChange]:
    for setting in _settings(recipe):
        try:
            changed = with_overrides(recipe, setting.split())
            total = largest_of(stages_of(changed, shapes, largest.planned.device_bytes)).largest_bytes
        except ConfigError:
            continue  # this model, number of ranks or transport does not allow the setting
        if total < largest.largest_bytes:
            yield SettingChange(setting=setting, largest_bytes=total)


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
        "stages": [
            {"name": stage.name, "models": stage.models, "largest_bytes": stage.largest_bytes} for stage in found.stages
        ],
        "scorers": [asdict(scorer) for scorer in found.scorers],
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
        *_stages_table(found),
        _ranks_table(found.ranks),
        _activations_line(found),
        *_turns_line(found),
        *_scorer_lines(found),
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


def _stages_table(found: MemoryReport) -> Iterator[WordWrapTable]:
    """Yield a line for each stage, where there are several, or other models take part."""
    if len(found.stages) < 2 and all(stage.models == "policy" for stage in found.stages):
        return
    table = headed_table("stage", "models on the learner's devices", "largest rank")
    for stage in found.stages:
        table.add_row(stage.name, stage.models, _amount(stage.largest_bytes))
    yield WordWrapTable(table)


def _scorer_lines(found: MemoryReport) -> Iterator[Text]:
    for scorer in found.scorers:
        where = f"GPU {', '.join(scorer.gpus)}" if scorer.gpus else "a GPU" if scorer.device != "cpu" else "a CPU"
        if scorer.total is None:
            yield styled(f"Scorer {scorer.name} on {where}: {scorer.path} is not known. {scorer.problem}")
            continue
        shared = scorer.shared or scorer.total
        beside = f"; with the other scorers of this GPU {_amount(shared)}" if shared > scorer.total else ""
        yield styled(f"Scorer {scorer.name} on {where}: {scorer.path} takes {_amount(scorer.total)}{beside}.")


def _ranks_table(ranks: list[RankMemory]) -> WordWrapTable:
    columns = [field.name for field in fields(RankMemory) if field.name not in ("rank", "part")]
    used = [name for name in (*columns, "total") if any(getattr(held, name) for held in ranks)]
    table = headed_table("ranks", "of the model", numbers=[name.replace("_", " ") for name in used])
    for same, members in itertools.groupby(ranks, key=lambda held: replace(held, rank=0)):
        numbers = [held.rank for held in members]
        table.add_row(_spans(numbers), same.part, *(_amount(getattr(same, name)) for name in used))
    return WordWrapTable(table)


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


def _verdict(found: MemoryReport) -> Iterator[Text | WordWrapTable]:
    if found.device_bytes is not None:
        size = found.device_bytes
        does, style = ("fits", "green") if is_enough(size, found.ranks[0].total) else ("does not fit", "red")
        device = f"a device of {_amount(size)}, of which {USABLE:.0%} can be used"
        yield styled((f"The largest rank {does} {device}.", style))
        if not found.scorers_fit(size):
            yield styled(
                ("The scorers do not fit it: name more GPUs in scorers.devices, or take smaller models.", "red")
            )
    if found.changes and not found.fits:
        yield _changes_table(found)


def _changes_table(found: MemoryReport) -> WordWrapTable:
    table = headed_table("one change at a time", "largest rank", "saved")
    for change in found.changes:
        fits = found.device_bytes is not None and is_enough(found.device_bytes, change.largest_bytes)
        saved = found.ranks[0].total - change.largest_bytes
        table.add_row(change.setting, _amount(change.largest_bytes) + (" fits" if fits else ""), _amount(saved))
    return WordWrapTable(table)


def _amount(number: int) -> str:
    return f"{number / GB:,.2f} GB" if number >= GB / 10 else f"{number / MB:,.2f} MB"
