"""The keys of a recipe that a resumed run may change.

    FIXED     never: trained steps, or the run's place in its prompts, would mean something else
    ANEW      only with --regenerate: the old value made the samples and batches that wait to be trained
    RAISED    only to a larger value: samples and prompts under way would be too long for a smaller one
    FREE      at any time; the new value holds from the checkpoint on

Every key of the recipe is in exactly one of these groups.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_type_hints

import msgspec

from headway.broker.errors import ConfigError
from headway.deploy.recipe.parse import read_yaml
from headway.deploy.recipe.recipe import Recipe, plan_of
from headway.deploy.recipe.resolve import recipe_to_bytes, with_held_out_seed
from headway.learner.config import ABSENT, SftConfig, StageConfig, changed_settings
from headway.learner.experience.log import Rewind

from .run_directory import CONFIG, SETTINGS
from .stage_output import origin

_ORDER = "a run stands at a place in its prompts, which would be another prompt"
_MODEL = "the checkpoint's weights are those of this model"
FIXED = {
    "run.name": "it names the run",
    "run.seed": "it decides the order of prompts, in which the run stands at a place",
    "prompts.kind": _ORDER,
    "prompts.path": _ORDER,
    "prompts.options": _ORDER,
    "prompts.shuffle": _ORDER,
    "prompts.system_prompt": "prompts that were fed already have it",
    "model.path": _MODEL,
    "model.random": _MODEL,
    "model.adapter": "checkpoints of a whole model, and of each adapter, hold other tensors",
    "model.chat_template": "prompts that were fed were rendered with the one before",
    "algorithm.critic.path": "the checkpoint's critic is of this model",
    "learner.backend": "checkpoints are written in a backend's own form",
    "sft.phases": "the warm-up is over",
    "stages": "the stages before the learner are over, or it goes on from them",
}
_SAMPLED = "samples that wait to be trained were drawn with the old value, and their logprobs are of it"
ANEW = {
    "learner.groups_per_step": "batches and admission numbers are counted in steps of so many groups",
    "sampling.temperature": _SAMPLED,
    "sampling.top_p": _SAMPLED,
    "sampling.top_k": _SAMPLED,
    "algorithm.distillation.coefficient": "samples that wait to be trained have a teacher's logprobs, or have none",
    "algorithm.distillation.top_k": "samples that wait to be trained have so many candidates of a teacher",
    "algorithm.router_replay": "samples that wait to be trained do, or do not, say which experts they were given",
}
RAISED = {
    "sampling.max_new_tokens": "samples that are under way may be longer",
    "engine.max_model_len": "prompts and samples that are under way may be longer",
}
FREE = frozenset(
    f"{section}.{key}"
    for section, keys in {
        "run": "directory placement",
        "prompts": "epochs deadline_s",
        "model": "dtype",
        "broker": "url lease_ttl_s lease_hold_s payload_ttl_s max_bytes max_leases_per_worker payload_shards replicas",
        "staleness": "max_lag ahead on_straggler min_group_size on_over_bound",
        "engine": "kind max_concurrent dtype device threads options",
        "environment": "kind options deadline_s processes max_says",
        "agent.format": "kind options",
        "agent": "kind options max_turns max_turn_tokens turn_s episode_s ignore_sampling on_failure"
        " episodes_per_place processes host port",
        "teacher": "path deadline_s",
        "scorers.engine": "kind options",
        "scorers": "count device devices dtype batch_tokens threads",
        "workers": "count pools devices heartbeat_s max_restarts metrics_port metrics_host patience_s probe_swaps"
        " segment_tokens segment_s engine_errors stall_s slow_factor slow_window_s",
        "evaluation": "prompts samples temperature every_steps pass_reward where hold_s",
        "sampling": "seed keep_special_tokens",
        "algorithm": "preset corrections proximal entropy_coefficient mask_truncated dynamic_sampling",
        "algorithm.advantage": "kind options",
        "algorithm.credit": "kind gamma",
        "algorithm.objective": "kind anchor options",
        "algorithm.aggregation": "kind options",
        "algorithm.kl": "kind coefficient place ema_decay",
        "algorithm.reward": "overlong_buffer length_normalized",
        "algorithm.critic": "learning_rate clip",
        "algorithm.distillation": "place divergence beta",
        "optimizer": "learning_rate beta1 beta2 epsilon weight_decay max_grad_norm warmup_steps schedule",
        "learner": "device processes threads steps group_size micro_batch_tokens prefix_sharing updates_per_step"
        " agreement_bound",
        "learner.layout": "tensor pipeline virtual_pipeline context expert expert_tensor",
        "learner.compute": "recompute offload_optimizer compile cuda_graphs",
        "launcher": "kind options",
        "checkpoint": "every_steps keep best asynchronous log_bytes stage_every_s",
        "weights": "adapter transport staging broadcast_timeout_s bucket_bytes host ports tls trust poll_s"
        " swaps_at_once kv_policy follow delta_chain archive pull_bytes_per_s pull_files",
    }.items()
    for key in keys.split()
) | {"rewards", "metrics"}


def check_resumable(recipe: Recipe, rewind: Rewind | None, say: Callable[[str], None] = lambda text: None) -> None:
    """Raise ConfigError, before anything is started, for keys that differ from the last start's and may not; `say`
    which others do."""
    last = _last_settings(recipe.run_directory)
    if last is None:
        return
    before, now = _comparable(last, msgspec.json.decode(recipe_to_bytes(recipe)))
    is_anew = rewind is not None and rewind.regenerate
    if refusals := list(_refusals(before, now, is_anew=is_anew)):
        raise ConfigError(f"--resume goes on with what the run in {recipe.run_directory} is. {' '.join(refusals)}")
    if changes := list(_changes(before, now)):
        say(
            f"Changed since the run's last start: {', '.join(changes)}. The overrides of a command are not remembered:"
            " stop, and give them again, if you did not mean that."
        )


def stage_binding(recipe: Recipe, number: int) -> dict[str, Any]:
    """Return what decides the model of a stage without workers, and the form of its checkpoints, as plain data: all
    that its role reads but for FREE keys, which may change while it runs."""
    return {**_without_free(origin(recipe, number)), "learner": {"backend": recipe.learner.backend}}


def _without_free(made: dict[str, Any]) -> dict[str, Any]:
    """Return an origin, and those of the stages that it names, without FREE keys."""
    bound = dict(made)
    for section in ("model", "prompts"):
        bound[section] = {key: value for key, value in made[section].items() if f"{section}.{key}" not in FREE}
    for stage in bound.get("stages", ()):
        if "origins" in stage:
            stage["origins"] = {name: _without_free(one) for name, one in stage["origins"].items()}
    return bound


def keys_of(struct: type[msgspec.Struct], prefix: str = "") -> Iterator[str]:
    """Yield the paths of all keys below `struct`. A list, a mapping or a section that may be absent counts as one
    key."""
    for name, kind in get_type_hints(struct).items():
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            yield from keys_of(kind, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def _refusals(before: Any, now: Any, *, is_anew: bool) -> Iterator[str]:
    for key in sorted({*FIXED, *ANEW, *RAISED}):
        old, new = _value(before, key), _value(now, key)
        if old is ABSENT or old == new:
            continue
        said = ", ".join(f"{path} was {was} and is {is_} now" for path, was, is_ in changed_settings(key, old, new))
        if key in FIXED:
            yield f"{said}: {FIXED[key]}. Keep it, or start a new run (run.name=...) from model.path=CHECKPOINT."
        elif key in RAISED and new < old:
            yield f"{said}, and may only be raised: {RAISED[key]}. Keep it."
        elif key in ANEW and not is_anew:
            yield f"{said}: {ANEW[key]}. Keep it, or have them made anew (--rewind-to STEP --regenerate)."


def _changes(before: Any, now: Any) -> Iterator[str]:
    """Yield the keys that differ, but for where the run lies and is served from."""
    for key in sorted({*FREE, *RAISED, *ANEW} - {"run.directory", "broker.url"}):
        old, new = _value(before, key), _value(now, key)
        if old is not ABSENT:
            yield from (f"{path} is {is_} ({was} before)" for path, was, is_ in changed_settings(key, old, new))


class _Stages(msgspec.Struct):
    """The two sections of a recipe that name its stages."""

    sft: SftConfig = SftConfig()
    stages: tuple[StageConfig, ...] = ()


def _comparable(before: dict[str, Any], now: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Express `sft` as `stages` where a recipe has these, and fill in what older versions did not write: the same run
    may be written in either way."""
    before, now = with_held_out_seed(_filled(before, Recipe), None), _filled(now, Recipe)
    if not (before.get("stages") or now.get("stages")):
        return before, now
    return _with_stages(before), _with_stages(now)


