"""Finds GPUs that one `headway run` would give to several roles, each of which needs most of a GPU's memory.

    learner    the first learner.processes of the GPUs that `headway run` sees
    workers    workers.devices, and those of workers.pools
    scorers    scorers.devices
               a process without devices of its own takes the first GPUs that it sees

Only what one command starts on one machine counts. Roles that are started one by one may be on other machines.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from broker.errors import ConfigError
from rollout_workers.engines import abilities_of
from rollout_workers.engines.gpus import gpus_of, shares
from weightsync.transports.abilities import abilities_of as transport_abilities

from .operators import roots_of
from .pools import MAIN, pools_of
from .recipe import Recipe
from .scorers import scorers_of

MOST_SHARED = 0.5
"""The most of a GPU's memory that engines may take together where a learner or a scorer is on it, too."""
LEARNER, WORKERS, SCORERS = "learner", "workers", "scorers"


@dataclass(frozen=True, kw_only=True)
class PlacedProcess:
    """A process on one GPU."""

    gpu: str
    role: str
    key: str
    """The key of the recipe that puts it there."""
    memory: float = 0.0
    """The part of the GPU's memory that an engine takes."""


def check_placement(recipe: Recipe, visible: str, shares: Mapping[str, float] | None = None) -> None:
    """Raise ConfigError if `headway run` would start several roles on a GPU that cannot hold them. `visible`:
    CUDA_VISIBLE_DEVICES of `headway run`. `shares`: what engines of a pool take whose recipe does not say it."""
    if recipe.run.is_colocated:
        return
    by_gpu = defaultdict[str, list[PlacedProcess]](list)
    for one in placed(recipe, visible, shares):
        by_gpu[one.gpu].append(one)
    crowded = {gpu: here for gpu, here in by_gpu.items() if _is_crowded(here, recipe)}
    if crowded:
        raise ConfigError(_complaint(crowded))


def placed(recipe: Recipe, visible: str, shares: Mapping[str, float] | None = None) -> Iterator[PlacedProcess]:
    """Yield each process of the learner, the workers and the scorers on each of its GPUs. `shares`: see
    check_placement."""
    seen, shares = visible.split(",") if visible else [], shares or {}
    yield from placed_learner(recipe, seen)
    yield from placed_workers(recipe, seen, "workers", shares.get(MAIN))
    for index, pool in enumerate(pools_of(recipe)):
        yield from placed_workers(pool.recipe, seen, f"workers.pools[{index}]", shares.get(pool.name))
    yield from placed_scorers(recipe, seen)


def placed_scorers(recipe: Recipe, seen: Sequence[str]) -> Iterator[PlacedProcess]:
    """Yield each process of the scorers on each of its GPUs. `seen`: the GPUs that `headway run` sees; none: all."""
    scorers = recipe.scorers
    if scorers.device != "cpu" and scorers_of(recipe):
        devices = [str(device) for device in scorers.devices] or _first(1, seen)
        for number in range(scorers.count):
            for gpu in devices[number % len(devices)].split(","):
                yield PlacedProcess(gpu=gpu, role=SCORERS, key=_told("scorers.devices", scorers.devices))


def placed_learner(recipe: Recipe, seen: Sequence[str]) -> Iterator[PlacedProcess]:
    """Yield the learner on each of its GPUs. `seen`: the GPUs that `headway run` sees; none: all of them."""
    learner = recipe.learner
    if learner.device != "cpu":
        for gpu in _first(learner.processes, seen):
            yield PlacedProcess(gpu=gpu, role=LEARNER, key=f"learner.processes={learner.processes}")


def placed_workers(
    recipe: Recipe, seen: Sequence[str], section: str, share: float | None = None
) -> Iterator[PlacedProcess]:
    """Yield each worker of the main pool of `recipe`, whose keys are below `section`, on each of its GPUs. `seen`: the
    GPUs that `headway run` sees; none: all of them. `share`: what an engine takes where the recipe does not say it;
    None: what it takes by itself."""
    engine, workers = recipe.engine, recipe.workers
    abilities = abilities_of(engine, roots_of(recipe))
    if abilities.follows_device and engine.device == "cpu":
        return
    said = abilities.said(engine.options).get(abilities.memory_option, share or abilities.memory_share)
    own = shares(workers.devices, engine, abilities) or [",".join(_first(gpus_of(engine, abilities), seen))]
    for number in range(workers.count):
        for gpu in own[number % len(own)].split(","):
            key = _told(f"{section}.devices", workers.devices)
            yield PlacedProcess(gpu=gpu, role=WORKERS, key=key, memory=said if isinstance(said, float | int) else 0.0)


def _first(count: int, seen: Sequence[str]) -> list[str]:
    """Return the GPUs that a process takes which sees these; if it sees all, their numbers."""
    return list(seen[:count]) if seen else [str(number) for number in range(count)]


def _told(key: str, devices: Sequence[int | str]) -> str:
    return f"{key}=[{', '.join(map(str, devices))}]" if devices else f"no {key}"


def _is_crowded(here: Sequence[PlacedProcess], recipe: Recipe) -> bool:
    """Whether roles share a GPU and nothing leaves room for it: engines say how much of its memory they take."""
    roles = {one.role for one in here}
    if len(roles) == 1:
        return False
    if WORKERS not in roles or sum(one.memory for one in here) > MOST_SHARED:
        return True
    shares_gpu = transport_abilities(recipe.weights.transport, roots_of(recipe)).shares_gpu
    return LEARNER in roles and not shares_gpu


def _complaint(crowded: Mapping[str, Sequence[PlacedProcess]]) -> str:
    together = defaultdict[str, list[str]](list)
    for gpu, here in crowded.items():
        names = list(dict.fromkeys(one.role for one in here))
        together[" and ".join([", ".join(names[:-1]), names[-1]])].append(gpu)
    where = "; ".join(f"{names} on GPU{'s' * (len(gpus) > 1)} {', '.join(gpus)}" for names, gpus in together.items())
    keys = dict.fromkeys(one.key for here in crowded.values() for one in here)
    return (
        f"`headway run` would start {where} ({'; '.join(keys)}), and each of them needs most of a GPU's memory. Name"
        " other GPUs; start the learner with `headway learner`, and workers and scorers on another machine with"
        " `headway workers` and `headway scorers`; or set run.placement=colocated. Small models may share a GPU where"
        f" engine.options.gpu_memory_utilization leaves half of it free (at most {MOST_SHARED:g} for all engines of a"
        " GPU) and weights.transport is gloo or ipc."
    )
