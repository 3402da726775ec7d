"""Surrogate objectives: (logprobs, tokens) -> losses_T, to be minimized; nothing is aggregated here.

All have the signature of `TokenObjective`, which your own (`package.module:function` in a recipe) shares:

    f(current_logprobs_T, anchor_logprobs_T, tokens, **options) -> (losses_T, metrics)

    a bound silences the token        ppo_clip (token ratio), gspo, gspo_token (mean of a sequence),
                                      sequence_clip (product of a sequence), dppo (divergence)
    a bound limits its weight         cispo (token ratio), topr (sequence, A < 0 only)
    both, ratio flipped for A > 0     aspo
    a smooth gate                     sapo
    nothing                           unclipped (token ratio), policy_gradient (no ratio)

Losses of ours are 0 where the mask is 0 (`tokens.trained_advantages`); aggregation gives those no weight.

The invariant: a token's loss depends on its own sequence alone, so neither packing nor the number of ranks changes it.
"""

from collections.abc import Callable
from typing import Literal, Protocol

import torch

from .metrics import Metrics, masked_mean, share
from .ratios import gspo_token_ratio, sequence_ratio, token_log_ratio, token_ratio
from .tokens import Tokens, segment_mean, segment_sum, spread


class TokenObjective(Protocol):
    """A surrogate objective. Its options are further parameters, which have defaults and are passed by keyword."""

    def __call__(
        self, current_logprobs_T: torch.Tensor, anchor_logprobs_T: torch.Tensor, tokens: Tokens, /
    ) -> tuple[torch.Tensor, Metrics]:
        """Return the loss of each token [T], to be minimized, and metrics. Nothing is aggregated here.

        `current_logprobs_T` [T] have a gradient. `anchor_logprobs_T` [T] are the denominator of the ratio: the behavior
        policy's, or the proximal policy's. Losses must be finite where `tokens.loss_mask_T` is 0, whatever stands
        there. Metrics: pairs `NAME_sum`, `NAME_count` for means, as `masked_mean` makes them, and other names for
        maxima.
        """
        ...


def clipped_surrogate(
    ratio_T: torch.Tensor,
    tokens: Tokens,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float = 0.0,
) -> tuple[torch.Tensor, Metrics]:
    """loss_t = -min(r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t), and for A_t < 0 at most -dual_clip A_t.
    Shapes [T]; dual_clip 0 is none.

    Reports `clip_fraction`: trained tokens whose gradient a bound took away, so A > 0 above 1 + clip_high, A < 0
    below 1 - clip_low or above dual_clip.

    Source: PPO, Schulman et al. 2017 (arXiv:1707.06347), equation 7; two bounds: DAPO, Yu et al. 2025
    (arXiv:2503.14476), equation 10; dual clip: Ye et al. 2020 (arXiv:1912.09729), equation 5.
    """
    advantages_T = tokens.trained_advantages
    clipped_T = ratio_T.clamp(1 - clip_low, 1 + clip_high)
    losses_T = -torch.minimum(ratio_T * advantages_T, clipped_T * advantages_T)
    is_clipped_T = is_beyond(ratio_T, advantages_T, low=1 - clip_low, high=1 + clip_high)
    if dual_clip > 0:
        is_dual_T = (advantages_T < 0) & (ratio_T > dual_clip)
        losses_T = torch.where(is_dual_T, -dual_clip * advantages_T, losses_T)
        is_clipped_T = is_clipped_T | is_dual_T
    return losses_T, share("clip_fraction", is_clipped_T, tokens)


def is_beyond(ratio_T: torch.Tensor, advantages_T: torch.Tensor, *, low: float, high: float) -> torch.Tensor:
    """[T] bool: the update would move the ratio further out of [low, high] on the side where it already is."""
    return ((ratio_T > high) & (advantages_T > 0)) | ((ratio_T < low) & (advantages_T < 0))


def weighted_log_likelihood(weights_T: torch.Tensor, current_logprobs_T: torch.Tensor, tokens: Tokens) -> torch.Tensor:
    """[T] loss_t = -sg(w_t) A_t log pi(y_t); 0 and without gradient where the mask is 0. sg stops the gradient.

    With w_t = r_t its gradient is that of -r_t A_t, but no bound on w_t takes it away.
    """
    is_trained_T = tokens.loss_mask_T > 0
    logprobs_T = torch.where(is_trained_T, current_logprobs_T, torch.zeros_like(current_logprobs_T))
    return -weights_T.detach() * tokens.trained_advantages * logprobs_T