def _filled(settings: dict[str, Any], struct: type[msgspec.Struct]) -> dict[str, Any]:
    """Return settings with the defaults of all that a key's value lacks. A key that they lack stays absent."""
    kinds = get_type_hints(struct)
    return {name: _filled_value(value, kinds.get(name, Any)) for name, value in settings.items()}


def _filled_value(value: Any, kind: Any) -> Any:
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return _filled(value, kind) if isinstance(value, dict) else value
    try:
        return msgspec.json.decode(msgspec.json.encode(msgspec.convert(value, kind)))
    except msgspec.ValidationError:  # an older version took other values
        return value


def _with_stages(settings: dict[str, Any]) -> dict[str, Any]:
    named = msgspec.convert(settings, _Stages)
    plan = [stage for stage in plan_of(named.sft, named.stages) if not stage.is_left_out]
    return {**settings, "sft": {}, "stages": msgspec.to_builtins(plan)}


def _last_settings(directory: Path) -> dict[str, Any] | None:
    """Return the settings of the last start; None if it left none. They come from settings.json, since a user may edit
    config.yaml; older versions wrote config.yaml only."""
    try:
        settings: dict[str, Any] = msgspec.json.decode((directory / SETTINGS).read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError):
        return read_yaml(directory / CONFIG) if (directory / CONFIG).exists() else None
    return settings


def _value(settings: Any, key: str) -> Any:
    """Return a key's value; one that an older version did not have is absent."""
    for part in key.split("."):
        if not isinstance(settings, dict) or part not in settings:
            return ABSENT
        settings = settings[part]
    return settings
