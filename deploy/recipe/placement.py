"""Finds GPUs that one `headway run` would give to several roles, each of which needs most of a GPU's memory, and roles
that it would start on a GPU where there is none.

    learner    the first learner.processes of the GPUs that `headway run` sees
    workers    workers.devices, and those of workers.pools
    scorers    scorers.devices
               a process without devices of its own takes the first GPUs that it sees

Only what one command starts on one machine counts. Roles that are started one by one may be on other machines.
"""

import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from headway.broker.errors import ConfigError
from headway.rollout_workers.engines import abilities_of
from headway.rollout_workers.engines.gpus import gpus_of, visible_devices
from headway.weightsync.transports.abilities import abilities_of as transport_abilities

from .operators import roots_of
from .pools import MAIN, pools_of
from .recipe import Recipe
from .scorers import scorers_of

MOST_SHARED = 0.5
"""The most of a GPU's memory that engines may take together where a learner or a scorer is on it, too."""
LEARNER, WORKERS, SCORERS = "learner", "workers", "scorers"
DRIVERS = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")
"""Files of the drivers with which torch finds CUDA devices: NVIDIA's, that of Windows' Linux, and AMD's."""
NO_GPU, ASK_TORCH_S = 3, 60.0
ASK_TORCH = f"import sys, torch; sys.exit(0 if torch.cuda.is_available() else {NO_GPU})"


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


def check_gpus(recipe: Recipe, stages: Sequence[int]) -> None:
    """Raise ConfigError, with the keys, if `headway run` would start something of these stages on a GPU of this
    machine, which has none. Where there is no driver it asks torch, which takes a second or two."""
    keys = list(dict.fromkeys(_on_gpus(recipe, stages))) if recipe.launcher.kind == "local" else []
    if keys and not has_gpu():
        raise ConfigError(
            f"{' and '.join(keys)}, but torch finds no CUDA device on this machine. Set cpu, or start that role on a"
            " machine with a GPU (`headway learner`, `headway workers`, `headway scorers`). If this machine has one,"
            " `headway doctor` shows what is missing."
        )


def has_gpu() -> bool:
    """Return whether this machine has a CUDA device, or may have one."""
    if any(Path(driver).exists() for driver in DRIVERS):
        return True
    try:
        asked = subprocess.run([sys.executable, "-c", ASK_TORCH], capture_output=True, timeout=ASK_TORCH_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return True
    return asked.returncode != NO_GPU


def _on_gpus(recipe: Recipe, stages: Sequence[int]) -> Iterator[str]:
    """Yield each key that puts a part of these stages on a GPU, as far as it is known without the user's own code."""
    engine, plan = recipe.engine, [recipe.plan[number] for number in stages]
    of_headway = [stage for stage in plan if ":" not in stage.kind]
    if recipe.learner.device == "cuda" and ":" not in recipe.learner.backend and of_headway:
        yield "learner.device is cuda"
    has_workers = any(stage.has_workers for stage in of_headway)
    is_measured = any(phase.until_pass_rate for stage in of_headway for phase in stage.phases)
    is_generating = has_workers and recipe.workers.count and abilities_of(engine).follows_device
    if (is_measured or is_generating) and engine.device.startswith("cuda"):
        yield f"engine.device is {engine.device}"
    for index, pool in enumerate(pools_of(recipe) if has_workers else ()):
        own = pool.recipe.engine
        if pool.count and abilities_of(own).follows_device and own.device.startswith("cuda"):
            yield f"workers.pools[{index}].engine.device is {own.device}"
    scorers = recipe.scorers
    is_scored = has_workers and scorers.count and ":" not in scorers.engine.kind and scorers_of(recipe)
    if is_scored and scorers.device.startswith("cuda"):
        yield f"scorers.device is {scorers.device}"


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
    own = visible_devices(workers.devices, engine, abilities) or [",".join(_first(gpus_of(engine, abilities), seen))]
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
