"""Plain policy gradient: no ratio, no clip."""

import torch

from headway.algorithms.metrics import Metrics
from headway.algorithms.tokens import Tokens

from .clipping import weighted_log_likelihood


def policy_gradient(
    current_logprobs_T: torch.Tensor,
    anchor_logprobs_T: torch.Tensor,
    tokens: Tokens,
) -> tuple[torch.Tensor, Metrics]:
    """loss_t = -A_t log pi(y_t).

    The anchor plays no part; off-policy it is biased without a correction.

    Source: REINFORCE, Williams 1992; Sutton et al. 2000.
    """
    return weighted_log_likelihood(torch.ones_like(current_logprobs_T), current_logprobs_T, tokens), {}
