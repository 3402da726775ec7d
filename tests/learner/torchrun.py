"""Scripts of tests in processes of their own: one alone, or several ranks on this machine, as `torchrun` has them."""

import subprocess
import sys

SHOWN = 6000
"""The number of characters shown of failed ranks' output, which ends with their traceback and then the launcher's."""


def run_ranks(module: str, count: int, *arguments: object, timeout_s: float) -> None:
    """Run `python -m module` on `count` ranks, all with these arguments, until every one of them has ended well."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    _run([*launcher, "-m", module, *map(str, arguments)], timeout_s)


def run_alone(module: str, *, timeout_s: float) -> None:
    """Run `python -m module` until it has ended well."""
    _run([sys.executable, "-m", module], timeout_s)


def _run(command: list[str], timeout_s: float) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert done.returncode == 0, done.stderr[-SHOWN:]
