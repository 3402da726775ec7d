"""Losses on labelled data, on the same packed rows: imitation, preferences, values, a teacher.

Functions of tokens return losses_T [T], 0 where the mask is 0, to be aggregated as an objective's are. Functions of
pairs return losses_P [P], one per pair: sequence 2p of the row is the chosen response of pair p, sequence 2p + 1 the
rejected one, so a row holds whole pairs. Logarithms of ratios are clamped per token as in `algorithms.ratios`.
"""

from collections.abc import Callable
from typing import Literal

import torch
from torch.nn import functional as F

from .metrics import Metrics, masked_mean
from .ratios import token_log_ratio
from .segments import segment_mean, segment_sum


def sft(current_logprobs_T: torch.Tensor, loss_mask_T: torch.Tensor) -> torch.Tensor:
    """loss_t = -log pi(y_t).

    Cross-entropy with the given tokens. `token_mean` aggregation is the usual loss of a batch.

    Source: maximum likelihood; supervised fine-tuning as in InstructGPT, Ouyang et al. 2022 (arXiv:2203.02155).
    """
    return -_trained(current_logprobs_T, loss_mask_T)


def dpo(
    current_logprobs_T: torch.Tensor,
    reference_logprobs_T: torch.Tensor,
    loss_mask_T: torch.Tensor,
    cu_seqlens: torch.Tensor,
    *,
    beta: float = 0.1,
    kind: Literal["sigmoid", "ipo", "hinge"] = "sigmoid",
    label_smoothing: float = 0.0,
) -> tuple[torch.Tensor, Metrics]:
    """sigmoid: loss_p = -(1 - label_smoothing) log sigmoid(beta h_p) - label_smoothing log sigmoid(-beta h_p);
    ipo: (h_p - 1 / (2 beta))^2; hinge: max(0, 1 - beta h_p); h_p = x_chosen - x_rejected, x = log pi(y) / reference(y).

    x is the sum over a response's trained tokens; for `ipo` it is their mean, as TRL and torchtune compute it after
    asking the authors: otherwise the target 1 / (2 beta) would depend on length. label_smoothing is the share of pairs
    believed to be labelled the wrong way round; only `sigmoid` uses it. Metrics: `reward_margin` beta h_p and
    `reward_accuracy`, the share of pairs with h_p > 0.

    Source: sigmoid: DPO, Rafailov et al. 2023 (arXiv:2305.18290), equation 7, smoothed as in Mitchell 2023, "A note on
    DPO with noisy preferences", equation 3; ipo: Azar et al. 2023 (arXiv:2310.12036), equation 17; hinge: RSO, Liu et
    al. 2023 (arXiv:2309.06657), after SLiC, Zhao et al. 2023 (arXiv:2305.10425). beta 0.1 is DPO's and TRL's default.
    """
    log_ratio_T = token_log_ratio(current_logprobs_T, reference_logprobs_T, loss_mask_T)
    if kind == "ipo":
        log_ratio_S = segment_mean(log_ratio_T, loss_mask_T, cu_seqlens)
    else:
        log_ratio_S = segment_sum(log_ratio_T, cu_seqlens)
    gaps_P = log_ratio_S[0::2] - log_ratio_S[1::2]
    losses_P = _PREFERENCE_LOSSES[kind](gaps_P, beta, label_smoothing)
    return losses_P, _preferences("reward", beta * gaps_P)


def bradley_terry(scores_S: torch.Tensor, *, margin: float = 0.0) -> tuple[torch.Tensor, Metrics]:
    """loss_p = -log sigmoid(score_chosen - score_rejected - margin).

    Trains a reward model from the scores of whole responses. Metrics: `score_margin`, the mean difference, and
    `score_accuracy`, the share of pairs in which the chosen response scores higher.

    Source: Bradley and Terry 1952; InstructGPT, Ouyang et al. 2022 (arXiv:2203.02155), equation 1; the margin: Llama 2,
    Touvron et al. 2023 (arXiv:2307.09288), section 3.2.2, there one per pair, here one for all, and 0 is none.
    """
    gaps_P = scores_S[0::2] - scores_S[1::2]
    return -F.logsigmoid(gaps_P - margin), _preferences("score", gaps_P)


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
    values_T, old_values_T, returns_T = (_trained(x, loss_mask_T) for x in (values_T, old_values_T, returns_T))
    moved_T = values_T - old_values_T
    errors_T = (values_T - returns_T) ** 2
    clipped_errors_T = (old_values_T + moved_T.clamp(-clip, clip) - returns_T) ** 2
    is_clipped_T = (moved_T.abs() > clip) & (clipped_errors_T > errors_T)
    losses_T = torch.maximum(errors_T, clipped_errors_T) / 2
    return losses_T, masked_mean("value_clip_fraction", is_clipped_T, loss_mask_T)


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
    losses_T = log_ratio_T * _trained(current_logprobs_T, loss_mask_T)
    return losses_T, masked_mean("reverse_kl", log_ratio_T, loss_mask_T)


def _trained(values_T: torch.Tensor, loss_mask_T: torch.Tensor) -> torch.Tensor:
    """[T] the values where the mask is 1; 0 and no gradient elsewhere, whatever stands there."""
    return torch.where(loss_mask_T > 0, values_T, torch.zeros_like(values_T))


def _preferences(name: str, gaps_P: torch.Tensor) -> Metrics:
    one_P = torch.ones_like(gaps_P)
    return {**masked_mean(f"{name}_margin", gaps_P, one_P), **masked_mean(f"{name}_accuracy", gaps_P > 0, one_P)}


def _sigmoid(gaps_P: torch.Tensor, beta: float, label_smoothing: float) -> torch.Tensor:
    right_P, wrong_P = F.logsigmoid(beta * gaps_P), F.logsigmoid(-beta * gaps_P)
    return -(1 - label_smoothing) * right_P - label_smoothing * wrong_P


def _ipo(gaps_P: torch.Tensor, beta: float, label_smoothing: float) -> torch.Tensor:
    return (gaps_P - 1 / (2 * beta)) ** 2


def _hinge(gaps_P: torch.Tensor, beta: float, label_smoothing: float) -> torch.Tensor:
    return torch.relu(1 - beta * gaps_P)


_PREFERENCE_LOSSES: dict[str, Callable[[torch.Tensor, float, float], torch.Tensor]] = {
    "sigmoid": _sigmoid,
    "ipo": _ipo,
    "hinge": _hinge,
}