def ppo_clip(
    current_logprobs_T: torch.Tensor,
    anchor_logprobs_T: torch.Tensor,
    tokens: Tokens,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float = 0.0,
) -> tuple[torch.Tensor, Metrics]:
    """loss_t = -min(r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t), r_t = pi(y_t) / anchor(y_t);
    with dual_clip > 0, for A_t < 0 at most -dual_clip A_t.

    Anchored to the behavior policy it is a trust region around the sampler, which includes the importance weight;
    anchored to the proximal policy it limits one batch's updates and says nothing of lag. A token beyond its bound
    has no gradient. The dual clip bounds what a token with A < 0 and a large ratio can cost; without it that loss
    grows with the ratio.

    Source: PPO, Schulman et al. 2017 (arXiv:1707.06347), equation 7, with GRPO's sequence advantage
    (arXiv:2402.03300, equation 3). 0.2 is PPO's; DAPO (arXiv:2503.14476) takes clip_high 0.28. Dual clip: Ye et al.
    2020 (arXiv:1912.09729), equation 5, who take 3; verl has it on by default (clip_ratio_c 3), here it is off, as
    in PPO.
    """
    ratio_T = token_ratio(current_logprobs_T, anchor_logprobs_T, tokens.loss_mask_T)
    return clipped_surrogate(ratio_T, tokens, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)


def unclipped(
    current_logprobs_T: torch.Tensor,
    anchor_logprobs_T: torch.Tensor,
    tokens: Tokens,
) -> tuple[torch.Tensor, Metrics]:
    """loss_t = -r_t A_t, r_t = pi(y_t) / anchor(y_t).

    The importance-weighted policy gradient. It does not bound the ratio; combine it with a mask that does (`m2po`).
    Anchored to the behavior policy it includes the importance weight.

    Source: conservative policy iteration, Kakade and Langford 2002; PPO, Schulman et al. 2017 (arXiv:1707.06347),
    equation 6.
    """
    ratio_T = token_ratio(current_logprobs_T, anchor_logprobs_T, tokens.loss_mask_T)
    return -ratio_T * tokens.trained_advantages, {}


