"""One rank of stages on pairs, run by torchrun: both backends in turn, each step's metrics into a file of the rank.

python -m torch.distributed.run --nproc-per-node 2 -m tests.learner.preference_rank DIRECTORY
"""

import sys
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from .preferences import OPTIONS, opened

BACKENDS = ("fsdp", "megatron")
UNITS = 4
"""Pairs: the second step has one, which leaves a rank with none."""


def metrics(backend_kind: str, directory: Path) -> list[dict[str, float]]:
    """Of each step of the stage."""
    torch.set_num_threads(1)
    seen: list[dict[str, float]] = []
    stage, _ = opened(
        directory,
        OPTIONS,
        units=UNITS,
        micro_batch_tokens=40,
        backend_kind=backend_kind,
        report=lambda progress: seen.append({"loss": progress.loss, **progress.metrics}),
    )
    assert stage.run()
    return seen


if __name__ == "__main__":
    directory = Path(sys.argv[1])
    found = {kind: metrics(kind, directory / kind) for kind in BACKENDS}
    (directory / f"rank_{dist.get_rank()}.json").write_bytes(msgspec.json.encode(found))
    dist.destroy_process_group()
