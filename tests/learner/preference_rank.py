"""One rank of stages over records, run by torchrun: it writes each step's metrics to a file of its own, stage by stage.

python -m torch.distributed.run --nproc-per-node 2 -m tests.learner.preference_rank DIRECTORY
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from headway.learner.backends.base import Backend
from headway.learner.batching.clusters import PrefixSharing
from headway.learner.stages.base import Stage

from . import distilling
from .preferences import arithmetic, opened, opened_kto, opened_scores, opened_sft

STAGES = (
    "dpo fsdp",
    "dpo megatron",
    "reward_model fsdp",
    "reward_model megatron",
    "distill fsdp",
    "distill megatron",
    "sft fsdp",
    "sft megatron",
    "kto fsdp",
    "kto megatron",
)
"""Each stage's kind and backend."""
OPEN: dict[str, Callable[..., tuple[Stage, Backend]]] = {
    "dpo": opened,
    "reward_model": opened_scores,
    "distill": distilling.opened,
    "sft": opened_sft,
    "kto": opened_kto,
}
UNITS = 4
"""The number of records: the second step has one, which leaves a rank with none."""


def metrics(
    name: str, directory: Path, micro_batch_tokens: int = 40, prefix_sharing: PrefixSharing = "never"
) -> list[dict[str, float]]:
    """Return the metrics of each step of the stage."""
    torch.set_num_threads(1)
    seen: list[dict[str, float]] = []
    kind, backend_kind = name.split()
    of_records = {"options": {"held_out_records": 4, "data": arithmetic(UNITS + 4)}}
    of_units: dict[str, Any] = of_records if kind in ("reward_model", "sft", "kto") else {"units": UNITS}
    stage, _ = OPEN[kind](
        directory,
        micro_batch_tokens=micro_batch_tokens,
        prefix_sharing=prefix_sharing,
        backend_kind=backend_kind,
        report=lambda progress: seen.append({"loss": progress.loss, **progress.metrics}),
        **of_units,
    )
    assert stage.run()
    return seen


if __name__ == "__main__":
    directory = Path(sys.argv[1])
    found = {name: metrics(name, directory / name, prefix_sharing="always") for name in STAGES}
    (directory / f"rank_{dist.get_rank()}.json").write_bytes(msgspec.json.encode(found))
    dist.destroy_process_group()
