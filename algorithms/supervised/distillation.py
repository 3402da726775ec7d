"""Learning from a teacher's logprobs."""

import torch

from algorithms.metrics import Metrics, masked_mean
from algorithms.ratios import token_log_ratio
from algorithms.segments import trained


def reverse_kl_distillation(
    current_logprobs_T: torch.Tensor, teacher_logprobs_T: torch.Tensor, loss_mask_T: torch.Tensor
) -> tuple[torch.Tensor, Metrics]:
    """loss_t = sg(log pi(y_t) - log teacher(y_t)) log pi(y_t).

    sg stops the gradient. On samples of the student pi this is the policy gradient with advantage
    log teacher(y_t) - log pi(y_t): in expectation the gradient of KL(pi || teacher) at each prefix. Later tokens are
    not charged to earlier ones. On stale samples it needs an importance weight, like any policy gradient. The loss's
    value says little; watch the metric `reverse_kl`, the mean of log pi - log teacher.

    Source: Thinking Machines 2025, "On-Policy Distillation"; Agarwal et al. 2023 (GKD, arXiv:2306.13649), who sum the
    divergence over the whole vocabulary where this takes the sampled token's.
    """
    log_ratio_T = token_log_ratio(current_logprobs_T, teacher_logprobs_T, loss_mask_T).detach()
    losses_T = log_ratio_T * trained(current_logprobs_T, loss_mask_T)
    return losses_T, masked_mean("reverse_kl", log_ratio_T, loss_mask_T)
