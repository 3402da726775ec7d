"""Finds contradictions in a recipe whose values are all valid alone."""

import re
from collections.abc import Collection, Iterator
from itertools import chain

from headway.broker.errors import ConfigError
from headway.broker.keys import is_name
from headway.broker.user_code.kinds import did_you_mean, unknown_kind, unknown_option
from headway.learner.algorithm_config import ADVANTAGES, CORRECTIONS, OBJECTIVES, AlgorithmConfig
from headway.learner.backends import BACKENDS
from headway.learner.backends import abilities_of as backend_abilities
from headway.learner.config import EXAMPLES, PROMPTS, STAGES, LearnerConfig, StageConfig
from headway.learner.models.parallel_layout import check_ranks, check_splits
from headway.learner.stages.registry import options_of
from headway.rollout_workers.config import READERS, REWARDS, EngineConfig
from headway.rollout_workers.engines import ENGINES, abilities_of, check_options, visible_devices
from headway.rollout_workers.environments import check_environment
from headway.rollout_workers.scorers.runtimes import RUNTIMES
from headway.rollout_workers.scorers.runtimes import check_options as check_runtime_options
from headway.weightsync.config import WeightsConfig
from headway.weightsync.transports.base import TRANSPORTS
from headway.weightsync.transports.base import abilities_of as transport_abilities

from .adapter_support import impossible_adapters
from .limits import beyond_limits
from .metric_sinks import check_sinks
from .placement import impossible_turns
from .recipe import LAUNCHERS, Recipe
from .scorers import impossible_scorers
from .stage_graph import impossible_names, impossible_references, impossible_starts
from .worker_pools import MAIN, impossible_ray_roles, pools_of

SCHEMES = ("redis://", "rediss://", "redis+cluster://", "rediss+cluster://", "unix://")
DEVICES = ("cpu", "cuda")
TORCH_DEVICE = re.compile(r"(cpu|cuda|mps|xpu)(:\d+)?")
ROWS = ("jsonl", "parquet", "datasets")
"""Kinds of prompts that are rows, all of which can be read before a run starts."""
GROUP_ADVANTAGES = ("group_mean_std", "group_mean", "leave_one_out", "best_against_worst")


def check_values(recipe: Recipe, source: str) -> None:
    """Raise ConfigError for the first contradiction."""
    _check_kinds(recipe, source)
    for complaint in chain(beyond_limits(recipe), _contradictions(recipe)):
        raise ConfigError(f"{source}: {complaint}")


def check_engine(engine: EngineConfig, where: str) -> None:
    """Raise ConfigError for an engine that is unknown, or does not have these options. `where`: its place in the
    recipe."""
    check_engine_kind(engine, where)
    check_options(engine, abilities_of(engine), where)


def check_engine_kind(engine: EngineConfig, where: str) -> None:
    """Raise ConfigError for an unknown engine. A user's own engine is looked for where workers run."""
    _check_kind(engine.kind, ENGINES, f"{where}.kind")


def _check_kinds(recipe: Recipe, source: str) -> None:
    """Check the kinds now, before prompts are read or workers start."""
    check_engine(recipe.engine, f"{source}: engine")
    for index, pool in enumerate(pools_of(recipe, source)):
        check_engine(pool.recipe.engine, f"{source}: workers.pools[{index}].engine")
    _check_kind(recipe.scorers.engine.kind, RUNTIMES, f"{source}: scorers.engine.kind")
    check_runtime_options(recipe.scorers.engine, f"{source}: scorers.engine")
    _check_kind(recipe.weights.transport, TRANSPORTS, f"{source}: weights.transport")
    if recipe.has_prompts:
        _check_kind(recipe.prompts.kind, PROMPTS, f"{source}: prompts.kind")
    _check_kind(recipe.launcher.kind, LAUNCHERS, f"{source}: launcher.kind")
    _check_kind(recipe.learner.backend, BACKENDS, f"{source}: learner.backend")
    _check_parts_of_loss(recipe.algorithm, f"{source}: algorithm")
    for phase in recipe.sft.phases:
        _check_kind(phase.kind, EXAMPLES, f"{source}: sft.phases.kind")
    for index, stage in enumerate(recipe.stages):
        _check_stage(stage, f"{source}: stages[{index}]")
    for reward in recipe.rewards:
        _check_kind(reward.kind, REWARDS, f"{source}: rewards.kind")
    check_sinks(recipe.metrics, source)
    check_environment(recipe.environment, source)


def _check_parts_of_loss(algorithm: AlgorithmConfig, where: str) -> None:
    _check_kind(algorithm.advantage.kind, ADVANTAGES, f"{where}.advantage.kind")
    _check_kind(algorithm.objective.kind, OBJECTIVES, f"{where}.objective.kind")
    for index, correction in enumerate(algorithm.corrections):
        _check_kind(correction.kind, CORRECTIONS, f"{where}.corrections[{index}].kind")


