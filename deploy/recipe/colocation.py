"""Derives what `run.placement=colocated` means for a recipe: learner and engines have the same devices in turns.

Worker i has the GPUs of the learner's ranks from i * tensor_parallel_size on, so that one engine is on each GPU.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from headway.broker.errors import ConfigError
from headway.rollout_workers.config import EngineConfig
from headway.rollout_workers.engines import abilities_of
from headway.rollout_workers.engines.gpus import gpus_of, visible_devices
from headway.weightsync.transports.abilities import abilities_of as transport_abilities

from .operators import roots_of
from .recipe import Recipe


def colocated_defaults(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys that a colocated recipe may omit; {} for any other recipe, or for a malformed one."""
    if _section(raw, "run").get("placement") != "colocated":
        return {}
    learner, engine = _section(raw, "learner"), _section(raw, "engine")
    weights: dict[str, Any] = {"swaps_at_once": 1.0}
    workers: dict[str, Any] = {}
    if learner.get("device") == "cuda":
        weights |= {"transport": "ipc", "staging": "host"}  # on GPUs there would have to be room for two more versions
        processes = learner.get("processes", 1)
        if isinstance(processes, int):
            workers["count"] = max(1, processes // _gpus_each(engine))
    return {"weights": weights, "workers": workers}


def impossible_turns(recipe: Recipe) -> Iterator[str]:
    """Yield contradictions to taking turns on the same devices."""
    learner, engine, workers = recipe.learner, recipe.engine, recipe.workers
    abilities, transport = abilities_of(engine), transport_abilities(recipe.weights.transport)
    if abilities.follows_device and (engine.device == "cpu") != (learner.device == "cpu"):
        yield (
            f"run.placement=colocated has learner and engines on the same devices, but learner.device is"
            f" {learner.device} and engine.device is {engine.device}. Set run.placement=separated, or both to the same."
        )
    if engine.options.get(abilities.sleep_option) is False:
        yield (
            f"run.placement=colocated needs engines that sleep, and engine.options.{abilities.sleep_option} is false."
            " Leave it out, or set run.placement=separated."
        )
    if recipe.weights.staging == "none":
        yield (
            "weights.staging=none receives into the weights that an engine holds, and with run.placement=colocated it"
            " holds none while the learner trains and publishes. Set weights.staging=host."
        )
    if learner.device == "cpu":
        return
    if not transport.shares_gpu:
        yield (
            f"run.placement=colocated has learner and engines on the same GPUs, where weights.transport="
            f"{recipe.weights.transport} has no place for two ranks. Set weights.transport=ipc."
        )
    each = gpus_of(engine)
    if workers.count * each > learner.processes:
        yield (
            f"run.placement=colocated puts one engine on each of the learner's GPUs, and workers.count={workers.count}"
            f" engines of {each} need more than learner.processes={learner.processes}. Set workers.count="
            f"{max(1, learner.processes // each)}."
        )


def worker_gpus(recipe: Recipe, visible: str) -> list[str]:
    """Return CUDA_VISIBLE_DEVICES for each worker, from those that `visible` names; none if workers have no GPUs of
    their own.

    With a transport that maps memory, versions that are kept on GPUs lie on the learner's first GPU, from which each
    worker copies them. So each worker sees that GPU too, after its own.
    """
    engine, learner, weights = recipe.engine, recipe.learner, recipe.weights
    if learner.device == "cpu" and not recipe.workers.devices:
        return []
    roots = roots_of(recipe)
    abilities = abilities_of(engine, roots)
    if learner.device == "cpu":
        return visible_devices(recipe.workers.devices, engine, abilities)
    ranks = visible.split(",") if visible else [str(rank) for rank in range(learner.processes)]
    devices: Sequence[int | str] = recipe.workers.devices
    if recipe.run.is_colocated:
        devices = devices or ranks[: recipe.workers.count * gpus_of(engine, abilities)]
    is_mapped = weights.staging == "device" and transport_abilities(weights.transport, roots).maps_memory
    first = ranks[0] if is_mapped else ""
    given = visible_devices(devices, engine, abilities)
    return [gpus if first in ("", *gpus.split(",")) else f"{gpus},{first}" for gpus in given]


def opens_beside_learner(recipe: Recipe, visible: str) -> bool:
    """Return whether workers may open their engines while the learner loads its model, as far as the recipe and
    `visible` say: where they are on none of the learner's GPUs, or engines do not measure the memory that is free."""
    if recipe.run.is_colocated or recipe.learner.device == "cpu":
        return not recipe.run.is_colocated
    abilities, options = abilities_of(recipe.engine, roots_of(recipe)), recipe.engine.options
    if abilities.sizing_option and options.get(abilities.sizing_option) is not None:
        return True
    ranks = visible.split(",") if visible else [str(rank) for rank in range(recipe.learner.processes)]
    given = {str(device) for device in recipe.workers.devices}
    on_cpu = abilities.follows_device and recipe.engine.device == "cpu"
    return on_cpu or bool(given and given.isdisjoint(ranks[: recipe.learner.processes]))


def _gpus_each(engine: Mapping[str, Any]) -> int:
    """Return the GPUs of an engine as it is written. Another check reports malformed ones."""
    options = engine.get("options")
    try:
        return gpus_of(EngineConfig(kind=engine.get("kind", ""), options=options if isinstance(options, dict) else {}))
    except ConfigError:
        return 1


def _section(raw: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = raw.get(name, {})
    return section if isinstance(section, Mapping) else {}
