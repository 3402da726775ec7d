"""Finds what is wrong with a recipe whose values are all valid alone: unknown kinds and options, numbers beyond limits,
and contradictions, which `CONTRADICTIONS` lists.

A limit follows from machines, formats and protocols, and says why. Lower bounds that follow from a key's meaning stand
with the key.
"""

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import msgspec

from headway.broker.config import MAX_TOKENS
from headway.broker.errors import ConfigError
from headway.broker.user_code.kinds import did_you_mean, typed_options, unknown_kind, unknown_option
from headway.learner.algorithm_config import ADVANTAGES, CORRECTIONS, OBJECTIVES
from headway.learner.backends import BACKENDS
from headway.learner.backends import abilities_of as backend_abilities
from headway.learner.config import EXAMPLES, PROMPTS, STAGES, StageConfig
from headway.learner.models.parallel_layout import check_ranks, check_splits
from headway.learner.stages.registry import options_of
from headway.rollout_workers.agents.formats.options import AgentFormatOptions
from headway.rollout_workers.agents.kinds import check_agent
from headway.rollout_workers.config import READERS, REWARDS, EngineConfig
from headway.rollout_workers.engines import ENGINES, abilities_of, check_options
from headway.rollout_workers.environments import check_environment
from headway.rollout_workers.scorers.runtimes import RUNTIMES
from headway.rollout_workers.scorers.runtimes import check_options as check_runtime_options
from headway.weightsync.transports.base import TRANSPORTS
from headway.weightsync.transports.base import abilities_of as transport_abilities

from .adapter_support import impossible_adapters
from .convert import values_in
from .placement import impossible_turns
from .pools import impossible_pools, impossible_ray_roles, impossible_scorers, pools_of
from .recipe import LAUNCHERS, SINKS, Recipe, SinkConfig
from .stage_graph import impossible_stages

SCHEMES = ("redis://", "rediss://", "redis+cluster://", "rediss+cluster://", "unix://")
DEVICES = ("cpu", "cuda")
TORCH_DEVICE = re.compile(r"(cpu|cuda|mps|xpu)(:\d+)?")
ROWS = ("jsonl", "parquet", "datasets")
"""Kinds of prompts that are rows, all of which can be read before a run starts."""
GROUP_ADVANTAGES = ("group_mean_std", "group_mean", "leave_one_out", "best_against_worst")
DAY_S = 86400
MOST_SAMPLES = 1 << 20
MOST_PROMPTS_AHEAD = 1 << 17


class Limit(NamedTuple):
    """The limits of one key, both included, and their reason."""

    low: float
    high: float
    reason: str


_COUNT = Limit(0, 2**53, "a count keeps its value in JSON and in the server's scripts up to there")
_RANKS = Limit(1, 1 << 16, "each is a process on a GPU of its own, or on a core")
_THREADS = Limit(1, 1024, "threads beyond a machine's cores wait for each other")
_TOKENS = Limit(0, MAX_TOKENS, f"a trajectory's frame holds at most {MAX_TOKENS:,} tokens")
_AT_ONCE = Limit(1, 1 << 24, "they go through the model at once")
_WAIT = Limit(0, 30 * DAY_S, "nobody waits longer than 30 days")
_WORKERS = Limit(0, 1024, "each is a process on this machine; start more with `headway workers`")
_GPUS = Limit(0, 1 << 16, "they are numbers of this machine's GPUs")
_BYTES = Limit(0, 1 << 50, "more than a PiB is a slip of the keyboard")
_FACTOR = Limit(-1e9, 1e9, "the loss is computed in float32")
_RATE = Limit(0, 100, "an update moves each weight by about the learning rate")
_DEADLINE = Limit(0.01, 30 * DAY_S, "a call into another process takes that long, and nobody waits longer than 30 days")

_PHASES = {
    "learning_rate": _RATE,
    "deadline_s": _DEADLINE,
    "batch_size": Limit(1, 1 << 16, "they are held in memory"),
    "max_steps": _COUNT,
    "gate_every_steps": _COUNT,
    "gate_prompts": Limit(1, 1 << 16, "they are held in memory and sampled one after the other"),
}