def _check_stage(stage: StageConfig, where: str) -> None:
    """Check a stage's kind and options. Those of a user's own stage are checked where it is imported and runs."""
    _check_kind(stage.kind, STAGES, f"{where}.kind")
    is_over_records = options_of(stage, where) is not None
    if stage.kind in STAGES and not is_over_records and stage.options:
        known = ("phases",) if stage.kind == "sft" else ()
        raise unknown_option(next(iter(stage.options)), known, where, of=f"kind={stage.kind}")
    for phase in stage.phases:
        _check_kind(phase.kind, EXAMPLES, f"{where}.phases.kind")


def _check_kind(kind: str, known: Collection[str], where: str) -> None:
    if kind not in known and ":" not in kind:
        raise unknown_kind(kind, known, where)


def _contradictions(recipe: Recipe) -> Iterator[str]:
    learner, sampling, engine = recipe.learner, recipe.sampling, recipe.engine
    yield from _impossible_layouts(learner)
    yield from _impossible_stages(recipe)
    yield from _missing_abilities(recipe)
    yield from impossible_adapters(recipe)
    if not recipe.model.path and recipe.model.random is None:
        yield "no model: set model.path to a Hugging Face directory or id, or describe model.random."
    if learner.groups_per_step % learner.updates_per_step:
        yield (
            f"learner.groups_per_step ({learner.groups_per_step}) must be a multiple of"
            f" learner.updates_per_step ({learner.updates_per_step})."
        )
    if learner.group_size == 1 and recipe.algorithm.advantage.kind in GROUP_ADVANTAGES:
        yield (
            f"learner.group_size is 1, and algorithm.advantage.kind={recipe.algorithm.advantage.kind}"
            " compares the samples of one prompt with each other: every advantage would be 0. Set"
            " learner.group_size to 2 or more."
        )
    if sampling.max_new_tokens >= engine.max_model_len:
        yield (
            f"sampling.max_new_tokens ({sampling.max_new_tokens}) leaves no room for a prompt in"
            f" engine.max_model_len ({engine.max_model_len}); lower the one or raise the other."
        )
    yield from _impossible_transfers(recipe)
    yield from _impossible_pools(recipe)
    yield from _impossible_shares(recipe)
    if recipe.run.is_colocated:
        yield from impossible_turns(recipe)
    yield from _useless_archives(recipe.weights)
    yield from _idle_skips(recipe)
    yield from _impossible_evaluations(recipe)
    if recipe.launcher.kind == "ray":
        yield from impossible_ray_roles(recipe)
    yield from _unmeasured_checkpoints(recipe)
    yield from impossible_scorers(recipe)
    if 2 * recipe.workers.heartbeat_s > recipe.broker.lease_ttl_s:
        yield (
            f"workers.heartbeat_s ({recipe.workers.heartbeat_s:g}) must be at most half of broker.lease_ttl_s"
            f" ({recipe.broker.lease_ttl_s:g}), or leases expire under healthy workers."
        )
    deadlines = [(f"rewards[{index}].deadline_s", one.deadline_s) for index, one in enumerate(recipe.rewards)]
    for key, deadline_s in (
        *deadlines,
        ("environment.deadline_s", recipe.environment.deadline_s),
        ("teacher.deadline_s", recipe.teacher.deadline_s),
    ):
        if 2 * deadline_s > recipe.broker.lease_hold_s:
            yield (
                f"{key} ({deadline_s:g}) must be at most half of broker.lease_hold_s"
                f" ({recipe.broker.lease_hold_s:g}), or a sample goes to another worker while its call is repeated."
            )
    if not recipe.broker.is_embedded and not recipe.broker.url.startswith(SCHEMES):
        yield (
            f"broker.url is {_shown(recipe.broker.url)!r}; expected embedded, redis://host:port, rediss://host:port,"
            " redis+cluster://host:port, rediss+cluster://host:port or unix:///path."
        )
    if [sink.kind for sink in recipe.metrics].count("jsonl") != 1:
        yield (
            "metrics must have one sink of kind jsonl: it is the run's record, of which summary.json, plots and"
            " replays are made. Name others beside it: metrics=[{kind: jsonl}, {kind: package.module:Class}]."
        )
    if recipe.staleness.min_group_size > learner.group_size:
        yield (
            f"staleness.min_group_size ({recipe.staleness.min_group_size}) is above learner.group_size"
            f" ({learner.group_size}): no group could ever be trimmed."
        )


