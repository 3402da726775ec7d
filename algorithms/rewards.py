"""Terms that are added to a reward before it becomes an advantage: length and distance from the reference policy.

Rewards, lengths (tokens of the response) and penalties are [S], KL estimates (`algorithms.ratios`) [T]. Nothing here
has a gradient. Results have the dtype of the rewards; the penalty, which is given none, is float64.
"""

import torch

from .returns import trained_ahead
from .tokens import segment_sum, spread


def overlong_penalty(lengths_S: torch.Tensor, *, limit: int, buffer: int) -> torch.Tensor:
    """p_i = 0 if |y_i| <= limit - buffer, -1 if |y_i| > limit, else (limit - buffer - |y_i|) / buffer.

    The penalty is added to the reward, so that it falls already as a response nears the limit. With buffer 0 only
    responses over the limit are punished. verl multiplies by a factor and goes on below -1; here it stays at -1.

    Source: soft overlong punishment of DAPO, Yu et al. 2025 (arXiv:2503.14476), equation 13; limit 20480 and
    buffer 4096 there.
    """
    return ((limit - buffer - lengths_S.double()) / max(buffer, 1)).clamp(-1, 0)


def length_normalized(rewards_S: torch.Tensor, lengths_S: torch.Tensor, *, unit: float = 1.0) -> torch.Tensor:
    """r_i' = unit * r_i / |y_i|: reward per token, or per `unit` tokens.

    Of two right responses the shorter is better; of two wrong ones with negative reward the longer. With unit 1
    rewards are about as small as the epsilon of `group_mean_std`, which then shrinks the advantages: take a unit
    near the usual length, or an advantage without std.

    Source: token efficiency, by which GFPO chooses the responses that it trains on, Shrivastava et al. 2025
    (arXiv:2508.09726); here it is the reward itself.
    """
    return unit * rewards_S.detach() / lengths_S.clamp(min=1).to(rewards_S.dtype)


def kl_shaped(
    rewards_S: torch.Tensor,
    kl_T: torch.Tensor,
    loss_mask_T: torch.Tensor,
    cu_seqlens: torch.Tensor,
    *,
    coefficient: float,
) -> torch.Tensor:
    """r_i' = r_i - coefficient * sum_t kl_t, over the trained tokens of sequence i.

    The KL penalty in the reward, for advantages of whole sequences. In the published penalty kl_t is `kl.k1` of the
    policy that sampled.

    Source: Ziegler et al. 2019 (arXiv:1909.08593), section 2; InstructGPT, Ouyang et al. 2022 (arXiv:2203.02155),
    equation 2. InstructGPT's coefficient is 0.02.
    """
    return rewards_S.detach() - coefficient * segment_sum(_trained_kl(kl_T, loss_mask_T, rewards_S), cu_seqlens)


def kl_shaped_tokens(
    rewards_S: torch.Tensor,
    kl_T: torch.Tensor,
    loss_mask_T: torch.Tensor,
    cu_seqlens: torch.Tensor,
    *,
    coefficient: float,
) -> torch.Tensor:
    """r_t = -coefficient * kl_t, and r_i more at the last trained token of sequence i; 0 where the mask is 0.

    For `returns.gae` and `returns.returns_to_go`. A sequence's token rewards sum to its `kl_shaped` reward; one
    without trained tokens has nowhere to put its reward.

    Source: Ziegler et al. 2019 (arXiv:1909.08593); PPO for language models in InstructGPT, verl, TRL and OpenRLHF;
    REINFORCE++, Hu et al. 2025 (arXiv:2501.03262).
    """
    outcomes_T = at_last_trained(spread(rewards_S.detach(), cu_seqlens), loss_mask_T, cu_seqlens)
    return outcomes_T - coefficient * _trained_kl(kl_T, loss_mask_T, rewards_S)


def at_last_trained(values_T: torch.Tensor, loss_mask_T: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """[T] v_t at the last trained token of each sequence, 0 elsewhere."""
    is_last_T = (loss_mask_T > 0) & (trained_ahead(loss_mask_T, cu_seqlens) == 0)
    return torch.where(is_last_T, values_T, torch.zeros_like(values_T))


def _trained_kl(kl_T: torch.Tensor, loss_mask_T: torch.Tensor, rewards_S: torch.Tensor) -> torch.Tensor:
    """[T] the KL of trained tokens in the rewards' dtype, so that half-precision estimates are not summed in theirs."""
    kl_T = kl_T.detach().to(rewards_S.dtype)
    return torch.where(loss_mask_T > 0, kl_T, torch.zeros_like(kl_T))
