"""Limits of numbers that are valid alone, but with which a run would neither start nor say why.

Lower bounds that follow from a key's meaning stand with the key. These limits follow from machines, formats and
protocols, and each has its reason.
"""

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from headway.broker.config import MAX_TOKENS

from .recipe import Recipe

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
_WAIT = Limit(0, 30 * DAY_S, "nobody waits longer than 30 days")
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

LIMITS = {
    "model.random.config.num_hidden_layers": Limit(1, 1000, "each is built before anything else is known"),
    "run.seed": _COUNT,
    "prompts.epochs": _COUNT,
    "prompts.deadline_s": _DEADLINE,
    "rewards.weight": _FACTOR,
    "rewards.mean": _FACTOR,
    "rewards.std": Limit(1e-9, 1e9, "a score is divided by it, and the loss is computed in float32"),
    "rewards.clip": _FACTOR,
    "rewards.deadline_s": _DEADLINE,
    "environment.deadline_s": _DEADLINE,
    "teacher.deadline_s": _DEADLINE,
    "scorers.count": Limit(0, 1024, "each is a process on this machine; start more with `headway scorers`"),
    "scorers.devices": Limit(0, 1 << 16, "they are numbers of this machine's GPUs"),
    "scorers.batch_tokens": Limit(1, 1 << 24, "they go through the model at once"),
    "scorers.threads": _THREADS,
    "broker.lease_ttl_s": Limit(0.1, 30 * DAY_S, "a worker renews its leases over a network"),
    "broker.lease_hold_s": Limit(1, 30 * DAY_S, "a sample takes longer between two segments"),
    "broker.payload_ttl_s": Limit(1, 30 * DAY_S, "its submission follows over a network"),
    "broker.max_bytes": Limit(1 << 20, 1 << 50, "the prompts and samples of a step must fit"),
    "broker.max_leases_per_worker": Limit(0, 1 << 16, "an engine batches no more"),
    "broker.replicas": Limit(0, 64, "a write waits for all of them"),
    "staleness.max_lag": Limit(0, 1000, "prompts for max_lag + 1 steps are fed ahead; ratios say nothing that far off"),
    "staleness.ahead": Limit(0, 1000, "staleness.max_lag is at most that"),
    "staleness.min_group_size": Limit(1, 4096, "no group is larger"),
    "sampling.max_new_tokens": _TOKENS,
    "sampling.temperature": Limit(1e-3, 1e3, "logits are divided by it, in float32"),
    "sampling.seed": _COUNT,
    "sampling.top_k": Limit(0, 1 << 24, "no vocabulary is larger"),
    "engine.max_concurrent": Limit(1, 1 << 16, "an engine batches no more"),
    "engine.max_model_len": _TOKENS,
    "engine.threads": _THREADS,
    "workers.count": Limit(0, 1024, "each is a process on this machine; start more with `headway workers`"),
    "workers.pools.count": Limit(0, 1024, "each is a process on this machine; start more with `headway workers`"),
    "workers.pools.devices": Limit(0, 1 << 16, "they are numbers of this machine's GPUs"),
    "workers.devices": Limit(0, 1 << 16, "they are numbers of this machine's GPUs"),
    "workers.heartbeat_s": Limit(
        0.01, 24, "each is a message to the server, which forgets who is silent for two minutes"
    ),
    "workers.max_restarts": _COUNT,
    "workers.engine_errors": _COUNT,
    "workers.stall_s": _WAIT,
    "workers.slow_window_s": Limit(1, DAY_S, "a worker reports its tokens once a heartbeat"),
    "workers.patience_s": _WAIT,
    "workers.segment_tokens": _COUNT,
    "workers.segment_s": _WAIT,
    "evaluation.prompts": Limit(0, 1 << 16, "they are held in memory, and one engine may have to sample them all"),
    "evaluation.samples": Limit(1, 1024, "the results of all prompts come in one answer"),
    "evaluation.temperature": Limit(0, 1e3, "logits are divided by it, in float32"),
    "evaluation.hold_s": Limit(1, DAY_S, "a worker that evaluates takes no newer weights for so long"),
    "evaluation.every_steps": _COUNT,
    "evaluation.pass_reward": _FACTOR,
    "algorithm.kl.coefficient": _FACTOR,
    "algorithm.entropy_coefficient": _FACTOR,
    "algorithm.distillation.coefficient": _FACTOR,
    "algorithm.reward.overlong_buffer": _TOKENS,
    "algorithm.critic.learning_rate": _RATE,
    "algorithm.critic.clip": _FACTOR,
    "algorithm.dynamic_sampling": Limit(0, 1000, "each round generates a step's samples anew"),
    "optimizer.learning_rate": _RATE,
    "optimizer.epsilon": Limit(0, 1, "it would hide every gradient"),
    "optimizer.weight_decay": Limit(0, 1e3, "it would leave nothing of a weight"),
    "optimizer.max_grad_norm": Limit(0, 1e30, "norms are computed in float32"),
    "optimizer.warmup_steps": _COUNT,
    "learner.processes": _RANKS,
    "learner.threads": _THREADS,
    "learner.steps": _COUNT,
    "learner.groups_per_step": Limit(1, 1 << 16, "a step's batch is held in memory"),
    "learner.group_size": Limit(1, 4096, "a group's samples are one record in the server, and are trained together"),
    "learner.micro_batch_tokens": Limit(1, 1 << 24, "they go through the model at once"),
    "learner.updates_per_step": Limit(1, 1 << 16, "each has at least one group"),
    **{f"{section}.phases.{name}": limit for section in ("sft", "stages") for name, limit in _PHASES.items()},
    "checkpoint.every_steps": _COUNT,
    "checkpoint.keep": Limit(1, 10_000, "each is a directory of several files"),
    "checkpoint.log_bytes": _BYTES,
    "checkpoint.stage_every_s": _WAIT,
    "weights.broadcast_timeout_s": Limit(0.1, DAY_S, "it covers forming a group over a network, and sending"),
    "weights.bucket_bytes": Limit(1024, 1 << 36, "two buckets are held in memory"),
    "weights.poll_s": Limit(0.001, 60, "each is a message to the server, and who does not look stays behind"),
    "weights.ports": Limit(0, 65535, "ports have 16 bits"),
    "weights.delta_chain": Limit(0, 1000, "the learner keeps them in memory"),
    "weights.pull_bytes_per_s": _BYTES,
} | {
    f"learner.layout.{name}": _RANKS
    for name in ("tensor", "pipeline", "virtual_pipeline", "context", "expert", "expert_tensor")
}


def beyond_limits(config: msgspec.Struct) -> Iterator[str]:
    """Yield what is wrong with numbers of a recipe, or of some of its sections, and why."""
    for path, value in _numbers(msgspec.to_builtins(config), ""):
        limit = LIMITS.get(re.sub(r"\[\d+\]", "", path))
        if limit is not None and not limit.low <= value <= limit.high:
            sign, bound = ("at least", limit.low) if value < limit.low else ("at most", limit.high)
            yield f"{path} is {value:g}; expected {sign} {_plain(bound)}: {limit.reason}."
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


def _numbers(value: Any, path: str) -> Iterator[tuple[str, float]]:
    if isinstance(value, dict):
        for key, below in value.items():
            yield from _numbers(below, f"{path}.{key}".lstrip("."))
    elif isinstance(value, list | tuple):
        for index, below in enumerate(value):
            yield from _numbers(below, f"{path}[{index}]")
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield path, value


def _plain(bound: float) -> str:
    return f"{bound:,}" if isinstance(bound, int) else f"{bound:g}"
