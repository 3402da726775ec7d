"""Advantages and returns of tokens from rewards of tokens or turns, with a critic (`gae`) or without; a critic's loss;
terms that are added to a reward before it becomes an advantage: length and distance from the reference policy.

Only trained tokens are steps. Masked ones, such as a tool's output between two turns, are skipped as if they were
absent: after a trained token comes the sequence's next trained token, and a reward at a masked token counts for
nothing (`at_turn_ends` puts it where it counts). Results are 0 at masked tokens, have no gradient and the dtype of
the rewards; the penalty, which is given none, is float64. There is no loop over tokens: sums over the rest of a
sequence take log2(longest sequence) passes.

Rewards, lengths (tokens of the response) and penalties of whole sequences are [S], KL estimates (`algorithms.ratios`)
[T]. N counts the trained tokens of a row.
"""

from collections.abc import Sequence

import torch

from .metrics import Metrics, masked_mean
from .tokens import segment_sum, sequence_of_token, spread, trained


def gae(
    rewards_T: torch.Tensor,
    values_T: torch.Tensor,
    loss_mask_T: torch.Tensor,
    cu_seqlens: torch.Tensor,
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A_t = sum_k (gamma lam)^k delta_{t+k}, delta_t = r_t + gamma V_{t+1} - V_t; return_t = A_t + V_t.

    t + 1 is the next trained token of the sequence; V_t is the value of the state in which token t is chosen, V = 0
    after the last: also where a budget of tokens or turns ended the sequence, which is part of the task. Gives
    (advantages_T, returns_T), the returns being what the critic is fitted to.

    verl (0.9.1) skips masked tokens in the same way, but whitens the advantages at once; here `whiten` does that.

    Source: Schulman et al. 2016 (arXiv:1506.02438), equation 16. lam 0.95 as in PPO (arXiv:1707.06347) and TRL,
    gamma 1 as in InstructGPT (arXiv:2203.02155); verl's lam is 1.
    """
    at_N, ahead_N = _trained(loss_mask_T, cu_seqlens)
    rewards_N = rewards_T.detach()[at_N]
    values_N = values_T.detach()[at_N].to(rewards_N.dtype)
    next_values_N = torch.where(ahead_N > 0, values_N.roll(-1), torch.zeros_like(values_N))
    deltas_N = rewards_N + gamma * next_values_N - values_N
    advantages_N = _discounted_sums(deltas_N, ahead_N, discount=gamma * lam)
    return _placed(advantages_N, at_N, rewards_T), _placed(advantages_N + values_N, at_N, rewards_T)


def returns_to_go(
    rewards_T: torch.Tensor, loss_mask_T: torch.Tensor, cu_seqlens: torch.Tensor, *, gamma: float = 1.0
) -> torch.Tensor:
    """R_t = sum_k gamma^k r_{t+k}, over t and the trained tokens after it in its sequence.

    On `rewards.kl_shaped_tokens`, whitened over the batch, these are REINFORCE++'s token advantages. As in verl (0.9.1)
    masked tokens are passed over, so a turn sees what later turns earn.

    Source: REINFORCE, Williams 1992; REINFORCE++, Hu et al. 2025 (arXiv:2501.03262), whose gamma is 1.
    """
    at_N, ahead_N = _trained(loss_mask_T, cu_seqlens)
    return _placed(_discounted_sums(rewards_T.detach()[at_N], ahead_N, discount=gamma), at_N, rewards_T)


def whitening_sums(values_T: torch.Tensor, mask_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(sum of x, sum of x^2, count) over the places with mask 1: three float64 scalars, for `whiten`.

    The sums of micro-batches and ranks add up to those of the batch. They are float64, because the variance is a
    difference of them.
    """
    values_N = values_T.detach()[mask_T > 0].double()
    return values_N.sum(), (values_N**2).sum(), torch.tensor(values_N.numel(), device=values_N.device).double()


def whiten(
    values_T: torch.Tensor,
    mask_T: torch.Tensor,
    total: torch.Tensor,
    square_total: torch.Tensor,
    count: torch.Tensor,
    *,
    epsilon: float = 1e-8,
) -> torch.Tensor:
    """(x_t - mean) / sqrt(variance + epsilon), mean and variance those of the whole batch; 0 where the mask is 0.

    `total`, `square_total`, `count` are the batch's `whitening_sums`. The variance is the unbiased one (divides by
    count - 1), 0 for a single value.

    Source: common practice; variance and epsilon as in verl's masked_whiten. Some systems divide by count.
    """
    mean = total / count.clamp(min=1)
    variance = ((square_total - count * mean**2) / (count - 1).clamp(min=1)).clamp(min=0)
    whitened_T = (values_T.detach().double() - mean) * (variance + epsilon).rsqrt()
    return torch.where(mask_T > 0, whitened_T, torch.zeros_like(whitened_T)).to(values_T.dtype)


def turn_of_token(loss_mask_T: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """[T] int64: the number of the token's turn within its sequence, from 0; -1 where the mask is 0.

    A turn is an unbroken run of trained tokens, so two turns with nothing masked between them are one.
    """
    is_trained_T, sequence_T = loss_mask_T > 0, sequence_of_token(cu_seqlens)
    is_start_T = is_trained_T.clone()
    is_start_T[1:] &= ~(is_trained_T[:-1] & (sequence_T[1:] == sequence_T[:-1]))
    started_T = is_start_T.cumsum(0)
    before_S = torch.nn.functional.pad(started_T, (1, 0))[cu_seqlens[:-1].long()]
    return torch.where(is_trained_T, started_T - 1 - before_S[sequence_T], -1)


def at_turn_ends(
    turn_rewards_S: Sequence[torch.Tensor], loss_mask_T: torch.Tensor, cu_seqlens: torch.Tensor
) -> torch.Tensor:
    """rewards_T: the k-th reward of a sequence at the last token of its k-th turn (`turn_of_token`), 0 elsewhere.

    `turn_rewards_S` has for each sequence a tensor with one reward for each of its turns. Raises ValueError where
    the counts differ.
    """
    turn_T, sequence_T = turn_of_token(loss_mask_T, cu_seqlens), sequence_of_token(cu_seqlens)
    is_end_T = turn_T >= 0
    is_end_T[:-1] &= (turn_T[1:] != turn_T[:-1]) | (sequence_T[1:] != sequence_T[:-1])
    turns_S = sequence_T[is_end_T].bincount(minlength=cu_seqlens.numel() - 1).tolist()
    counts_S = [rewards.numel() for rewards in turn_rewards_S]
    if counts_S != turns_S:
        raise ValueError(
            f"rewards for {counts_S} turns, but the sequences have {turns_S} runs of trained tokens; give one reward"
            " for each run."
        )
    if not counts_S:
        return torch.zeros(0, device=loss_mask_T.device)
    rewards = torch.cat([rewards.detach().reshape(-1) for rewards in turn_rewards_S])
    return _placed(rewards, is_end_T.nonzero().squeeze(1), rewards.new_zeros(loss_mask_T.numel()))


def trained_ahead(loss_mask_T: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """[T] int64: the number of trained tokens after this one in its sequence; 0 at the last trained one."""
    passed_T = (loss_mask_T > 0).cumsum(0)
    ends_S = torch.nn.functional.pad(passed_T, (1, 0))[cu_seqlens[1:].long()]
    return ends_S[sequence_of_token(cu_seqlens)] - passed_T


def _trained(loss_mask_T: torch.Tensor, cu_seqlens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """([N] index of each trained token in the row, [N] the number of trained tokens after it in its sequence)."""
    at_N = (loss_mask_T > 0).nonzero().squeeze(1)
    return at_N, trained_ahead(loss_mask_T, cu_seqlens)[at_N]


def _discounted_sums(values_N: torch.Tensor, ahead_N: torch.Tensor, *, discount: float) -> torch.Tensor:
    """[N] sum_k discount^k values_{n+k} to the end of n's sequence.

    Each pass doubles the reach: it adds, discounted, the sum of the first place beyond n's own.
    """
    longest = int(ahead_N.max()) if ahead_N.numel() else 0
    reach = 1
    while reach <= longest:
        beyond_N = torch.where(ahead_N >= reach, values_N.roll(-reach), torch.zeros_like(values_N))
        values_N = values_N + discount**reach * beyond_N
        reach *= 2
    return values_N


def _placed(values_N: torch.Tensor, at_N: torch.Tensor, like_T: torch.Tensor) -> torch.Tensor:
    """[T] the values at their places, 0 elsewhere."""
    return torch.zeros_like(like_T).index_copy(0, at_N, values_N)


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
