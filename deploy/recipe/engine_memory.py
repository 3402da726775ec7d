"""Divides a GPU's memory among the engines that one `headway run` places there, where the recipe does not say it.

alone on its GPUs, or a recipe that names a share     nothing is added
k engines on a GPU                                    each a k-th of what one would take, and less for what an
                                                      engine takes beside it (OUTSIDE)
engines that are told the size of their KV cache      the least share: they only ask that it is free
"""

import math
from collections import defaultdict
from collections.abc import Mapping

from broker.errors import ConfigError
from rollout_workers.engines import abilities_of

from .operators import roots_of
from .placement import placed_workers
from .pools import MAIN, pools_of
from .recipe import Recipe

OUTSIDE = 0.02
"""The part of a GPU's memory that is left for what an engine takes outside of its share: its context, CUDA graphs and
communication."""
LEAST = 0.05
"""The least share of an engine: less would hardly hold a model and its context."""


def memory_overrides(recipe: Recipe, visible: str) -> dict[str, list[str]]:
    """Return the overrides by which the workers of each pool get their share, by the pool's name. `visible`:
    CUDA_VISIBLE_DEVICES of `headway run`. Raises ConfigError if a GPU has too many engines."""
    if recipe.run.is_colocated:
        return {}
    seen = visible.split(",") if visible else []
    pools = {MAIN: recipe} | {pool.name: pool.recipe for pool in pools_of(recipe)}
    by_gpu = defaultdict[str, list[str]](list)
    for name, own in pools.items():
        if own.learner.device == "cpu" and not own.workers.devices:  # for all that is known here, there is no GPU
            continue
        for one in placed_workers(own, seen, name):
            by_gpu[one.gpu].append(name)
    given: dict[str, list[str]] = {}
    for name, own in pools.items():
        option = abilities_of(own.engine, roots_of(own)).memory_option
        shared = [gpu for gpu, here in by_gpu.items() if name in here and len(here) > 1]
        if option and shared and option not in own.engine.options:
            share = min(_share(gpu, by_gpu[gpu], pools, name) for gpu in shared)
            given[name] = [f"engine.options.{option}={share:g}"]
    return given


def _share(gpu: str, here: list[str], pools: Mapping[str, Recipe], name: str) -> float:
    """Return the share of an engine of the pool `name` on a GPU with engines of the pools `here`."""
    if _is_sized(pools[name]):
        return LEAST
    taken, others = 0.0, 0
    for one in here:
        abilities, options = abilities_of(pools[one].engine, roots_of(pools[one])), pools[one].engine.options
        said = options.get(abilities.memory_option, LEAST if _is_sized(pools[one]) else None)
        if isinstance(said, float | int):
            taken += said
        else:
            others += 1
    abilities = abilities_of(pools[name].engine, roots_of(pools[name]))
    share = math.floor(100 * ((abilities.memory_share - taken) / others - OUTSIDE)) / 100
    if share < LEAST:
        raise ConfigError(
            f"`headway run` would start {len(here)} engines on GPU {gpu}, and {others} of them would get less than"
            f" {LEAST:g} of its memory each. Name more GPUs in workers.devices, start fewer workers (workers.count), or"
            f" say yourself what each takes (engine.options.{abilities.memory_option})."
        )
    return share


def _is_sized(recipe: Recipe) -> bool:
    option = abilities_of(recipe.engine, roots_of(recipe)).sizing_option
    return bool(option) and recipe.engine.options.get(option) is not None
