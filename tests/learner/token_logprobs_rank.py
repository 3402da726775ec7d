"""One rank of two that hold halves of a vocabulary, run by torchrun: it writes logprobs and gradients to a directory.

python -m torch.distributed.run --nproc-per-node 2 -m tests.learner.token_logprobs_rank DIRECTORY ROWS
"""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from headway.learner.backends.token_logprobs import candidate_logprobs, confident_logprobs, likeliest, token_logprobs
from tests.learner.test_candidate_logprobs import CANDIDATES, chosen
from tests.learner.test_token_logprobs import VOCABULARY, given, gradients_with_entropy


def main(directory: Path, padded: int) -> None:
    dist.init_process_group("gloo")
    rank, rows = dist.get_rank(), padded // 2
    hidden_TH, weight_VH, targets_T, pull_T = given(padded)
    mine = weight_VH.detach()[rank * rows : (rank + 1) * rows].clone().requires_grad_()
    options: dict[str, Any] = {
        "group": dist.group.WORLD,
        "first": rank * rows,
        "vocabulary": VOCABULARY,
        "logits_per_chunk": 7 * rows,
    }
    logprobs_T = token_logprobs(hidden_TH, mine, targets_T, 0.7, **options)
    hidden_grad, weight_grad = torch.autograd.grad(logprobs_T, (hidden_TH, mine), pull_T)
    found_T3 = confident_logprobs(hidden_TH, mine, targets_T, 0.7, **options)
    confidence = found_T3[:, 1:].detach().contiguous()
    results = {"logprobs": logprobs_T.detach(), "hidden": hidden_grad, "weight": weight_grad, "confidence": confidence}
    results |= gradients_with_entropy(found_T3[:, 0], found_T3[:, 2], hidden_TH, mine, pull_T)
    save_file(results, directory / f"rank_{rank}.safetensors")
    candidates_TK, pull_TK = chosen()
    logprobs_TK = candidate_logprobs(hidden_TH, mine, candidates_TK, 0.7, **options)
    hidden_grad, weight_grad = torch.autograd.grad(logprobs_TK, (hidden_TH, mine), pull_TK)
    found = likeliest(hidden_TH, mine, CANDIDATES, 0.7, **options)
    results = {"logprobs": logprobs_TK.detach(), "hidden": hidden_grad, "weight": weight_grad, "likeliest": found}
    save_file(results, directory / f"candidates_{rank}.safetensors")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
