"""One rank that runs every stage to its end, undisturbed, killed and stopped, and writes each run's results to a file.

python -m torch.distributed.run --nproc-per-node 1 -m tests.learner.stage_rank DIRECTORY BACKEND
"""

import sys
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from tests.learner.stage_cases import OPEN, Left, left


def main(directory: Path, backend_kind: str) -> None:
    torch.set_num_threads(1)
    found = {name: runs(name, directory / name, backend_kind) for name in OPEN}
    (directory / "left.json").write_bytes(msgspec.json.encode(found))
    dist.destroy_process_group()


def runs(name: str, directory: Path, backend_kind: str) -> dict[str, Left]:
    """Return the stage's results, by the disturbance."""
    return {
        disturbance: left(OPEN[name], directory / disturbance, backend_kind, disturbance)
        for disturbance in ("undisturbed", "killed", "stopped")
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