def sequence_clip(
    current_logprobs_T: torch.Tensor,
    anchor_logprobs_T: torch.Tensor,
    tokens: Tokens,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> tuple[torch.Tensor, Metrics]:
    """loss_t = -min(R_i A_i, clip(R_i, 1 - clip_low, 1 + clip_high) A_i) / |y_i|, R_i = pi(y_i) / anchor(y_i).

    R_i is the product of a sequence's token ratios, |y_i| its trained tokens. `sequence_sum` aggregation yields the
    mean of the sequences' surrogates and its gradient. A sequence is clipped as a whole, and the longer it is, the
    sooner: `gspo` takes the geometric mean. A_i is the mean of the advantages of the sequence's trained tokens.

    Source: the responses as single actions of RLOO, Ahmadian et al. 2024 (arXiv:2402.14740), section 3, under PPO's
    clip, Schulman et al. 2017 (arXiv:1707.06347), equation 7; TRL's RLOO has this loss.
    """
    mask_T, cu_seqlens = tokens.loss_mask_T, tokens.cu_seqlens
    ratio_S = sequence_ratio(current_logprobs_T, anchor_logprobs_T, mask_T, cu_seqlens)
    advantages_S = segment_mean(tokens.advantages_T, mask_T, cu_seqlens)
    of_sequence = tokens._replace(advantages_T=spread(advantages_S, cu_seqlens))
    losses_T, metrics = clipped_surrogate(
        spread(ratio_S, cu_seqlens), of_sequence, clip_low=clip_low, clip_high=clip_high
    )
    lengths_S = segment_sum((mask_T > 0).to(losses_T.dtype), cu_seqlens).clamp(min=1)
    return losses_T / spread(lengths_S, cu_seqlens), metrics


def gspo(
    current_logprobs_T: torch.Tensor,
    anchor_logprobs_T: torch.Tensor,
    tokens: Tokens,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> tuple[torch.Tensor, Metrics]:
    """loss_i = -min(s_i A_i, clip(s_i, 1 - clip_low, 1 + clip_high) A_i), s_i = (pi(y_i) / anchor(y_i)) ** (1 / |y_i|).

    A sequence is clipped as a whole. Every token has the loss in the form of equation 14, so that `sequence_mean`
    aggregation yields exactly equation 5 and its gradient; `token_mean` weights sequences by their length. A_i is
    the mean of the advantages of the sequence's trained tokens: the advantage itself where all share one;
    `gspo_token` keeps them apart. Anchor: pi_old in the paper, the policy that sampled; both anchors are possible.

    Source: GSPO, Zheng et al. 2025 (arXiv:2507.18071), equations 5 and 7; bounds of section 5.1.
    """
    advantages_S = segment_mean(tokens.advantages_T, tokens.loss_mask_T, tokens.cu_seqlens)
    of_sequence = tokens._replace(advantages_T=spread(advantages_S, tokens.cu_seqlens))
    return gspo_token(current_logprobs_T, anchor_logprobs_T, of_sequence, clip_low=clip_low, clip_high=clip_high)


def gspo_token(
    current_logprobs_T: torch.Tensor,
    anchor_logprobs_T: torch.Tensor,
    tokens: Tokens,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> tuple[torch.Tensor, Metrics]:
    """loss_t = -min(s_t A_t, clip(s_t, 1 - clip_low, 1 + clip_high) A_t), s_t = sg(s_i) pi(y_t) / sg(pi(y_t)),
    s_i = (pi(y_i) / anchor(y_i)) ** (1 / |y_i|).

    GSPO for advantages that differ within a sequence (per turn, per token): the ratio's value is the sequence's,
    the advantage and the gradient are the token's, so tokens of one sequence with advantages of opposite signs may
    be clipped differently. Where the advantages of a sequence are equal it is `gspo`. Anchor as there.

    Source: GSPO, Zheng et al. 2025 (arXiv:2507.18071), equations 13 and 14; bounds of section 5.1.
    """
    ratio_T = gspo_token_ratio(current_logprobs_T, anchor_logprobs_T, tokens.loss_mask_T, tokens.cu_seqlens)
    return clipped_surrogate(ratio_T, tokens, clip_low=clip_low, clip_high=clip_high)


def dppo(
    current_logprobs_T: torch.Tensor,
    anchor_logprobs_T: torch.Tensor,
    tokens: Tokens,
    *,
    divergence: Literal["tv", "kl"] = "tv",
    threshold: float = 0.15,
    cap: float = 20.0,
) -> tuple[torch.Tensor, Metrics]:
    """loss_t = -sg(m_t min(r_t, cap)) A_t log pi(y_t), r_t = pi(y_t) / anchor(y_t);
    m_t = 0 where D_t > threshold and the update moves further away (A_t > 0, r_t > 1 or A_t < 0, r_t < 1), else 1.

    sg stops the gradient. D_t compares "this token" with "any other" under both policies. With p = pi(y_t) and
    q = anchor(y_t): `tv` |p - q|, `kl` q log(q / p) + (1 - q) log((1 - q) / (1 - p)). So rare tokens may change
    their ratio much, and frequent ones little. Meant to be anchored to the behavior policy: the trust region is
    around the sampler. `clip_fraction`: trained tokens masked or at the cap.

    Source: DPPO, Qi et al. 2026, "Rethinking the trust region in LLM reinforcement learning" (arXiv:2602.04879),
    equations 11 to 14. 0.15 is for `tv`; with `kl` give 0.05 (both as TRL documents the paper's choice). The cap 20
    and the form of the loss are verl's; up to the cap the gradient is that of -m_t r_t A_t. prime-rl's default loss
    masks by p - q on the same side of A_t, beyond 0.2. The paper's top-k divergences need more than the sampled
    token's logprob and are not here.
    """
    ratio_T = token_ratio(current_logprobs_T, anchor_logprobs_T, tokens.loss_mask_T)
    with torch.no_grad():
        is_far_T = _DIVERGENCES[divergence](current_logprobs_T, anchor_logprobs_T) > threshold
        is_outward_T = torch.where(ratio_T > 1, tokens.advantages_T > 0, (ratio_T < 1) & (tokens.advantages_T < 0))
        is_masked_T = is_far_T & is_outward_T
    weights_T = torch.where(is_masked_T, torch.zeros_like(ratio_T), ratio_T.clamp(max=cap))
    losses_T = weighted_log_likelihood(weights_T, current_logprobs_T, tokens)
    return losses_T, share("clip_fraction", is_masked_T | (ratio_T > cap), tokens)


def _total_variation(logprobs_T: torch.Tensor, anchor_logprobs_T: torch.Tensor) -> torch.Tensor:
    return (_proper(logprobs_T).exp() - _proper(anchor_logprobs_T).exp()).abs()


def _kl(logprobs_T: torch.Tensor, anchor_logprobs_T: torch.Tensor) -> torch.Tensor:
    log_p_T, log_q_T = _proper(logprobs_T), _proper(anchor_logprobs_T)
    # log(1 - p) is computed as log(-expm1(log p)), which is exact where p is nearly 0 or 1.
    log_rest_p_T, log_rest_q_T = (-torch.expm1(log_p_T)).log(), (-torch.expm1(log_q_T)).log()
    return log_q_T.exp() * (log_q_T - log_p_T) + log_rest_q_T.exp() * (log_rest_q_T - log_rest_p_T)


def _proper(logprobs_T: torch.Tensor) -> torch.Tensor:
    """Returns logprobs in at least float32 and a little below 0, so that 1 - p has a logarithm."""
    return logprobs_T.to(torch.promote_types(logprobs_T.dtype, torch.float32)).clamp(max=-1e-7)


_DIVERGENCES = {"tv": _total_variation, "kl": _kl}


def sapo(
    current_logprobs_T: torch.Tensor,
    anchor_logprobs_T: torch.Tensor,
    tokens: Tokens,
    *,
    tau_positive: float = 1.0,
    tau_negative: float = 1.05,
) -> tuple[torch.Tensor, Metrics]:
    """loss_t = -(4 / tau) sigmoid(tau (r_t - 1)) A_t, r_t = pi(y_t) / anchor(y_t);
    tau = tau_positive for A_t > 0, else tau_negative.

    The gradient is that of -r_t A_t times 4 p (1 - p), p = sigmoid(tau (r_t - 1)): 1 at r_t = 1, fading on both
    sides, the faster the larger tau; so it fades also where PPO's clip would not act. Anchor: pi_old in the paper,
    the policy that sampled; both anchors are possible. Nothing is clipped; `gate` is the mean of that factor over
    trained tokens. The paper averages over each response's tokens, then over responses (`sequence_mean`).

    Source: SAPO, Gao et al. 2025 (arXiv:2511.20347), tau 1 and 1.05 as there and in Trinity and ms-swift.
    """
    ratio_T = token_ratio(current_logprobs_T, anchor_logprobs_T, tokens.loss_mask_T)
    advantages_T = tokens.trained_advantages
    tau_T = torch.full_like(ratio_T, tau_negative).masked_fill(advantages_T > 0, tau_positive)
    gate_T = torch.sigmoid(tau_T * (ratio_T - 1))
    losses_T = -4 / tau_T * gate_T * advantages_T
    return losses_T, masked_mean("gate", 4 * gate_T * (1 - gate_T), tokens.loss_mask_T)


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


def cispo(
    current_logprobs_T: torch.Tensor,
    anchor_logprobs_T: torch.Tensor,
    tokens: Tokens,
    *,
    clip_low: float = 1.0,
    clip_high: float = 4.0,
) -> tuple[torch.Tensor, Metrics]:
    """loss_t = -sg(clip(r_t, 1 - clip_low, 1 + clip_high)) A_t log pi(y_t), r_t = pi(y_t) / anchor(y_t).

    sg stops the gradient. Unlike PPO's clip, a bound limits a token's weight and never silences it, and it does not
    ask for the advantage's sign. Anchored to the behavior policy the weight is a truncated importance weight; beside
    it no other correction of the same ratio belongs. `clip_fraction`: trained tokens whose weight is at a bound.

    Source: MiniMax-M1, Chen et al. 2025 (arXiv:2506.13585), equations 4 and 5. The paper sets no lower bound, here
    clip_low 1, and tunes the upper one without giving it. ScaleRL (arXiv:2510.13786) truncates at 4, 5 or 8 and finds
    little difference; torchtitan's clip_high is 4 (a cap of 5), as here. Trinity's is 0.28. TRL's
    epsilon_high is the cap itself, 1 + clip_high here.
    """
    ratio_T = token_ratio(current_logprobs_T, anchor_logprobs_T, tokens.loss_mask_T)
    losses_T = weighted_log_likelihood(ratio_T.clamp(1 - clip_low, 1 + clip_high), current_logprobs_T, tokens)
    is_capped_T = (ratio_T < 1 - clip_low) | (ratio_T > 1 + clip_high)
    return losses_T, share("clip_fraction", is_capped_T, tokens)


def topr(
    current_logprobs_T: torch.Tensor,
    anchor_logprobs_T: torch.Tensor,
    tokens: Tokens,
    *,
    cap: float = 1.0,
) -> tuple[torch.Tensor, Metrics]:
    """loss_t = -sg(w_t) A_t log pi(y_t), w_t = 1 for A_t >= 0, else min(pi(y) / anchor(y), cap).

    sg stops the gradient; pi(y) / anchor(y) is the product of the token ratios over the trained tokens of the
    sequence, so a bad sample fades once the policy has left it, and the longer it is the faster. Meant to be anchored
    to the behavior policy, whatever its lag; no correction beside it. The paper's A is a reward, with or without a
    baseline. It sums over tokens: an aggregation that divides by each response's length is not the paper's.
    `clip_fraction`: trained tokens with A < 0 and a ratio above the cap.

    Source: TOPR, Le Roux et al. 2025 (arXiv:2503.14286), with its choice of bounds: positives not corrected, the ratio
    of negatives truncated to [0, 1].
    """
    ratio_S = sequence_ratio(current_logprobs_T, anchor_logprobs_T, tokens.loss_mask_T, tokens.cu_seqlens)
    ratio_T = spread(ratio_S, tokens.cu_seqlens)
    is_bad_T = tokens.advantages_T < 0
    weights_T = torch.where(is_bad_T, ratio_T.clamp(max=cap), torch.ones_like(ratio_T))
    losses_T = weighted_log_likelihood(weights_T, current_logprobs_T, tokens)
    return losses_T, share("clip_fraction", is_bad_T & (ratio_T > cap), tokens)


def aspo(
    current_logprobs_T: torch.Tensor,
    anchor_logprobs_T: torch.Tensor,
    tokens: Tokens,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float = 3.0,
) -> tuple[torch.Tensor, Metrics]:
    """loss_t = -sg(m_t min(w_t, dual_clip)) A_t log pi(y_t), w_t = 1 / r_t for A_t > 0, else r_t;
    m_t = 0 for A_t > 0 and r_t > 1 + clip_high, or A_t < 0 and r_t < 1 - clip_low, else 1; r_t = pi(y_t) / anchor(y_t).

    sg stops the gradient. The mask is PPO's clip; the flipped weight is not an importance weight and corrects no lag.
    Anchor: pi_old in the paper. The dual clip is soft: it limits the weight, the gradient stays. The gradient is the
    paper's; the value is that of the weighted log-likelihood that the paper shows to be equivalent. `clip_fraction`:
    trained tokens masked or at the dual clip.

    Source: ASPO, Wang et al. 2025 (arXiv:2510.06062), section 6 and equation 3 of version 2; the form of the loss is
    its proposition 4.1. 0.2 is of its appendix B. It names no number for the dual clip: 3 is that of its figure 4 and
    of Ye et al. 2020 (arXiv:1912.09729). The paper says soft of A > 0; here A < 0 is alike.
    """
    log_ratio_T = token_log_ratio(current_logprobs_T, anchor_logprobs_T, tokens.loss_mask_T)
    ratio_T = log_ratio_T.exp()
    flipped_T = torch.where(tokens.advantages_T > 0, -log_ratio_T, log_ratio_T).exp()
    is_masked_T = is_beyond(ratio_T, tokens.advantages_T, low=1 - clip_low, high=1 + clip_high)
    weights_T = torch.where(is_masked_T, torch.zeros_like(ratio_T), flipped_T.clamp(max=dual_clip))
    losses_T = weighted_log_likelihood(weights_T, current_logprobs_T, tokens)
    return losses_T, share("clip_fraction", is_masked_T | (flipped_T > dual_clip), tokens)


OBJECTIVES: dict[str, Callable[..., tuple[torch.Tensor, Metrics]]] = {
    "ppo_clip": ppo_clip,
    "gspo": gspo,
    "gspo_token": gspo_token,
    "sequence_clip": sequence_clip,
    "cispo": cispo,
    "topr": topr,
    "aspo": aspo,
    "sapo": sapo,
    "dppo": dppo,
    "unclipped": unclipped,
    "policy_gradient": policy_gradient,
}
IGNORES_ANCHOR = {"policy_gradient"}
"""Objectives whose loss is the same with any anchor: no proximal logprobs need be computed for them."""
