"""An objective: it makes a loss of a step's samples."""

import torch

from headway.algorithms.metrics import Metrics, masked_mean
from headway.algorithms.tokens import Tokens


def clipped(
    current_logprobs_T: torch.Tensor, anchor_logprobs_T: torch.Tensor, tokens: Tokens, *, clip: float = 0.2
) -> tuple[torch.Tensor, Metrics]:
    """PPO's loss: a token's ratio earns nothing beyond 1 - clip and 1 + clip. `clip` is one of the options.

    The loss is finite where the mask is 0, whatever stands there.
    """
    log_ratio_T = torch.where(tokens.loss_mask_T > 0, current_logprobs_T - anchor_logprobs_T, 0.0)
    ratio_T, advantages_T = log_ratio_T.exp(), tokens.trained_advantages
    free_T, bounded_T = ratio_T * advantages_T, ratio_T.clamp(1 - clip, 1 + clip) * advantages_T
    return -torch.minimum(free_T, bounded_T), masked_mean("clipped", bounded_T < free_T, tokens.loss_mask_T)
