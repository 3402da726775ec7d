"""The contestants: Headway, both trainers of TRL, the synchronous one with each of its settings, and verl. Each runs in
its own processes, one evaluator measures all models, and figures of runs that have ended are kept."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.gpus import NO_MULTICAST, gpu_names, idle, looking
from benchmarks.processes import ROOT, finish_group, headway
from headway.broker.errors import ConfigError
from headway.deploy.run.stage_output import is_complete, is_of
from headway.learner.disk import replace_file

from . import of_headway, of_trl_async, of_verl
from .figures import FIRST, Figures
from .of_trl import TrlOrder, TrlSetting
from .race import AGENT, HEADWAY, LONG_TAILED, Race

BESIDE_ON_CPU = "trl-all-threads-eager-experts"
"""One more contestant where the task's model has experts, as it has on CPUs: TRL's fastest setting there."""
TRL = {
    "trl-1-thread": TrlSetting(threads=1),
    "trl-all-threads": TrlSetting(),
    "trl-all-threads-2-micro-batches": TrlSetting(micro_batches=2),
    "trl-all-threads-8-micro-batches": TrlSetting(micro_batches=8),
    BESIDE_ON_CPU: TrlSetting(model={"experts_implementation": "eager"}),
}
"""TRL's settings, by the name of their runs."""
DEFAULT = (HEADWAY, "trl-1-thread", "trl-all-threads")
"""The contestants that race unless the user names others."""
LONG_TAILED_ON_GPUS = (HEADWAY, "trl-all-threads-8-micro-batches")
"""Those of the long-tailed task on GPUs, where larger passes of TRL's run out of memory."""
OF_AGENTS = (HEADWAY, of_trl_async.NAME)
"""Those of the agents' task on GPUs."""
LOOPBACK = "127.0.0.1"
"""The address at which a peer's processes meet: all are on this machine, which may have no other."""
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--local-addr", LOOPBACK)
NAMES = (HEADWAY, *TRL, of_trl_async.NAME, of_verl.NAME)
REMEDY = "give another --output, or the same task and settings"


def default(gpus: int, task: str) -> tuple[str, ...]:
    """Return the contestants that race in a task on so many GPUs unless the user names others."""
    if task == AGENT:
        return OF_AGENTS if gpus else (HEADWAY, "trl-all-threads")
    if not gpus:
        return (*DEFAULT, BESIDE_ON_CPU)
    return LONG_TAILED_ON_GPUS if task == LONG_TAILED else DEFAULT


def lacking(name: str, gpus: int) -> str:
    """Return why a contestant cannot race on so many GPUs; empty if it can."""
    if name == of_trl_async.NAME and gpus == 0:
        return f"{name} generates with vLLM on GPUs only: it needs --gpus 1 or 2"
    if name == of_verl.NAME and gpus == 0:
        return f"{name} generates with vLLM on GPUs only: it needs --gpus 1 or 2"
    return ""


def warm_up(race: Race, timeout_s: float) -> None:
    """Make the model from which all start, unless it is there.

    Raises CalledProcessError or TimeoutExpired, its output on stderr.
    """
    if not is_complete(race.model):
        place = (f"run.directory={race.output}", f"run.name={race.model.name}")
        # No evaluation: the race measures models itself.
        others = (*race.all_overrides, *place, "evaluation.prompts=0")
        headway(["sft", race.recipe, "--output", str(race.model), *others], timeout_s)


def copy_warm_up(race: Race, output: Path) -> None:
    """Begin with the warmed-up model of another output, unless this one has its own.

    Raises ConfigError if the other has none.
    """
    if is_complete(race.model):
        return
    if not is_complete(output / race.model.name):
        raise ConfigError(f"--warmed-up {output} has no warmed-up model: warm up there first, by an empty --of.")
    part = race.model.with_suffix(".part")
    shutil.rmtree(part, ignore_errors=True)
    shutil.copytree(output / race.model.name, part)
    part.rename(race.model)


def run(name: str, race: Race, python: Path, timeout_s: float) -> Figures:
    """Make a contestant's run anew; `python` is an interpreter that has the peer. The model is not measured yet.

    Raises CalledProcessError or TimeoutExpired, its output on stderr.
    """
    began = time.time()
    with looking(race.gpus) as seen:
        if name == HEADWAY:
            figures, model = of_headway.drive(race, timeout_s)
        elif name == of_verl.NAME:
            figures, model = of_verl.drive(race, python, timeout_s)
        else:
            figures, model = _drive_trl(name, race, python, timeout_s)
    first = figures.ends_s[min(FIRST, len(figures.ends_s) - 1) - 1]
    gpu_idle = idle(seen, began + first, began + figures.ends_s[-1])
    return msgspec.structs.replace(figures, gpu_idle=gpu_idle, model=str(model))


