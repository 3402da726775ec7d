"""One rank of two that hold halves of a vocabulary, run by torchrun: logprobs and gradients into a directory.

python -m torch.distributed.run --nproc-per-node 2 -m tests.learner.token_logprobs_rank DIRECTORY ROWS
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from learner.backends.token_logprobs import token_logprobs
from tests.learner.test_token_logprobs import VOCABULARY, given


def main(directory: Path, padded: int) -> None:
    dist.init_process_group("gloo")
    rank, rows = dist.get_rank(), padded // 2
    hidden_TH, weight_VH, targets_T, pull_T = given(padded)
    mine = weight_VH.detach()[rank * rows : (rank + 1) * rows].clone().requires_grad_()
    logprobs_T = token_logprobs(
        hidden_TH,
        mine,
        targets_T,
        0.7,
        group=dist.group.WORLD,
        first=rank * rows,
        vocabulary=VOCABULARY,
        logits_per_chunk=7 * rows,
    )
    hidden_grad, weight_grad = torch.autograd.grad(logprobs_T, (hidden_TH, mine), pull_T)
    results = {"logprobs": logprobs_T.detach(), "hidden": hidden_grad, "weight": weight_grad}
    save_file(results, directory / f"rank_{rank}.safetensors")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
