"""Advantages from rewards, without a critic: how much better a sample was than its group, or than the batch.

`group_S` [S] int64 numbers each sample's group from 0; groups may differ in size. Every function of `ADVANTAGES`
returns (advantages_S [S], metrics) and works in the dtype of the rewards. A group of one sample has no baseline:
advantage 0, except in `global_mean_std`, whose baseline is the batch. "The batch" is all samples of the call: for a
step's advantages, all of the step's samples.
"""

from collections.abc import Callable

import torch

from .metrics import Metrics
from .returns import whiten, whitening_sums


def group_mean_std(
    rewards_S: torch.Tensor, group_S: torch.Tensor, *, epsilon: float = 1e-4
) -> tuple[torch.Tensor, Metrics]:
    """A_i = (r_i - mean(r)) / (std(r) + epsilon), over the samples of i's group.

    std is the unbiased one (divides by n - 1), as TRL and verl compute it; the paper leaves it open.

    Source: GRPO, Shao et al. 2024 (DeepSeekMath, arXiv:2402.03300), section 4.1.2; epsilon 1e-4 is TRL's.
    """
    advantages_S, metrics = group_mean(rewards_S, group_S)
    sizes_S = _sizes(group_S).to(rewards_S.dtype)
    variances_S = _group_sum(advantages_S**2, group_S) / (sizes_S - 1).clamp(min=1)
    return advantages_S / (variances_S.sqrt() + epsilon), metrics


def group_mean(rewards_S: torch.Tensor, group_S: torch.Tensor) -> tuple[torch.Tensor, Metrics]:
    """A_i = r_i - mean(r), over the samples of i's group.

    Source: Dr. GRPO, Liu et al. 2025 (arXiv:2503.20783), section 3.2, which leaves out the std, because it favours
    very easy and very hard prompts.
    """
    means_S = _group_sum(rewards_S, group_S) / _sizes(group_S).to(rewards_S.dtype)
    return rewards_S - means_S, _signal(rewards_S, group_S)


def leave_one_out(rewards_S: torch.Tensor, group_S: torch.Tensor) -> tuple[torch.Tensor, Metrics]:
    """A_i = r_i - mean of the other samples' r = n / (n - 1) * (r_i - mean(r)), n the size of i's group.

    Source: RLOO, Ahmadian et al. 2024 (arXiv:2402.14740), section 3.2.
    """
    centered_S, metrics = group_mean(rewards_S, group_S)
    sizes_S = _sizes(group_S).to(rewards_S.dtype)
    return centered_S * sizes_S / (sizes_S - 1).clamp(min=1), metrics


def global_mean_std(
    rewards_S: torch.Tensor, group_S: torch.Tensor, *, epsilon: float = 1e-8
) -> tuple[torch.Tensor, Metrics]:
    """A_i = (r_i - mean(r)) / sqrt(variance(r) + epsilon), over all samples of the batch.

    Groups play no part, so one sample of each prompt is enough; a group of equal rewards may have an advantage.
    The rewards may contain a KL penalty (`rewards.kl_shaped`). verl takes mean and std over tokens, where long
    responses count more; `returns.returns_to_go` with `returns.whiten` does that.

    Source: REINFORCE++, Hu et al. 2025 (arXiv:2501.03262), global advantage normalization; unbiased variance and
    epsilon as in verl.
    """
    everywhere_S = torch.ones_like(rewards_S)
    advantages_S = whiten(rewards_S, everywhere_S, *whitening_sums(rewards_S, everywhere_S), epsilon=epsilon)
    return advantages_S, _signal(rewards_S, group_S)


def group_mean_global_std(
    rewards_S: torch.Tensor, group_S: torch.Tensor, *, epsilon: float = 1e-8
) -> tuple[torch.Tensor, Metrics]:
    """A_i = c_i / sqrt(variance(c) + epsilon), c_i = r_i - mean(r) over i's group, variance(c) over all samples of
    the batch.

    The group is the baseline, the batch the scale, so easy and hard prompts are not favoured. The std is that of
    the centered rewards, as in the paper and verl; TRL's `scale_rewards="batch"` takes that of the raw ones. As in
    `global_mean_std`, samples count alike, where verl counts tokens; and a group of one has advantage 0 (in verl its
    reward), yet counts in the std.

    Source: REINFORCE++-baseline, Hu et al. 2025 (arXiv:2501.03262); unbiased variance and epsilon as in verl.
    """
    centered_S, metrics = group_mean(rewards_S, group_S)
    variance = (centered_S**2).sum() / max(centered_S.numel() - 1, 1)  # the mean of all c is 0
    return centered_S * (variance + epsilon).rsqrt(), metrics


