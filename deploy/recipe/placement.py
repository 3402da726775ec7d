"""Decides which GPUs the roles of one `headway run` share, and how much of a GPU's memory each engine gets.

It finds GPUs that several roles would share although each needs most of the memory, and roles that would start on a GPU
where there is none. With `run.placement=colocated` learner and engines use the same devices in turns.

    learner    the first learner.processes of the GPUs that `headway run` sees
    workers    workers.devices, and those of workers.pools
    scorers    scorers.devices
               a process without devices of its own takes the first GPUs that it sees

Only what one command starts on one machine counts. Roles that are started one by one may be on other machines.
"""

import math
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from headway.broker.errors import ConfigError
from headway.rollout_workers.engines import abilities_of, gpus_of, visible_devices
from headway.rollout_workers.engines.abilities import EngineAbilities
from headway.weightsync.transports.base import abilities_of as transport_abilities

from .pools import MAIN, pools_of, scorers_of
from .recipe import Recipe
from .trust import roots_of

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
    abilities = _abilities(recipe)
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


def impossible_turns(recipe: Recipe) -> Iterator[str]:
    """Yield contradictions to taking turns on the same devices, for a colocated recipe."""
    if not recipe.run.is_colocated:
        return
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
    abilities, options = _abilities(recipe), recipe.engine.options
    if abilities.sizing_option and options.get(abilities.sizing_option) is not None:
        return True
    ranks = visible.split(",") if visible else [str(rank) for rank in range(recipe.learner.processes)]
    given = {str(device) for device in recipe.workers.devices}
    on_cpu = abilities.follows_device and recipe.engine.device == "cpu"
    return on_cpu or bool(given and given.isdisjoint(ranks[: recipe.learner.processes]))


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
    options = {name: _abilities(pools[name]).memory_option for name in shares}
    return {name: [f"engine.options.{options[name]}={share:g}"] for name, share in shares.items()}


def engine_shares(recipe: Recipe, visible: str, learner_part: LearnerPart = lambda _: None) -> dict[str, float]:
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
    abilities = _abilities(recipe)
    return bool(abilities.memory_option) and abilities.memory_option not in abilities.said(recipe.engine.options)


def _abilities(recipe: Recipe) -> EngineAbilities:
    """Return what the recipe's engine can. A user's own is imported to ask it."""
    return abilities_of(recipe.engine, roots_of(recipe))


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
        abilities = _abilities(pools[one])
        options = abilities.said(pools[one].engine.options)
        said = options.get(abilities.memory_option, LEAST if _is_sized(pools[one]) else None)
        if isinstance(said, float | int):
            taken += said
        else:
            others += 1
    abilities = _abilities(pools[name])
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
    option = _abilities(recipe).sizing_option
    return bool(option) and recipe.engine.options.get(option) is not None
