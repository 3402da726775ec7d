"""Tokens that the policy learns to repeat."""

import torch

from headway.algorithms.segments import trained


def sft(current_logprobs_T: torch.Tensor, loss_mask_T: torch.Tensor) -> torch.Tensor:
    """loss_t = -log pi(y_t).

    Cross-entropy with the given tokens. `token_mean` aggregation is the usual loss of a batch.

    Source: maximum likelihood; supervised fine-tuning as in InstructGPT, Ouyang et al. 2022 (arXiv:2203.02155).
    """
    return -trained(current_logprobs_T, loss_mask_T)
