"""Scripts of tests in processes of their own: one alone, or several ranks on this machine, as `torchrun` has them."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec
import torch
import torch.distributed as dist

Case = TypeVar("Case", bound=msgspec.Struct)

HANGS_AFTER_S = 900
"""Other work on the machine makes a test slow, and is no failure."""

SHOWN = 6000
"""The number of characters shown of failed ranks' output, which ends with their traceback and then the launcher's."""


def run_ranks(module: str, count: int, *arguments: object) -> None:
    """Run `python -m module` on `count` ranks, all with these arguments, until every one of them has ended well."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    _run([*launcher, "-m", module, *map(str, arguments)])


def run_cases(kind: type[Case], run: Callable[[Case, Path], object]) -> None:
    """Run the cases of this rank's command line (DIRECTORY CASE...), each in the folder of its number."""
    torch.set_num_threads(1)
    directory, *cases = sys.argv[1:]
    for number, text in enumerate(cases):
        run(msgspec.json.decode(text, type=kind), Path(directory, str(number)))
    dist.destroy_process_group()


def run_alone(module: str) -> None:
    """Run `python -m module` until it has ended well."""
    _run([sys.executable, "-m", module])


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANGS_AFTER_S, check=False)
    assert done.returncode == 0, done.stderr[-SHOWN:]