_SHARED = {
    _COUNT: (
        "run.seed prompts.epochs sampling.seed workers.max_restarts workers.engine_errors workers.segment_tokens"
        " evaluation.every_steps optimizer.warmup_steps learner.steps checkpoint.every_steps"
    ),
    _DEADLINE: "prompts.deadline_s rewards.deadline_s environment.deadline_s teacher.deadline_s"
    " agent.turn_s agent.episode_s",
    _FACTOR: (
        "rewards.weight rewards.mean rewards.clip evaluation.pass_reward algorithm.kl.coefficient"
        " algorithm.entropy_coefficient algorithm.distillation.coefficient algorithm.critic.clip"
    ),
    _THREADS: "scorers.threads engine.threads learner.threads",
    _TOKENS: "sampling.max_new_tokens agent.max_turn_tokens engine.max_model_len algorithm.reward.overlong_buffer",
    _AT_ONCE: "scorers.batch_tokens learner.micro_batch_tokens",
    _WAIT: "workers.stall_s workers.patience_s workers.segment_s checkpoint.stage_every_s",
    _RATE: "algorithm.critic.learning_rate optimizer.learning_rate",
    _WORKERS: "workers.count workers.pools.count",
    _GPUS: "scorers.devices workers.pools.devices workers.devices",
    _RANKS: (
        "learner.processes learner.layout.tensor learner.layout.pipeline learner.layout.virtual_pipeline"
        " learner.layout.context learner.layout.expert learner.layout.expert_tensor"
    ),
    _BYTES: "checkpoint.log_bytes weights.pull_bytes_per_s",
}
"""Limits that several keys have."""

LIMITS = {
    **{key: limit for limit, keys in _SHARED.items() for key in keys.split()},
    "model.random.config.num_hidden_layers": Limit(1, 1000, "each is built before anything else is known"),
    "rewards.std": Limit(1e-9, 1e9, "a score is divided by it, and the loss is computed in float32"),
    "scorers.count": Limit(0, 1024, "each is a process on this machine; start more with `headway scorers`"),
    "broker.lease_ttl_s": Limit(0.1, 30 * DAY_S, "a worker renews its leases over a network"),
    "broker.lease_hold_s": Limit(1, 30 * DAY_S, "a sample takes longer between two segments"),
    "broker.payload_ttl_s": Limit(1, 30 * DAY_S, "its submission follows over a network"),
    "broker.max_bytes": Limit(1 << 20, 1 << 50, "the prompts and samples of a step must fit"),
    "broker.max_leases_per_worker": Limit(0, 1 << 16, "an engine batches no more"),
    "broker.replicas": Limit(0, 64, "a write waits for all of them"),
    "staleness.max_lag": Limit(0, 1000, "prompts for max_lag + 1 steps are fed ahead; ratios say nothing that far off"),
    "staleness.ahead": Limit(0, 1000, "staleness.max_lag is at most that"),
    "staleness.min_group_size": Limit(1, 4096, "no group is larger"),
    "sampling.temperature": Limit(1e-3, 1e3, "logits are divided by it, in float32"),
    "sampling.top_k": Limit(0, 1 << 24, "no vocabulary is larger"),
    "engine.max_concurrent": Limit(1, 1 << 16, "an engine batches no more"),
    "workers.heartbeat_s": Limit(
        0.01, 24, "each is a message to the server, which forgets who is silent for two minutes"
    ),
    "workers.slow_window_s": Limit(1, DAY_S, "a worker reports its tokens once a heartbeat"),
    "evaluation.prompts": Limit(0, 1 << 16, "they are held in memory, and one engine may have to sample them all"),
    "evaluation.samples": Limit(1, 1024, "the results of all prompts come in one answer"),
    "evaluation.temperature": Limit(0, 1e3, "logits are divided by it, in float32"),
    "evaluation.hold_s": Limit(1, DAY_S, "a worker that evaluates takes no newer weights for so long"),
    "algorithm.dynamic_sampling": Limit(0, 1000, "each round generates a step's samples anew"),
    "optimizer.epsilon": Limit(0, 1, "it would hide every gradient"),
    "optimizer.weight_decay": Limit(0, 1e3, "it would leave nothing of a weight"),
    "optimizer.max_grad_norm": Limit(0, 1e30, "norms are computed in float32"),
    "learner.groups_per_step": Limit(1, 1 << 16, "a step's batch is held in memory"),
    "learner.group_size": Limit(1, 4096, "a group's samples are one record in the server, and are trained together"),
    "learner.updates_per_step": Limit(1, 1 << 16, "each has at least one group"),
    **{f"{section}.phases.{name}": limit for section in ("sft", "stages") for name, limit in _PHASES.items()},
    "checkpoint.keep": Limit(1, 10_000, "each is a directory of several files"),
    "weights.broadcast_timeout_s": Limit(0.1, DAY_S, "it covers forming a group over a network, and sending"),
    "weights.bucket_bytes": Limit(1024, 1 << 36, "two buckets are held in memory"),
    "weights.poll_s": Limit(0.001, 60, "each is a message to the server, and who does not look stays behind"),
    "weights.ports": Limit(0, 65535, "ports have 16 bits"),
    "weights.delta_chain": Limit(0, 1000, "the learner keeps them in memory"),
}


