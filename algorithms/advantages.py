"""How much better a sample was than its group. Rewards in, advantages out; no learned critic.

`group_S` [S] int64 numbers each sample's group from 0; groups may differ in size. Every function returns
(advantages_S [S], metrics) and works in the dtype of the rewards. A group of one sample has no baseline:
advantage 0.
"""

import torch

from .metrics import Metrics


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

    Source: Dr. GRPO, Liu et al. 2025 (arXiv:2503.20783), section 3.2: without the std, which favours easy and
    hard prompts.
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


def _group_sum(values_S: torch.Tensor, group_S: torch.Tensor) -> torch.Tensor:
    """[S] the sum over its group, at each sample."""
    num_groups = int(group_S.max()) + 1 if group_S.numel() else 0
    return values_S.new_zeros(num_groups).index_add(0, group_S, values_S)[group_S]


def _sizes(group_S: torch.Tensor) -> torch.Tensor:
    return _group_sum(torch.ones_like(group_S), group_S)


def _signal(rewards_S: torch.Tensor, group_S: torch.Tensor) -> Metrics:
    """How many groups got the same reward for all samples and so teach nothing."""
    num_groups = int(group_S.max()) + 1 if group_S.numel() else 0
    lowest = rewards_S.new_zeros(num_groups).scatter_reduce(0, group_S, rewards_S, "amin", include_self=False)
    highest = rewards_S.new_zeros(num_groups).scatter_reduce(0, group_S, rewards_S, "amax", include_self=False)
    is_flat = (lowest == highest).to(rewards_S.dtype)
    return {"flat_groups_sum": is_flat.sum(), "flat_groups_count": is_flat.new_tensor(num_groups)}