def judged(figures: Figures, race: Race, timeout_s: float) -> Figures:
    """Return the figures with the share of the recipe's held-out prompts that their model solves.

    Headway's embedded engine measures all. Raises CalledProcessError or TimeoutExpired.
    """
    command = (sys.executable, "-m", "headway", "eval", race.recipe, *race.all_overrides)
    checkpoint = ("--checkpoint", figures.model, "--json")
    done = subprocess.run([*command, *checkpoint], stdout=subprocess.PIPE, check=True, timeout=timeout_s)
    return msgspec.structs.replace(figures, pass_rate=float(json.loads(done.stdout)["pass_rate"]))


def check(race: Race, names: Sequence[str]) -> None:
    """Raise ConfigError if the output has a model of another warm-up, or figures of these names from another race."""
    if is_complete(race.model) and not is_of(race.model, race.load()):
        raise ConfigError(f"--output {race.output} has a model that other settings have warmed up: {REMEDY}.")
    for name in names:
        if _file(race, name).exists():
            _read(race, name)


def kept(
    race: Race, name: str, make: Callable[[], Figures], judge: Callable[[Figures], Figures] | None, *, is_read: bool
) -> Figures:
    """Return the figures of that name, which `make` finds unless they are kept and to be read.

    `judge` adds a pass rate that they lack, unless it is None. Raises what both raise; what `make` found is kept then.
    """
    found = _read(race, name) if is_read and _file(race, name).exists() else _written(race, name, make())
    return found if judge is None or found.pass_rate is not None else _written(race, name, judge(found))


class _Entry(msgspec.Struct, frozen=True):
    race: dict[str, Any]
    figures: Figures


def _read(race: Race, name: str) -> Figures:
    entry, ours = msgspec.json.decode(_file(race, name).read_bytes(), type=_Entry), race.settings()
    keys = (entry.race.keys() | ours) - (set() if name.startswith(HEADWAY) else {"own"})
    differing = sorted(key for key in keys if entry.race.get(key) != ours.get(key))
    if differing:
        words = ", ".join(f"{key} is {entry.race.get(key)}, not {ours.get(key)}" for key in differing[:5])
        raise ConfigError(f"--go-on: in the kept figures of {name} in {race.output} {words}: {REMEDY}.")
    return entry.figures


def _written(race: Race, name: str, found: Figures) -> Figures:
    _file(race, name).parent.mkdir(parents=True, exist_ok=True)
    replace_file(_file(race, name), msgspec.json.encode(_Entry(race.settings(), found)))
    return found


def _file(race: Race, name: str) -> Path:
    return Path(race.output) / "figures" / f"{name}.json"


def _drive_trl(name: str, race: Race, python: Path, timeout_s: float) -> tuple[Figures, Path]:
    directory, setting = Path(race.output) / name, TRL.get(name, TrlSetting())
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    order, result, model = directory / "order.json", directory / "figures.json", directory / "model"
    module, server_gpu = "of_trl", None
    launcher: tuple[str, ...] = ()
    environment = NO_MULTICAST | {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    # The process of a task's own prompts must find this project, which the peers' interpreter has not installed.
    environment["PYTHONPATH"] = os.pathsep.join((str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])))
    environment.setdefault("VLLM_HOST_IP", LOOPBACK)
    with socket.create_server((LOOPBACK, 0)) as free:  # races beside each other would meet at torch's usual port
        environment.setdefault("MASTER_PORT", str(free.getsockname()[1]))
    if setting.threads:
        environment["OMP_NUM_THREADS"] = str(setting.threads)
    if name == of_trl_async.NAME:
        module = "of_trl_async"
        environment["CUDA_VISIBLE_DEVICES"], server_gpu = (gpu_names(race.gpus) * 2)[:2]
        environment |= of_trl_async.as_host("trainer") if race.gpus == 1 else {}
    elif race.gpus > 1:
        launcher = (*TORCHRUN, "--nproc-per-node", str(race.gpus))
    told = TrlOrder(race=race, setting=setting, model=str(model), began=time.time(), server_gpu=server_gpu)
    order.write_bytes(msgspec.json.encode(told))
    command = (str(python), "-W", "ignore", *launcher, "-m", f"{__package__}.{module}", str(order), str(result))
    finish_group(command, timeout_s, environment)
    return msgspec.json.decode(result.read_bytes(), type=Figures), model