def best_against_worst(rewards_S: torch.Tensor, group_S: torch.Tensor) -> tuple[torch.Tensor, Metrics]:
    """A_i = 1 for the sample of i's group with the largest reward, -1 for the one with the smallest, 0 for the others.

    The first of several that are equal counts; where all rewards of a group are equal, every sample has 0. Losses of
    pairs (`preferences`) take the two as chosen and rejected, and no other sample. Other objectives learn
    from the two alone.

    Source: the pair of online DPO, Guo et al. 2024 (arXiv:2402.04792), for more than two samples: the best and the
    worst, as in West-of-N, Pace et al. 2024 (arXiv:2401.12086), and asynchronously Noukhovitch et al. 2024
    (arXiv:2410.18252).
    """
    best_S = _is_first_of_extreme(rewards_S, group_S)
    worst_S = _is_first_of_extreme(-rewards_S, group_S)
    return best_S.to(rewards_S.dtype) - worst_S.to(rewards_S.dtype), _signal(rewards_S, group_S)


def informative_groups(rewards_S: torch.Tensor, group_S: torch.Tensor, *, tolerance: float = 0.0) -> torch.Tensor:
    """is_informative_g = max(r) - min(r) > tolerance, over the samples of group g; [num_groups] bool.

    The others (all right, all wrong, a single sample) have advantage 0 under every group baseline. To drop them and
    sample others in their place is DAPO's dynamic sampling; for rewards of 0 and 1 the condition is the paper's,
    for others it asks for their spread, as verl's group filter does.

    Source: DAPO, Yu et al. 2025 (arXiv:2503.14476), equation 11.
    """
    num_groups = int(group_S.max()) + 1 if group_S.numel() else 0
    lowest_G = rewards_S.new_zeros(num_groups).scatter_reduce(0, group_S, rewards_S, "amin", include_self=False)
    highest_G = rewards_S.new_zeros(num_groups).scatter_reduce(0, group_S, rewards_S, "amax", include_self=False)
    return highest_G - lowest_G > tolerance


def none(rewards_S: torch.Tensor, group_S: torch.Tensor) -> tuple[torch.Tensor, Metrics]:
    """A_i = 0.

    Rewards are reported and teach nothing: a teacher's logprobs alone do (`teacher_advantages`).

    Source: on-policy distillation, Thinking Machines 2025.
    """
    return torch.zeros_like(rewards_S), _signal(rewards_S, group_S)


def _group_sum(values_S: torch.Tensor, group_S: torch.Tensor) -> torch.Tensor:
    """[S] the sum over its group, at each sample."""
    num_groups = int(group_S.max()) + 1 if group_S.numel() else 0
    return values_S.new_zeros(num_groups).index_add(0, group_S, values_S)[group_S]


def _is_first_of_extreme(values_S: torch.Tensor, group_S: torch.Tensor) -> torch.Tensor:
    """[S] True for the first sample of each group with the group's largest value."""
    num_samples, num_groups = values_S.numel(), int(group_S.max()) + 1 if group_S.numel() else 0
    place_S = torch.arange(num_samples, device=values_S.device)
    largest_G = values_S.new_zeros(num_groups).scatter_reduce(0, group_S, values_S, "amax", include_self=False)
    candidate_S = torch.where(values_S == largest_G[group_S], place_S, num_samples)
    first_G = place_S.new_full((num_groups,), num_samples).scatter_reduce(0, group_S, candidate_S, "amin")
    return place_S == first_G[group_S]


def _sizes(group_S: torch.Tensor) -> torch.Tensor:
    return _group_sum(torch.ones_like(group_S), group_S)


def _signal(rewards_S: torch.Tensor, group_S: torch.Tensor) -> Metrics:
    """Returns the pair for the share of groups whose samples all got the same reward and so teach nothing."""
    is_flat_G = (~informative_groups(rewards_S, group_S)).to(rewards_S.dtype)
    return {"flat_groups_sum": is_flat_G.sum(), "flat_groups_count": is_flat_G.new_tensor(is_flat_G.numel())}


ADVANTAGES: dict[str, Callable[..., tuple[torch.Tensor, Metrics]]] = {
    "group_mean_std": group_mean_std,
    "group_mean": group_mean,
    "leave_one_out": leave_one_out,
    "global_mean_std": global_mean_std,
    "group_mean_global_std": group_mean_global_std,
    "best_against_worst": best_against_worst,
    "none": none,
}
