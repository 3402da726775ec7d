"""Plain policy gradient: no ratio, no clip."""

import torch

from algorithms.metrics import Metrics
from algorithms.segments import spread


def policy_gradient(
    current_logprobs_T: torch.Tensor,
    anchor_logprobs_T: torch.Tensor,
    advantages_S: torch.Tensor,
    loss_mask_T: torch.Tensor,
    cu_seqlens: torch.Tensor,
) -> tuple[torch.Tensor, Metrics]:
    """loss_t = -A log pi(y_t). The anchor plays no part; off-policy it is biased without a correction.

    Source: REINFORCE, Williams 1992; Sutton et al. 2000.
    """
    logprobs_T = torch.where(loss_mask_T > 0, current_logprobs_T, torch.zeros_like(current_logprobs_T))
    return -spread(advantages_S, cu_seqlens) * logprobs_T, {}
