"""A critic's values of the states that a response went through."""

import torch

from headway.algorithms.metrics import Metrics, masked_mean
from headway.algorithms.segments import trained


def clipped_value_loss(
    values_T: torch.Tensor,
    old_values_T: torch.Tensor,
    returns_T: torch.Tensor,
    loss_mask_T: torch.Tensor,
    *,
    clip: float = 0.2,
) -> tuple[torch.Tensor, Metrics]:
    """loss_t = max((V_t - R_t)^2, (V_old_t + clip(V_t - V_old_t, -clip, clip) - R_t)^2) / 2.

    The critic's part of PPO: a value that has moved by more than `clip` since the batch was scored is no longer pulled
    towards the return. `clip` is in units of the return. Metric: `value_clip_fraction`, the share of trained tokens
    that lose their gradient by it.

    Source: OpenAI's PPO implementation (baselines, ppo2), not the paper; described in Engstrom et al. 2020
    (arXiv:2005.12729). 0.2 is the policy's clip, which that implementation shares, and torchtune's; verl takes 0.5.
    """
    values_T, old_values_T, returns_T = (trained(x, loss_mask_T) for x in (values_T, old_values_T, returns_T))
    moved_T = values_T - old_values_T
    errors_T = (values_T - returns_T) ** 2
    clipped_errors_T = (old_values_T + moved_T.clamp(-clip, clip) - returns_T) ** 2
    is_clipped_T = (moved_T.abs() > clip) & (clipped_errors_T > errors_T)
    losses_T = torch.maximum(errors_T, clipped_errors_T) / 2
    return losses_T, masked_mean("value_clip_fraction", is_clipped_T, loss_mask_T)
