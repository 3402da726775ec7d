"""The contestants: Headway, both trainers of TRL, the synchronous one with each of its settings, and verl. Each runs in
its own processes, and one evaluator measures all models."""

import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import msgspec

from benchmarks.gpus import gpu_names
from benchmarks.learns.parts import finish
from headway.broker.errors import ConfigError
from headway.deploy.run.stage_output import is_complete

from . import of_headway, of_trl_async, of_verl
from .figures import FIRST, Figures
from .gpu_idle import idle, looking
from .of_trl import TrlOrder, TrlSetting
from .processes import finish_group
from .race import LONG_TAILED, Race

ROOT = Path(__file__).parents[2]
"""The project."""
BESIDE_ON_CPU = "trl-all-threads-eager-experts"
"""One more contestant where the task's model has experts, as it has on CPUs: TRL's fastest setting there."""
TRL = {
    "trl-1-thread": TrlSetting(threads=1),
    "trl-all-threads": TrlSetting(),
    **{f"trl-1-thread-{count}-micro-batches": TrlSetting(threads=1, micro_batches=count) for count in (4, 8, 16, 32)},
    **{f"trl-all-threads-{count}-micro-batches": TrlSetting(micro_batches=count) for count in (2, 4, 8)},
    "trl-1-thread-continuous": TrlSetting(threads=1, continuous_batching=True),
    "trl-1-thread-eager-experts": TrlSetting(threads=1, model={"experts_implementation": "eager"}),
    BESIDE_ON_CPU: TrlSetting(model={"experts_implementation": "eager"}),
    "trl-1-thread-batched-experts": TrlSetting(threads=1, model={"experts_implementation": "batched_mm"}),
}
"""TRL's settings, by the name of their runs."""
DEFAULT = (of_headway.NAME, "trl-1-thread", "trl-all-threads")
"""The contestants that race unless the user names others."""
LONG_TAILED_ON_GPUS = (of_headway.NAME, "trl-all-threads-8-micro-batches")
"""Those of the long-tailed task on GPUs, where larger passes of TRL's run out of memory."""
ON_TWO = (of_trl_async.NAME, *(name for name, one in of_verl.SETTINGS.items() if one.mode == of_verl.ASYNC))
"""The contestants whose trainer has one GPU and whose server has another."""
LOOPBACK = "127.0.0.1"
"""The address at which a peer's processes meet: all are on this machine, which may have no other."""
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--local-addr", LOOPBACK)
NAMES = (of_headway.NAME, *TRL, of_trl_async.NAME, *of_verl.SETTINGS)


def default(gpus: int, task: str) -> tuple[str, ...]:
    """Return the contestants that race in a task on so many GPUs unless the user names others."""
    if not gpus:
        return (*DEFAULT, BESIDE_ON_CPU)
    return LONG_TAILED_ON_GPUS if task == LONG_TAILED else DEFAULT


def lacking(name: str, gpus: int) -> str:
    """Return why a contestant cannot race on so many GPUs; empty if it can."""
    if name in ON_TWO and gpus != 2:
        return f"{name} trains on one GPU and generates on another: it needs --gpus 2"
    if name in of_verl.SETTINGS and gpus == 0:
        return f"{name} generates with vLLM on GPUs only: it needs --gpus 1 or 2"
    return ""


def warm_up(race: Race, timeout_s: float) -> None:
    """Make the model from which all start, unless it is there.

    Raises CalledProcessError or TimeoutExpired, its output on stderr.
    """
    if not is_complete(race.model):
        place = (f"run.directory={race.output}", f"run.name={race.model.name}")
        # No evaluation: the race measures the model itself.
        others = (*race.all_overrides, *place, "evaluation.prompts=0")
        command = ["sft", race.recipe, "--output", str(race.model), *others]
        finish(command, race.model, timeout_s)


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
    """Make a contestant's run anew; `python` is an interpreter that has TRL. The model is not measured yet.

    Raises CalledProcessError or TimeoutExpired, its output on stderr.
    """
    before, began = _processor_s(), time.time()
    with looking(race.gpus) as seen:
        if name == of_headway.NAME:
            figures, model = of_headway.drive(race, timeout_s)
        elif name in of_verl.SETTINGS:
            figures, model = of_verl.drive(name, race, python, timeout_s)
        else:
            figures, model = _drive_trl(name, race, python, timeout_s)
    samples = len(figures.rewards) * race.samples_per_step
    first = figures.ends_s[min(FIRST, len(figures.ends_s) - 1) - 1]
    return msgspec.structs.replace(
        figures,
        gpu_idle=idle(seen, began + first, began + figures.ends_s[-1]),
        processor_ms_per_sample=round(1000 * (_processor_s() - before) / samples, 2),
        model=str(model),
    )


def judged(figures: Figures, race: Race, timeout_s: float) -> Figures:
    """Return the figures with the pass rate of their model. Raises CalledProcessError or TimeoutExpired."""
    return msgspec.structs.replace(figures, pass_rate=pass_rate(race, Path(figures.model), timeout_s))


def pass_rate(race: Race, model: Path, timeout_s: float) -> float:
    """Return the share of the recipe's held-out prompts that a saved model solves, by Headway's embedded engine.

    Raises CalledProcessError or TimeoutExpired.
    """
    command = (sys.executable, "-m", "headway", "eval", race.recipe, *race.all_overrides, "--checkpoint", str(model))
    done = subprocess.run([*command, "--json"], stdout=subprocess.PIPE, check=True, timeout=timeout_s)
    return float(json.loads(done.stdout)["pass_rate"])


def _drive_trl(name: str, race: Race, python: Path, timeout_s: float) -> tuple[Figures, Path]:
    directory, setting = Path(race.output) / name, TRL.get(name, TrlSetting())
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    order, result, model = directory / "order.json", directory / "figures.json", directory / "model"
    module, server_gpu = "of_trl", None
    launcher: tuple[str, ...] = ()
    environment = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    # The process of a task's own prompts must find this project, which the peers' interpreter has not installed.
    environment["PYTHONPATH"] = os.pathsep.join((str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])))
    environment.setdefault("VLLM_HOST_IP", LOOPBACK)
    with socket.create_server((LOOPBACK, 0)) as free:  # races beside each other would meet at torch's usual port
        environment.setdefault("MASTER_PORT", str(free.getsockname()[1]))
    if setting.threads:
        environment["OMP_NUM_THREADS"] = str(setting.threads)
    if name == of_trl_async.NAME:
        module = "of_trl_async"
        environment["CUDA_VISIBLE_DEVICES"], server_gpu = gpu_names(2)
    elif race.gpus > 1:
        launcher = (*TORCHRUN, "--nproc-per-node", str(race.gpus))
    order.write_bytes(
        msgspec.json.encode(
            TrlOrder(race=race, setting=setting, model=str(model), began=time.time(), server_gpu=server_gpu)
        )
    )
    command = (str(python), "-W", "ignore", *launcher, "-m", f"{__package__}.{module}", str(order), str(result))
    finish_group(command, timeout_s, environment)
    return msgspec.json.decode(result.read_bytes(), type=Figures), model


def _processor_s() -> float:
    """Return the processor time of all processes that have ended and that this one, or one of them, waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
