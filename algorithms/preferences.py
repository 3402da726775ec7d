"""Losses of judged responses: of pairs (DPO and its kin, SimPO, ORPO), of single ones (KTO), of scores (reward models).

Sequence 2p of the row is the chosen response of pair p, sequence 2p + 1 the rejected one, so a row holds whole pairs.
Nothing is averaged here: the caller divides sums over pairs or responses by their number in the whole batch, so neither
packing nor the number of ranks changes a loss.

All losses of pairs have one signature, so that a caller can choose among `PREFERENCES` by name; losses are [P]:

    f(current_logprobs_T, reference_logprobs_T, loss_mask_T, cu_seqlens, **options) -> (losses_P, metrics)

The stage `dpo` trains them on pairs of files, the stage `rl` (`algorithm.preset: online_dpo`) on the best and the worst
response of each group that workers sample. The losses do not look at the policy that sampled a pair, so they do not
correct for its age: pairs of older weights are trained like new ones. A recipe may weigh each pair by
`corrections.weights.pair_truncated_is`, the truncated ratio of the current policy to the one that sampled it.

The losses in `REFERENCE_FREE` never look at `reference_logprobs_T`, which may be None there. The batch's loss is
sum(losses_P) / pairs, over the pairs of the whole batch.

A response y has a reward, of which only differences within a pair count; c is the chosen response, r the rejected one,
m_p = reward(c) - reward(r) the pair's margin. Metrics: `reward_chosen`, `reward_rejected` and `reward_margin`, means
over pairs; `reward_accuracy`, the share of pairs with m_p > 0; `logprob_chosen` and `logprob_rejected`, mean sums of
log pi over a response's trained tokens.

KTO compares a response's reward with a reference point, the estimated divergence of the policy from the reference
policy, which is one number for the whole batch. So a batch takes a pass without gradient before the loss:

    total, count = reference_point_sums(current_T, reference_T, mask_T, cu_seqlens)      of each micro-batch and rank
    point = reference_point_of(sum of the totals, sum of the counts)
    losses_S, metrics = kto(current_T, reference_T, mask_T, cu_seqlens, is_desirable_S, point)
"""

import math
from collections.abc import Callable

import torch
from torch.nn import functional as F

from .metrics import Metrics, masked_mean, mean
from .ratios import MAX_LOG_RATIO, token_log_ratio
from .returns import trained_ahead
from .tokens import segment_mean, segment_sum, spread, trained


def dpo(
    current_logprobs_T: torch.Tensor,
    reference_logprobs_T: torch.Tensor,
    loss_mask_T: torch.Tensor,
    cu_seqlens: torch.Tensor,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
) -> tuple[torch.Tensor, Metrics]:
    """loss_p = -(1 - label_smoothing) log sigmoid(m_p) - label_smoothing log sigmoid(-m_p), reward(y) = beta log pi(y)
    / reference(y).

    The logarithm is summed over a response's trained tokens. label_smoothing is the share of pairs believed to be
    labelled the wrong way round: above 0 the loss is conservative DPO, whose margin stops growing.

    Source: DPO, Rafailov et al. 2023 (arXiv:2305.18290), equation 7, smoothed as in Mitchell 2023, "A note on DPO with
    noisy preferences", equation 3. beta 0.1 is the paper's and TRL's default.
    """
    log_ratio_T = token_log_ratio(current_logprobs_T, reference_logprobs_T, loss_mask_T)
    rewards_S = beta * segment_sum(log_ratio_T, cu_seqlens)
    losses_P = _cross_entropy(margins(rewards_S), label_smoothing)
    return losses_P, preference_metrics(rewards_S, current_logprobs_T, loss_mask_T, cu_seqlens)


