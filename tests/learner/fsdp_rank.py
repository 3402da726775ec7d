"""One rank of a learner, run by torchrun: two steps, then what came out of them into a directory.

python -m torch.distributed.run --nproc-per-node 2 fsdp_rank.py DIRECTORY ARCHITECTURE
"""

import sys
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from safetensors.torch import save_file

from learner.backends import open_backend
from learner.packing import pack
from tests.learner.tiny import OPTIMIZER, model_config, ratio_loss, sequences

LENGTHS = [90, 6, 7, 19, 11, 3, 25, 14]
BUDGET = 30


def two_steps(architecture: str, directory: Path) -> None:
    torch.set_num_threads(1)
    backend = open_backend("fsdp", model_config(architecture), OPTIMIZER, seed=3)
    results = []
    for step in range(2):
        packable = sequences(LENGTHS, seed=step)
        batches = pack(packable, backend.rank, backend.world_size, BUDGET)
        denominator = float(sum(s.loss_mask.sum() for s in packable))
        loss, norm, reports = backend.step(batches, ratio_loss(batches, denominator), 0.9, 1e-3)
        empty = sum(batch.num_sequences == 0 for batch in batches)
        results.append({"loss": loss, "norm": norm, "reports": len(reports), "empty": empty})
    tensors = {name: tensor.clone() for name, tensor in backend.named_tensors()}
    backend.save(directory / "checkpoint")
    (directory / f"rank_{backend.rank}.json").write_bytes(msgspec.json.encode(results))
    if backend.rank == 0:
        save_file(tensors, directory / "tensors.safetensors")
    dist.destroy_process_group()


if __name__ == "__main__":
    two_steps(sys.argv[2], Path(sys.argv[1]))
