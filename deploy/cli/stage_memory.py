"""The memory that each stage of a recipe takes on the learner's devices, and that scorers take on theirs."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from headway.broker.errors import ConfigError
from headway.deploy.recipe.recipe import Recipe
from headway.deploy.recipe.scorers import REWARD_MODEL, Scorer, scorers_of
from headway.deploy.recipe.stage_graph import REFERENCE
from headway.learner.backends import BACKENDS
from headway.learner.config import AdapterConfig, ModelConfig, StageConfig
from headway.learner.models.model import load_config
from headway.learner.models.shape import ModelShape, Parameter, adapter_parameters, shape_of
from headway.learner.objective.composition import needs_critic, needs_reference
from headway.learner.objective.update import prefix_sharing_of
from headway.learner.planning.estimates import scorer_bytes
from headway.learner.planning.memory import PlannedModel, RankMemory, plan_distillation, plan_memory, with_score_head
from headway.learner.stages.registry import DistillationOptions, options_of
from headway.rollout_workers.engines.gpus import gpus_of
from headway.rollout_workers.scorers.runtimes import abilities_of as runtime_abilities
from headway.rollout_workers.scorers.runtimes import gpus_of as gpus_of_runtime
from headway.rollout_workers.scorers.runtimes.abilities import cache_tokens
from headway.weightsync.transports.abilities import abilities_of, broadcast_device


class Shapes:
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


def stages_of(recipe: Recipe, shapes: Shapes, device_bytes: int | None) -> list[StageMemory]:
    """Plan the stages in their order, for devices of so much memory; None: the user names no size. Raises ConfigError
    for a model that cannot be read or an impossible layout."""
    return [_stage(recipe, stage, shapes, device_bytes) for stage in recipe.plan if not stage.is_left_out]


def learner_part(recipe: Recipe, device_bytes: int) -> float | None:
    """Return the part of a GPU of so much memory that the largest rank of the learner is planned to take beside
    workers; None for a recipe without workers or with a backend of its own. Raises ConfigError as `stages_of` does."""
    learner = next((stage for stage in recipe.plan if stage.has_workers), None)
    if learner is None or recipe.learner.backend not in BACKENDS:
        return None
    return _stage(recipe, learner, Shapes(recipe), device_bytes).largest_bytes / device_bytes


def largest_of(stages: list[StageMemory]) -> StageMemory:
    """Return the stage that decides whether the recipe fits; of equal ones the last, which is the run's own."""
    return max(reversed(stages), key=lambda stage: stage.largest_bytes)


def _stage(recipe: Recipe, stage: StageConfig, shapes: Shapes, device_bytes: int | None) -> StageMemory:
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


def _of_learner(recipe: Recipe, stage: StageConfig, planned: PlannedModel, shapes: Shapes) -> StageMemory:
    has_reference, critic = needs_reference(recipe.algorithm), _critic(recipe, shapes)
    planned = replace(planned, has_reference=has_reference, critic=critic, versions=_versions(recipe))
    models = ["policy", *(["reference"] if has_reference else []), *(["critic"] if critic else [])]
    return StageMemory(name=stage.name, models=", ".join(models), planned=planned, ranks=plan_memory(planned))


def _critic(recipe: Recipe, shapes: Shapes) -> ModelShape | None:
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


def scorers_memory(recipe: Recipe, shapes: Shapes) -> list[ScorerMemory]:
    """Plan the scorers' processes. A model that cannot be read is told, and hides no other one."""
    found = [_scorer(recipe, scorer, shapes) for scorer in scorers_of(recipe)]
    by_gpu = Counter[str]()
    for scorer in found:
        by_gpu.update(dict.fromkeys(scorer.gpus, scorer.total or 0))
    return [
        replace(one, shared=max((by_gpu[gpu] for gpu in one.gpus), default=one.total)) if one.total else one
        for one in found
    ]


def _scorer(recipe: Recipe, scorer: Scorer, shapes: Shapes) -> ScorerMemory:
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