def ipo(
    current_logprobs_T: torch.Tensor,
    reference_logprobs_T: torch.Tensor,
    loss_mask_T: torch.Tensor,
    cu_seqlens: torch.Tensor,
    *,
    beta: float = 0.1,
) -> tuple[torch.Tensor, Metrics]:
    """loss_p = (m_p / beta - 1 / (2 beta))^2, reward(y) = beta / |y| log pi(y) / reference(y).

    Pulls the margin to a target instead of widening it without end, which DPO does on pairs that all agree. |y| is the
    number of trained tokens: TRL and torchtune take the mean over tokens after asking the authors, since otherwise the
    target would depend on length.

    Source: Azar et al. 2023 (arXiv:2310.12036), equation 17, which calls beta tau. 0.1 is TRL's default.
    """
    log_ratio_T = token_log_ratio(current_logprobs_T, reference_logprobs_T, loss_mask_T)
    log_ratio_S = segment_mean(log_ratio_T, loss_mask_T, cu_seqlens)
    losses_P = (margins(log_ratio_S) - 1 / (2 * beta)) ** 2
    return losses_P, preference_metrics(beta * log_ratio_S, current_logprobs_T, loss_mask_T, cu_seqlens)


def hinge(
    current_logprobs_T: torch.Tensor,
    reference_logprobs_T: torch.Tensor,
    loss_mask_T: torch.Tensor,
    cu_seqlens: torch.Tensor,
    *,
    beta: float = 0.1,
) -> tuple[torch.Tensor, Metrics]:
    """loss_p = max(0, 1 - m_p), reward(y) = beta log pi(y) / reference(y).

    A pair with a margin above 1 is learned and has no gradient.

    Source: RSO, Liu et al. 2023 (arXiv:2309.06657), after SLiC, Zhao et al. 2023 (arXiv:2305.10425). beta 0.1 is TRL's
    default.
    """
    log_ratio_T = token_log_ratio(current_logprobs_T, reference_logprobs_T, loss_mask_T)
    rewards_S = beta * segment_sum(log_ratio_T, cu_seqlens)
    losses_P = torch.relu(1 - margins(rewards_S))
    return losses_P, preference_metrics(rewards_S, current_logprobs_T, loss_mask_T, cu_seqlens)


def robust_dpo(
    current_logprobs_T: torch.Tensor,
    reference_logprobs_T: torch.Tensor,
    loss_mask_T: torch.Tensor,
    cu_seqlens: torch.Tensor,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.1,
) -> tuple[torch.Tensor, Metrics]:
    """loss_p = (-(1 - e) log sigmoid(m_p) + e log sigmoid(-m_p)) / (1 - 2 e), e = label_smoothing, reward(y) = beta
    log pi(y) / reference(y).

    If labels are flipped at random with probability e, its expectation is the DPO loss of the right labels. A pair's
    loss may be negative. Raises ValueError unless 0 <= label_smoothing < 0.5.

    Source: robust DPO, Chowdhury et al. 2024 (arXiv:2403.00409). beta 0.1 is DPO's. label_smoothing 0.1 is ours, since
    TRL's 0 is DPO: estimate it for your labels.
    """
    if not 0 <= label_smoothing < 0.5:
        raise ValueError(f"label_smoothing is {label_smoothing}; robust_dpo needs at least 0 and less than 0.5.")
    log_ratio_T = token_log_ratio(current_logprobs_T, reference_logprobs_T, loss_mask_T)
    rewards_S = beta * segment_sum(log_ratio_T, cu_seqlens)
    margins_P = margins(rewards_S)
    right_P, flipped_P = -F.logsigmoid(margins_P), -F.logsigmoid(-margins_P)
    losses_P = ((1 - label_smoothing) * right_P - label_smoothing * flipped_P) / (1 - 2 * label_smoothing)
    return losses_P, preference_metrics(rewards_S, current_logprobs_T, loss_mask_T, cu_seqlens)


