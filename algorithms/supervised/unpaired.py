"""Losses of single responses that are desirable or not: KTO.

KTO compares a response's reward with a reference point, the estimated divergence of the policy from the reference
policy, which is one number for the whole batch. So a batch takes a pass without gradient before the loss:

    total, count = reference_point_sums(current_T, reference_T, mask_T, cu_seqlens)      of each micro-batch and rank
    point = reference_point_of(sum of the totals, sum of the counts)
    losses_S, metrics = kto(current_T, reference_T, mask_T, cu_seqlens, is_desirable_S, point)
"""

import torch

from headway.algorithms.metrics import Metrics, masked_mean, mean
from headway.algorithms.ratios import token_log_ratio
from headway.algorithms.segments import segment_sum, trained


def kto(
    current_logprobs_T: torch.Tensor,
    reference_logprobs_T: torch.Tensor,
    loss_mask_T: torch.Tensor,
    cu_seqlens: torch.Tensor,
    is_desirable_S: torch.Tensor,
    reference_point: float,
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> tuple[torch.Tensor, Metrics]:
    """loss_i = desirable_weight (1 - sigmoid(beta (x_i - z))) of a desirable response, undesirable_weight (1 -
    sigmoid(beta (z - x_i))) of another; x_i = log pi(y_i) / reference(y_i), z the reference point.

    Learns from single judgements, without pairs; losses are [S]. `is_desirable_S` is [S], boolean. `reference_point`:
    `reference_point_of` the whole batch. The batch's loss is sum(losses_S) / responses. The weights make up for unequal
    numbers: desirable_weight times the desirable responses should be as much as, or a little more than,
    undesirable_weight times the undesirable ones.

    Metrics, means over the responses of each kind: `reward_desirable` and `reward_undesirable` (beta x),
    `logprob_desirable` and `logprob_undesirable` (log pi, summed over a response). `reward_accuracy` is the share of
    responses on the right side of the reference point.

    Source: KTO, Ethayarajh et al. 2024 (arXiv:2402.01306), section 4. beta 0.1 and weights of 1 are the paper's and
    TRL's defaults.
    """
    log_ratio_T = token_log_ratio(current_logprobs_T, reference_logprobs_T, loss_mask_T)
    rewards_S = beta * segment_sum(log_ratio_T, cu_seqlens)
    is_desirable_S = is_desirable_S.bool()
    gains_S = rewards_S - beta * reference_point
    gains_S = torch.where(is_desirable_S, gains_S, -gains_S)
    kept_S = torch.sigmoid(-gains_S)  # 1 - sigmoid(gain), which would round to 0 much sooner
    losses_S = torch.where(is_desirable_S, desirable_weight * kept_S, undesirable_weight * kept_S)
    logprobs_S = segment_sum(trained(current_logprobs_T.detach(), loss_mask_T), cu_seqlens)
    metrics = {**_by_kind("reward", rewards_S, is_desirable_S), **_by_kind("logprob", logprobs_S, is_desirable_S)}
    return losses_S, {**metrics, **mean("reward_accuracy", gains_S > 0)}


def reference_point_sums(
    current_logprobs_T: torch.Tensor,
    reference_logprobs_T: torch.Tensor,
    loss_mask_T: torch.Tensor,
    cu_seqlens: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(sum of log pi(y) / reference(y), number) over the sequences of a row: two float64 scalars without gradient.

    The sums of micro-batches and ranks add up to those of the batch. The sequences should be prompts with responses to
    other prompts: the paper and TRL give each prompt the response of its neighbor in the batch, which estimates the
    divergence without rewarding it. A sequence without trained tokens does not count.
    """
    log_ratio_T = token_log_ratio(current_logprobs_T.detach(), reference_logprobs_T, loss_mask_T)
    is_trained_S = segment_sum((loss_mask_T > 0).long(), cu_seqlens) > 0
    return log_ratio_T.double().sum(), is_trained_S.double().sum()


def reference_point_of(total: float | torch.Tensor, count: float | torch.Tensor) -> float:
    """z = max(0, total / count), `reference_point_sums` of the whole batch; 0 for an empty batch.

    Source: KTO, Ethayarajh et al. 2024 (arXiv:2402.01306), section 4.
    """
    return max(0.0, float(total) / max(float(count), 1.0))


def _by_kind(name: str, values_S: torch.Tensor, is_desirable_S: torch.Tensor) -> Metrics:
    """Returns the means over desirable and over undesirable responses."""
    is_desirable_S = is_desirable_S.to(values_S.dtype)
    return {
        **masked_mean(f"{name}_desirable", values_S, is_desirable_S),
        **masked_mean(f"{name}_undesirable", values_S, 1 - is_desirable_S),
    }
