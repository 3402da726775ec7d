"""Several ranks on this machine, as `torchrun` starts them."""

import subprocess
import sys

SHOWN = 6000
"""Characters of what ranks that failed have said: their traceback, before that of the launcher."""


def run_ranks(module: str, count: int, *arguments: object, timeout_s: float) -> None:
    """Run `python -m module` on `count` ranks, all with these arguments, until every one of them has ended well."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    done = subprocess.run(
        [*launcher, "-m", module, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-SHOWN:]