def length_desensitized_dpo(
    current_logprobs_T: torch.Tensor,
    reference_logprobs_T: torch.Tensor,
    loss_mask_T: torch.Tensor,
    cu_seqlens: torch.Tensor,
    *,
    alpha: float,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
) -> tuple[torch.Tensor, Metrics]:
    """loss_p as in `dpo`, reward(y) = beta sum_t w_t log pi(y_t) / reference(y_t), w_t = 1 up to the length of the
    shorter response of the pair, alpha beyond.

    Takes from the longer response's tail part of its weight, since DPO otherwise learns to answer at length. 1 is DPO,
    0 ignores the tail. Lengths count trained tokens.

    Source: LD-DPO, Liu et al. 2024 (arXiv:2409.06411). No default: the paper tunes alpha for each model, and TRL's
    `ld_alpha` has none. beta 0.1 is DPO's.
    """
    log_ratio_T = token_log_ratio(current_logprobs_T, reference_logprobs_T, loss_mask_T)
    weighted_T = torch.where(_is_shared(loss_mask_T, cu_seqlens), log_ratio_T, alpha * log_ratio_T)
    rewards_S = beta * segment_sum(weighted_T, cu_seqlens)
    losses_P = _cross_entropy(margins(rewards_S), label_smoothing)
    return losses_P, preference_metrics(rewards_S, current_logprobs_T, loss_mask_T, cu_seqlens)


def simpo(
    current_logprobs_T: torch.Tensor,
    reference_logprobs_T: torch.Tensor | None,
    loss_mask_T: torch.Tensor,
    cu_seqlens: torch.Tensor,
    *,
    beta: float = 2.0,
    gamma: float = 1.0,
) -> tuple[torch.Tensor, Metrics]:
    """loss_p = -log sigmoid(m_p - gamma), reward(y) = beta / |y| log pi(y).

    Needs no reference policy. The reward is the mean logprob of the trained tokens, by which sampling itself ranks
    responses, so it does not favor long ones. gamma is the margin that a pair should reach, in units of the reward.

    Source: SimPO, Meng et al. 2024 (arXiv:2405.14734), equation 6. 2.0 and 1.0 are the paper's for Llama-3-8B-Base; it
    takes beta 2.0 to 2.5 and gamma 0.3 to 1.6, TRL 0.1 and 0.5.
    """
    rewards_S = beta * segment_mean(current_logprobs_T, loss_mask_T, cu_seqlens)
    losses_P = -F.logsigmoid(margins(rewards_S) - gamma)
    return losses_P, preference_metrics(rewards_S, current_logprobs_T, loss_mask_T, cu_seqlens)


def orpo(
    current_logprobs_T: torch.Tensor,
    reference_logprobs_T: torch.Tensor | None,
    loss_mask_T: torch.Tensor,
    cu_seqlens: torch.Tensor,
    *,
    beta: float = 0.1,
    nll_length: float | None = None,
) -> tuple[torch.Tensor, Metrics]:
    """loss_p = -sum_t log pi(c_t) / nll_length - beta log sigmoid(o_c - o_r), o_y = log(P_y / (1 - P_y)), log P_y the
    mean of log pi(y_t); reward(y) = beta log P_y.

    Supervised training on the chosen response and a preference in one stage, without a reference policy. `nll_length`:
    None divides by the chosen response's own trained tokens, as the paper does; the mean number of chosen trained
    tokens over all pairs of the whole batch makes the first term the mean over its tokens, as in TRL (which counts the
    prompt's tokens, too). log P_y is at most -exp(-20), so that o_y is finite. More metrics: `chosen_nll`, that term,
    and `log_odds_ratio`, o_c - o_r.

    Source: ORPO, Hong et al. 2024 (arXiv:2403.07691), equations 3, 4, 6 and 7, which calls beta lambda. 0.1 is the
    paper's for Mistral, and TRL's default.
    """
    means_S = segment_mean(current_logprobs_T, loss_mask_T, cu_seqlens)
    nll_P = -means_S[0::2]
    if nll_length is not None:
        nll_P = -segment_sum(trained(current_logprobs_T, loss_mask_T), cu_seqlens)[0::2] / nll_length
    log_odds_ratio_P = margins(_log_odds(means_S))
    losses_P = nll_P - beta * F.logsigmoid(log_odds_ratio_P)
    metrics = preference_metrics(beta * means_S, current_logprobs_T, loss_mask_T, cu_seqlens)
    return losses_P, {**metrics, **mean("chosen_nll", nll_P), **mean("log_odds_ratio", log_odds_ratio_P)}