def _impossible_stages(recipe: Recipe) -> Iterator[str]:
    if recipe.stages and recipe.sft.phases:
        yield "both sft.phases and stages say what the warm-up is. Move the phases to stages: [{kind: sft, phases}]."
    for index, stage in enumerate(recipe.stages):
        if stage.phases and stage.kind != "sft":
            yield f"stages[{index}].phases are of kind=sft, and this stage is {stage.kind}. Remove them."
        if stage.phases and stage.options:
            yield f"stages[{index}] has phases and options. Give it one of both: options name records, phases examples."
        if stage.has_workers and index < len(recipe.stages) - 1:
            yield (
                f"stages[{index}] is {stage.kind}, which ends the run, and stages[{index + 1}] follows it. Move it to"
                " the end, and train on in a run of its own, from model.path=CHECKPOINT."
            )
    yield from impossible_names(recipe.plan)
    yield from impossible_starts(recipe.plan)
    yield from impossible_references(recipe)
    yield from _missing_prompts(recipe)
    if all(stage.is_left_out for stage in recipe.plan):
        yield "no stage is left to run. Add one to stages, such as {kind: rl}, or give sft its phases."


def _missing_prompts(recipe: Recipe) -> Iterator[str]:
    is_gated = any(phase.until_pass_rate for phase in recipe.warm_up)
    who = "workers generate from" if recipe.has_learner else "until_pass_rate measures" if is_gated else ""
    if who and not recipe.has_prompts:
        yield f"there are no prompts, which {who}. Add prompts: {{kind: jsonl, path: FILE}}, or another kind."
    if (who or recipe.has_prompts) and not recipe.rewards:
        yield "there are no rewards, which score responses to prompts. Add rewards: [{kind: math_verify}], or another."


def _idle_skips(recipe: Recipe) -> Iterator[str]:
    """Yield rewards that are to pass over rows, and would not."""
    for index, reward in enumerate(recipe.rewards):
        if reward.unreadable == "skip" and (reward.kind not in READERS or recipe.prompts.kind not in ROWS):
            yield (
                f"rewards[{index}].unreadable=skip would pass over nothing: {', '.join(READERS)} tell what they cannot"
                f" read of prompts of kind {', '.join(ROWS)}, and this is {reward.kind} on {recipe.prompts.kind}. Leave"
                " it out."
            )


def _impossible_transfers(recipe: Recipe) -> Iterator[str]:
    weights, device = recipe.weights, recipe.learner.device
    transport = transport_abilities(weights.transport)
    if not transport.sends_host_memory and device == "cpu":
        yield (
            f"weights.transport={weights.transport} moves GPU memory, but learner.device is cpu. Set"
            " weights.transport=gloo, or learner.device=cuda."
        )
    if weights.staging == "device" and not transport.sends_gpu_memory:
        yield (
            f"weights.staging=device keeps versions on GPUs, and weights.transport={weights.transport} sends host"
            " memory. Set weights.staging=host, or weights.transport=nccl (ipc, where learner and engines share a GPU)."
        )
    if weights.staging == "device" and "cpu" in (device, _device_of(recipe.engine)):
        yield (
            "weights.staging=device keeps versions on the GPUs of learner and engines, and one of them runs on a CPU."
            " Set weights.staging=host."
        )
    if weights.staging == "none" and not weights.joins_groups:
        yield (
            "weights.staging=none keeps no version beside the engine, and weights.follow=pull keeps one in host memory,"
            " as weights.trust=none does. Set weights.staging=host, or weights.follow=broadcast and"
            " weights.trust=members."
        )
    if weights.trust == "none" and weights.tls is False:
        yield "weights.trust=none has workers pull over TLS. Leave weights.tls out, or set weights.trust=members."


def _device_of(engine: EngineConfig) -> str:
    """Return the engine's device; empty if the engine takes what its process sees."""
    return engine.device if abilities_of(engine).follows_device else ""


def _impossible_shares(recipe: Recipe) -> Iterator[str]:
    try:
        visible_devices(recipe.workers.devices, recipe.engine)
        for pool in pools_of(recipe):
            visible_devices(pool.recipe.workers.devices, pool.recipe.engine)
    except ConfigError as error:
        yield str(error)


def _impossible_pools(recipe: Recipe) -> Iterator[str]:
    pools = recipe.workers.pools
    names = [MAIN, *(pool.name for pool in pools)]
    if not recipe.workers.count and not pools:
        yield "workers.count is 0, and there is no pool in workers.pools: nothing would generate. Set workers.count=1."
    for index, name in enumerate(names[1:]):
        if not is_name(name):
            yield (
                f"workers.pools[{index}].name is {name!r}; expected 1 to 100 letters, digits, '.', '_' or '-', the"
                " first of them a letter or digit."
            )
        if name in names[: index + 1]:
            yield f"workers.pools[{index}].name is {name!r}, and so is another pool's. Name each pool once."
    if pools and recipe.run.is_colocated:
        yield (
            "run.placement=colocated has one engine on each of the learner's devices, and workers.pools asks for more."
            " Leave the pools out, or set run.placement=separated."
        )