def beyond_limits(config: msgspec.Struct) -> Iterator[str]:
    """Yield what is wrong with numbers of a recipe, or of some of its sections, and why."""
    for path, value in values_in(msgspec.to_builtins(config)):
        limit = LIMITS.get(re.sub(r"\[\d+\]", "", path))
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number and limit is not None and not limit.low <= value <= limit.high:
            sign, bound = ("at least", limit.low) if value < limit.low else ("at most", limit.high)
            shown = f"{bound:,}" if isinstance(bound, int) else f"{bound:g}"
            yield f"{path} is {value:g}; expected {sign} {shown}: {limit.reason}."
    if isinstance(config, Recipe):
        yield from _products(config)


def _products(recipe: Recipe) -> Iterator[str]:
    samples = recipe.learner.groups_per_step * recipe.learner.group_size
    ahead = recipe.learner.groups_per_step * (recipe.staleness.max_lag + 1)
    if samples > MOST_SAMPLES:
        yield (
            f"learner.groups_per_step * learner.group_size is {samples:,}; expected at most {MOST_SAMPLES:,}: the"
            " samples of a step are held in memory together."
        )
    if ahead > MOST_PROMPTS_AHEAD:
        yield (
            f"learner.groups_per_step * (staleness.max_lag + 1) is {ahead:,}; expected at most"
            f" {MOST_PROMPTS_AHEAD:,}: so many prompts would lie in the broker before the first step."
        )
    staleness = recipe.staleness
    if staleness.ahead is not None and staleness.ahead > staleness.max_lag:
        yield (
            f"staleness.ahead ({staleness.ahead:g}) is above staleness.max_lag ({staleness.max_lag}): samples would be"
            " begun that are too old when they are due. Lower it, or raise staleness.max_lag."
        )


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
    algorithm, where = recipe.algorithm, f"{source}: algorithm"
    _check_kind(algorithm.advantage.kind, ADVANTAGES, f"{where}.advantage.kind")
    _check_kind(algorithm.objective.kind, OBJECTIVES, f"{where}.objective.kind")
    for index, correction in enumerate(algorithm.corrections):
        _check_kind(correction.kind, CORRECTIONS, f"{where}.corrections[{index}].kind")
    for phase in recipe.sft.phases:
        _check_kind(phase.kind, EXAMPLES, f"{source}: sft.phases.kind")
    for index, stage in enumerate(recipe.stages):
        _check_stage(stage, f"{source}: stages[{index}]")
    for reward in recipe.rewards:
        _check_kind(reward.kind, REWARDS, f"{source}: rewards.kind")
    _check_sinks(recipe.metrics, source)
    check_environment(recipe.environment, source)
    if recipe.agent.kind:
        check_agent(recipe.agent.kind, recipe.agent.options, f"{source}: agent")
        typed_options(recipe.agent.format.options, AgentFormatOptions, f"{source}: agent.format.options")


def _check_stage(stage: StageConfig, where: str) -> None:
    """Check a stage's kind and options. Those of a user's own stage are checked where it is imported and runs."""
    _check_kind(stage.kind, STAGES, f"{where}.kind")
    is_over_records = options_of(stage, where) is not None
    if stage.kind in STAGES and not is_over_records and stage.options:
        known = ("phases",) if stage.kind == "sft" else ()
        raise unknown_option(next(iter(stage.options)), known, where, of=f"kind={stage.kind}")
    for phase in stage.phases:
        _check_kind(phase.kind, EXAMPLES, f"{where}.phases.kind")


def _check_sinks(configs: Sequence[SinkConfig], source: str) -> None:
    """Check sinks' kinds and options. The learner checks a user's own sink when it makes it."""
    for index, config in enumerate(configs):
        _check_kind(config.kind, SINKS, f"{source}: metrics[{index}].kind")
        if config.kind in SINKS:
            typed_options(config.options, SINKS[config.kind].options, f"{source}: metrics[{index}].options")


def _check_kind(kind: str, known: Collection[str], where: str) -> None:
    if kind not in known and ":" not in kind:
        raise unknown_kind(kind, known, where)


