"""Divides a GPU's memory among the engines that one `headway run` places there, where the recipe does not say it.

alone on its GPUs, or a recipe that names a share     nothing is added
k engines on a GPU                                    each a k-th of what one would take, and less for what an
                                                      engine takes beside it (OUTSIDE)
k engines beside the learner, on the only GPU         the same of half of the GPU, or of what the learner leaves
engines beside scorers, or beside a learner that      nothing is added: placement.py refuses them
could have another GPU
engines that are told the size of their KV cache      the least share: they only ask that it is free
"""

import math
import re
import subprocess
from collections import defaultdict
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import suppress

from headway.broker.errors import ConfigError
from headway.rollout_workers.engines import abilities_of
from headway.weightsync.transports.abilities import abilities_of as transport_abilities

from .operators import roots_of
from .placement import MOST_SHARED, placed_learner, placed_scorers, placed_workers
from .pools import MAIN, pools_of
from .recipe import Recipe

OUTSIDE = 0.02
"""The part of a GPU's memory that is left for what an engine takes outside of its share: its context, CUDA graphs and
communication."""
LEAST = 0.05
"""The least share of an engine: less would hardly hold a model and its context."""
MARGIN = 0.1
"""The part of a GPU's memory that is left free beside what the learner is planned to take, which is an estimate."""

NVIDIA_SMI_S = 20.0
"""Seconds for nvidia-smi, which takes some where no process keeps the driver loaded."""

LearnerPart = Callable[[str], float | None]
"""Returns the part of this GPU's memory that the learner takes, or None if engines are not to share it by default."""


def unknown(gpu: str) -> None:
    """Know nothing of what the learner takes: see LearnerPart."""


def only_gpu_bytes(visible: str) -> int | None:
    """Return the memory of the GPU if `headway run` sees exactly one; None if it sees several, or nvidia-smi does not
    tell. `visible`: its CUDA_VISIBLE_DEVICES.

    nvidia-smi numbers GPUs by their bus and CUDA by their speed, so of unlike ones it is not known which is seen.
    """
    if visible and not re.fullmatch(r"\d+|GPU-[^,]+", visible):
        return None
    asked = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    with suppress(OSError, subprocess.SubprocessError, ValueError):
        answer = subprocess.run(asked, capture_output=True, text=True, timeout=NVIDIA_SMI_S, check=True).stdout
        sizes = [int(line) << 20 for line in answer.splitlines()]
        if len(set(sizes)) == 1 and (visible or len(sizes) == 1):
            return sizes[0]
    return None


def memory_overrides(recipe: Recipe, shares: Mapping[str, float]) -> dict[str, list[str]]:
    """Return the overrides with which workers of each pool get the share of `engine_shares`, by the pool's name."""
    pools = _pools(recipe)
    options = {name: abilities_of(pools[name].engine, roots_of(pools[name])).memory_option for name in shares}
    return {name: [f"engine.options.{options[name]}={share:g}"] for name, share in shares.items()}


def engine_shares(recipe: Recipe, visible: str, learner_part: LearnerPart = unknown) -> dict[str, float]:
    """Return the part of a GPU's memory that each engine of a pool gets, by the pool's name; a pool is left out whose
    recipe says it, or whose engines have their GPUs alone. `visible`: CUDA_VISIBLE_DEVICES of `headway run`. Raises
    ConfigError if a GPU has too many engines."""
    if recipe.run.is_colocated:
        return {}
    seen, pools = visible.split(",") if visible else [], _pools(recipe)
    by_gpu = defaultdict[str, list[str]](list)
    for name, own in pools.items():
        if own.learner.device == "cpu" and not own.workers.devices:  # for all that is known here, there is no GPU
            continue
        for one in placed_workers(own, seen, name):
            by_gpu[one.gpu].append(name)
    silent = [name for name, own in pools.items() if _is_silent(own)]
    scored = {one.gpu for one in placed_scorers(recipe, seen)}  # what they take is not known here
    asked = [gpu for gpu, here in by_gpu.items() if gpu not in scored and set(silent) & set(here)]
    left = _left_by_learner(recipe, seen, asked, learner_part)
    alone = set(asked) - {one.gpu for one in placed_learner(recipe, seen)}
    shares: dict[str, float] = {}
    for name in silent:
        here = [gpu for gpu, engines in by_gpu.items() if name in engines]
        if not set(here) <= alone | left.keys():  # one of its engines is where placement.py refuses it
            continue
        if shared := [gpu for gpu in here if gpu in left or (gpu in alone and len(by_gpu[gpu]) > 1)]:
            shares[name] = min(_share(gpu, by_gpu[gpu], pools, name, left.get(gpu)) for gpu in shared)
    return shares


def _is_silent(recipe: Recipe) -> bool:
    """Whether the recipe does not say what its engines take of a GPU's memory, though they have an option for it."""
    abilities = abilities_of(recipe.engine, roots_of(recipe))
    return bool(abilities.memory_option) and abilities.memory_option not in abilities.said(recipe.engine.options)


def _pools(recipe: Recipe) -> dict[str, Recipe]:
    return {MAIN: recipe} | {pool.name: pool.recipe for pool in pools_of(recipe)}


def _left_by_learner(
    recipe: Recipe, seen: Sequence[str], gpus: Container[str], learner_part: LearnerPart
) -> dict[str, float]:
    """Return the part of each of these GPUs that the learner leaves to the engines on it, where that is known."""
    if not transport_abilities(recipe.weights.transport, roots_of(recipe)).shares_gpu:
        return {}
    parts = {one.gpu: learner_part(one.gpu) for one in placed_learner(recipe, seen) if one.gpu in gpus}
    return {gpu: min(MOST_SHARED, 1 - part - MARGIN) for gpu, part in parts.items() if part is not None}


def _share(gpu: str, here: Sequence[str], pools: Mapping[str, Recipe], name: str, left: float | None) -> float:
    """Return the share of an engine of the pool `name` on a GPU with engines of the pools `here`. `left`: the part that
    the learner leaves to them; None: it is not there."""
    if _is_sized(pools[name]):
        return LEAST
    taken, others = 0.0, 0
    for one in here:
        abilities = abilities_of(pools[one].engine, roots_of(pools[one]))
        options = abilities.said(pools[one].engine.options)
        said = options.get(abilities.memory_option, LEAST if _is_sized(pools[one]) else None)
        if isinstance(said, float | int):
            taken += said
        else:
            others += 1
    abilities = abilities_of(pools[name].engine, roots_of(pools[name]))
    whole = abilities.memory_share if left is None else left
    share = math.floor(100 * ((whole - taken) / others - OUTSIDE) + 1e-6) / 100
    if share < LEAST:
        beside = "" if left is None else f" beside a learner that leaves them {max(0.0, left):.2f} of it"
        raise ConfigError(
            f"`headway run` would start {len(here)} engine{'s' * (len(here) > 1)} on GPU {gpu}{beside}, and {others} of"
            f" them would get less than {LEAST:g} of its memory each. Name other GPUs in workers.devices, start fewer"
            f" workers (workers.count), or say yourself what each takes (engine.options.{abilities.memory_option})."
        )
    return share


def _is_sized(recipe: Recipe) -> bool:
    option = abilities_of(recipe.engine, roots_of(recipe)).sizing_option
    return bool(option) and recipe.engine.options.get(option) is not None