def margins(values_S: torch.Tensor) -> torch.Tensor:
    """[P] the chosen response's value less the rejected one's."""
    return values_S[0::2] - values_S[1::2]


def preference_metrics(
    rewards_S: torch.Tensor, current_logprobs_T: torch.Tensor, loss_mask_T: torch.Tensor, cu_seqlens: torch.Tensor
) -> Metrics:
    """Returns the metrics that all losses of pairs have: see the module."""
    logprobs_S = segment_sum(trained(current_logprobs_T.detach(), loss_mask_T), cu_seqlens)
    margins_P = margins(rewards_S)
    return {
        **mean("reward_chosen", rewards_S[0::2]),
        **mean("reward_rejected", rewards_S[1::2]),
        **mean("reward_margin", margins_P),
        **mean("reward_accuracy", margins_P > 0),
        **mean("logprob_chosen", logprobs_S[0::2]),
        **mean("logprob_rejected", logprobs_S[1::2]),
    }


def _cross_entropy(margins_P: torch.Tensor, label_smoothing: float) -> torch.Tensor:
    """[P] between the label, smoothed, and the preference that the margin says."""
    return -(1 - label_smoothing) * F.logsigmoid(margins_P) - label_smoothing * F.logsigmoid(-margins_P)


def _is_shared(loss_mask_T: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """[T] True up to the trained token whose number in its response is the length of the pair's shorter response."""
    lengths_S = segment_sum((loss_mask_T > 0).long(), cu_seqlens)
    shorter_S = torch.minimum(lengths_S[0::2], lengths_S[1::2]).repeat_interleave(2)
    return trained_ahead(loss_mask_T, cu_seqlens) >= spread(lengths_S - shorter_S, cu_seqlens)


def _log_odds(means_S: torch.Tensor) -> torch.Tensor:
    """[S] log(P / (1 - P)) of log P."""
    means_S = means_S.clamp(max=-math.exp(-MAX_LOG_RATIO))
    return means_S - torch.log(-torch.expm1(means_S))


PREFERENCES: dict[str, Callable[..., tuple[torch.Tensor, Metrics]]] = {
    "dpo": dpo,
    "ipo": ipo,
    "hinge": hinge,
    "robust_dpo": robust_dpo,
    "length_desensitized_dpo": length_desensitized_dpo,
    "simpo": simpo,
    "orpo": orpo,
}
REFERENCE_FREE = {"simpo", "orpo"}
"""Losses without a reference policy: no logprobs of one need be computed for them."""


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


def bradley_terry(
    scores_S: torch.Tensor, *, margin: float | torch.Tensor = 0.0, centering: float = 0.0
) -> tuple[torch.Tensor, Metrics]:
    """loss_p = -log sigmoid(s_c - s_r - margin_p) + centering (s_c + s_r)^2, s_c and s_r the scores of pair p.

    Trains a reward model from the scores of whole responses; losses are [P]. `margin`: one number for all pairs, or
    [P], such as a rating of how much better the chosen response is. `centering` keeps the scores of a pair near 0 on
    average, which their difference alone leaves open. Metrics: `score_chosen` and `score_rejected`, the mean scores;
    `score_margin`, the mean difference; `score_accuracy`, the share of pairs in which the chosen response scores
    higher.

    Source: Bradley and Terry 1952; InstructGPT, Ouyang et al. 2022 (arXiv:2203.02155), equation 1; the margin: Llama 2,
    Touvron et al. 2023 (arXiv:2307.09288), section 3.2.2; centering: Eisenstein et al. 2023 (arXiv:2312.09244),
    equation 2. Both are 0, which is none, as in TRL, which recommends 0.01 for centering.
    """
    chosen_P, rejected_P = scores_S[0::2], scores_S[1::2]
    gaps_P = chosen_P - rejected_P
    losses_P = -F.logsigmoid(gaps_P - margin) + centering * (chosen_P + rejected_P) ** 2
    metrics = {**mean("score_chosen", chosen_P), **mean("score_rejected", rejected_P)}
    return losses_P, {**metrics, **mean("score_margin", gaps_P), **mean("score_accuracy", gaps_P > 0)}