def _impossible_layouts(recipe: Recipe) -> Iterator[str]:
    """Yield contradictions in a layout. Limits that follow from the model's sizes are known only once it is opened."""
    learner = recipe.learner
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


def _impossible_counts(recipe: Recipe) -> Iterator[str]:
    learner, sampling, engine = recipe.learner, recipe.sampling, recipe.engine
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


def _useless_archives(recipe: Recipe) -> Iterator[str]:
    weights = recipe.weights
    if weights.archive != "none" and not weights.delta_chain:
        yield (
            f"weights.archive={weights.archive} holds whole versions and the deltas that follow them, and"
            " weights.delta_chain=0 makes none. Set weights.delta_chain to 1 or more, or weights.archive=none."
        )


def _idle_skips(recipe: Recipe) -> Iterator[str]:
    """Yield rewards that are to pass over rows, and would not."""
    for index, reward in enumerate(recipe.rewards):
        if reward.unreadable == "skip" and (reward.kind not in READERS or recipe.prompts.kind not in ROWS):
            yield (
                f"rewards[{index}].unreadable=skip would pass over nothing: {', '.join(READERS)} tell what they cannot"
                f" read of prompts of kind {', '.join(ROWS)}, and this is {reward.kind} on {recipe.prompts.kind}. Leave"
                " it out."
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


def _impossible_agents(recipe: Recipe) -> Iterator[str]:
    """Yield what does not fit an agent, whose episodes are trees of turns."""
    if not recipe.agent.kind:
        return
    agent = f"agent.kind={recipe.agent.kind}"
    if recipe.environment.kind != "single_turn":
        yield (
            f"environment.kind={recipe.environment.kind} answers turns, and so does {agent}. Keep one of them: an agent"
            " may wrap an environment."
        )
    if recipe.algorithm.router_replay:
        yield f"algorithm.router_replay=true replays one chain of tokens, and {agent} may branch. Set it to false."
    if recipe.teacher.path:
        yield f"teacher.path has a teacher score one chain of tokens, and {agent} may branch. Leave it out."


def _impossible_waits(recipe: Recipe) -> Iterator[str]:
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
        ("agent.turn_s", recipe.agent.turn_s if recipe.agent.kind else 0.0),
    ):
        if 2 * deadline_s > recipe.broker.lease_hold_s:
            yield (
                f"{key} ({deadline_s:g}) must be at most half of broker.lease_hold_s"
                f" ({recipe.broker.lease_hold_s:g}), or a sample goes to another worker while its call is repeated."
            )


def _impossible_places(recipe: Recipe) -> Iterator[str]:
    if not recipe.broker.is_embedded and not recipe.broker.url.startswith(SCHEMES):
        shown = recipe.broker.url.partition("?")[0].rpartition("@")[2]  # without a possible user and password
        yield (
            f"broker.url is {shown!r}; expected embedded, redis://host:port, rediss://host:port,"
            " redis+cluster://host:port, rediss+cluster://host:port or unix:///path."
        )
    if [sink.kind for sink in recipe.metrics].count("jsonl") != 1:
        yield (
            "metrics must have one sink of kind jsonl: it is the run's record, of which summary.json, plots and"
            " replays are made. Name others beside it: metrics=[{kind: jsonl}, {kind: package.module:Class}]."
        )
    if recipe.staleness.min_group_size > recipe.learner.group_size:
        yield (
            f"staleness.min_group_size ({recipe.staleness.min_group_size}) is above learner.group_size"
            f" ({recipe.learner.group_size}): no group could ever be trimmed."
        )


CONTRADICTIONS: tuple[Callable[[Recipe], Iterator[str]], ...] = (
    beyond_limits,
    _impossible_layouts,
    impossible_stages,
    _missing_abilities,
    impossible_adapters,
    _impossible_counts,
    _impossible_transfers,
    impossible_pools,
    impossible_turns,
    _useless_archives,
    _idle_skips,
    _impossible_agents,
    _impossible_evaluations,
    impossible_ray_roles,
    _unmeasured_checkpoints,
    impossible_scorers,
    _impossible_waits,
    _impossible_places,
)
"""What a recipe whose kinds are all known may contradict, in the order in which a user hears of it."""


def check_values(recipe: Recipe, source: str) -> None:
    """Raise ConfigError for the first kind that is unknown, or else for the first contradiction."""
    _check_kinds(recipe, source)
    for complaint in chain.from_iterable(check(recipe) for check in CONTRADICTIONS):
        raise ConfigError(f"{source}: {complaint}")