def _useless_archives(weights: WeightsConfig) -> Iterator[str]:
    if weights.archive != "none" and not weights.delta_chain:
        yield (
            f"weights.archive={weights.archive} holds whole versions and the deltas that follow them, and"
            " weights.delta_chain=0 makes none. Set weights.delta_chain to 1 or more, or weights.archive=none."
        )


def _impossible_evaluations(recipe: Recipe) -> Iterator[str]:
    evaluation = recipe.evaluation
    if evaluation.temperature == 0 and evaluation.samples > 1:
        yield (
            f"evaluation.temperature=0 decodes greedily, so all {evaluation.samples} samples of a prompt"
            " (evaluation.samples) would be the same. Set evaluation.samples=1, or a temperature."
        )
    if evaluation.where == "learner" or not evaluation.prompts:
        return
    if 0 < evaluation.every_steps <= recipe.staleness.max_lag:
        yield (
            f"evaluation.every_steps ({evaluation.every_steps}) must be above staleness.max_lag"
            f" ({recipe.staleness.max_lag}) with evaluation.where=workers: a worker that still evaluates might miss the"
            " next version that is to be evaluated."
        )
    if recipe.run.is_colocated:
        yield (
            "evaluation.where=workers evaluates beside training, and with run.placement=colocated engines sleep"
            " meanwhile. Set evaluation.where=learner."
        )
    if recipe.weights.staging == "none":
        yield (
            "evaluation.where=workers has workers keep a version for a while, and with weights.staging=none the next"
            " one overwrites it as it arrives. Set evaluation.where=learner, or weights.staging=host."
        )


def _unmeasured_checkpoints(recipe: Recipe) -> Iterator[str]:
    if recipe.checkpoint.best is None:
        return
    every, checkpoint_every = recipe.evaluation.every_steps, recipe.checkpoint.every_steps
    if not recipe.evaluation.prompts:
        yield (
            "checkpoint.best chooses by a metric of evaluations, and evaluation.prompts=0 makes none. Raise"
            " evaluation.prompts, or leave checkpoint.best out."
        )
    elif every % checkpoint_every:
        yield (
            f"checkpoint.best needs checkpoints of the weights that are evaluated: evaluation.every_steps ({every})"
            f" must be a multiple of checkpoint.every_steps ({checkpoint_every})."
        )


def _impossible_layouts(learner: LearnerConfig) -> Iterator[str]:
    """Yield contradictions in a layout. Limits that follow from the model's sizes are known only once it is opened."""
    try:
        check_splits(learner.backend, backend_abilities(learner.backend).splits, learner.layout)
        check_ranks(learner.layout, learner.processes)
    except ConfigError as error:
        yield str(error)


def _missing_abilities(recipe: Recipe) -> Iterator[str]:
    """Yield what the backend would have to refuse once processes and devices are there."""
    learner, compute = recipe.learner, recipe.learner.compute
    if learner.device not in DEVICES and ":" not in learner.backend:
        nearest = did_you_mean(learner.device, ("cuda",)) or "."
        yield f"learner.device is {learner.device!r}; expected {' or '.join(DEVICES)}{nearest}"
    engines = [("engine.device", _device_of(recipe.engine)), ("scorers.device", recipe.scorers.device)]
    for key, device in engines:
        if device and not TORCH_DEVICE.fullmatch(device):
            nearest = did_you_mean(device, ("cuda",)) or "."
            yield f"{key} is {device!r}; expected a device of torch, such as cpu, cuda or cuda:0{nearest}"
    if compute.compile and learner.device == "cpu":
        yield "learner.compute.compile=true needs learner.device=cuda: on a CPU it gains nothing."
    abilities = backend_abilities(learner.backend)
    for switch, reason in abilities.lacks.items():
        if getattr(compute, switch):
            yield f"learner.compute.{switch}=true needs learner.backend=fsdp: {reason}"
    if recipe.algorithm.critic.path and recipe.algorithm.advantage.kind != "gae":
        yield (
            "algorithm.critic.path names the model that a critic starts from, and only algorithm.advantage.kind=gae"
            f" has one; it is {recipe.algorithm.advantage.kind}. Set algorithm.preset=ppo, or leave the path out."
        )


def _shown(url: str) -> str:
    """Return the URL without a possible user and password."""
    return url.partition("?")[0].rpartition("@")[2]
