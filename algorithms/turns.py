"""Returns and advantages of single turns of an episode, without a critic.

An episode is a tree of turns: each goes on after an earlier one, or begins anew. K turns of all rollouts together, S
rollouts. A rollout counts once in a group's mean and variance, however many turns or rows it has: each of its n turns
counts 1 / n.

The invariant: where all turns of a rollout have one return, its turns' advantage is that of `advantages`, to rounding.
"""

from collections.abc import Callable

import torch

from .metrics import Metrics


def turn_returns(
    rewards_K: torch.Tensor, parents_K: torch.Tensor, *, outcome: float, gamma: float = 1.0
) -> torch.Tensor:
    """R_k = sum_j gamma^d(k, j) r_j + gamma^d(k, e) outcome, over k and the turns j that go on after it, at any
    distance d in turns; e is the newest of these, at which k's path ends.

    One rollout's turns, in the order in which they were played; `parents_K` has the number of the turn after which
    each goes on, or -1. `outcome` is the reward that the whole episode got at its end, so it counts at the end of every
    path: also before a turn whose conversation was abandoned, or that a subagent played.

    Source: the return of a step of GiGPO, Feng et al. 2025 (arXiv:2505.10978), section 4.2, there of a chain of steps
    whose last reward is the outcome.
    """
    returns, parents = rewards_K.double().tolist(), parents_K.tolist()
    newest, distances = list(range(len(returns))), [0] * len(returns)
    for turn in reversed(range(len(returns))):
        parent = parents[turn]
        if parent >= 0:
            returns[parent] += gamma * returns[turn]
            if newest[turn] > newest[parent]:
                newest[parent], distances[parent] = newest[turn], distances[turn] + 1
    ends = [gamma**distance * outcome for distance in distances]
    return torch.tensor([own + end for own, end in zip(returns, ends, strict=True)], dtype=rewards_K.dtype)


def turn_group_mean_std(
    returns_K: torch.Tensor, rollout_K: torch.Tensor, group_S: torch.Tensor, *, epsilon: float = 1e-4
) -> tuple[torch.Tensor, Metrics]:
    """A_k = (R_k - m) / (s + epsilon), m = mean_i(mean_k(R_k)), s^2 = sum_i(mean_k((R_k - m)^2)) / (G - 1), i over the
    G rollouts of the group, k over i's turns.

    A turn is compared with all turns of its group, so it needs no other rollout in the same state. `rollout_K` [K] is
    the number of each turn's rollout, `group_S` [S] of each rollout's group. A group of one rollout has advantage 0.

    Source: GRPO with process supervision, Shao et al. 2024 (DeepSeekMath, arXiv:2402.03300), section 4.1.3, which
    compares the rewards of all steps of a group and then sums them; here their returns are compared, as at the step
    level of GiGPO, Feng et al. 2025 (arXiv:2505.10978), whose groups are the steps in one state. Both count steps, not
    rollouts.
    """
    advantages_K, metrics = turn_group_mean(returns_K, rollout_K, group_S)
    squares_S = _rollout_mean(advantages_K**2, rollout_K, group_S)
    sizes_G = _sum(torch.ones_like(squares_S), group_S)
    deviations_G = (_sum(squares_S, group_S) / (sizes_G - 1).clamp(min=1)).sqrt()
    return advantages_K / (deviations_G[group_S[rollout_K]] + epsilon), metrics


def turn_group_mean(
    returns_K: torch.Tensor, rollout_K: torch.Tensor, group_S: torch.Tensor
) -> tuple[torch.Tensor, Metrics]:
    """A_k = R_k - m, m = mean_i(mean_k(R_k)), i over the rollouts of the group, k over i's turns; 0 for a group of one.

    Source: as `turn_group_mean_std`, without the std, as in Dr. GRPO, Liu et al. 2025 (arXiv:2503.20783).
    """
    means_S = _rollout_mean(returns_K, rollout_K, group_S)
    sizes_G = _sum(torch.ones_like(means_S), group_S)
    means_G = _sum(means_S, group_S) / sizes_G.clamp(min=1)
    centered_K = returns_K - means_G[group_S[rollout_K]]
    return torch.where(sizes_G[group_S[rollout_K]] > 1, centered_K, torch.zeros_like(centered_K)), {}


def turn_leave_one_out(
    returns_K: torch.Tensor, rollout_K: torch.Tensor, group_S: torch.Tensor
) -> tuple[torch.Tensor, Metrics]:
    """A_k = R_k - mean_j(mean_k(R_k)), j over the other rollouts of the group; 0 for a group of one.

    Source: RLOO, Ahmadian et al. 2024 (arXiv:2402.14740), section 3.2, on returns of turns.
    """
    means_S = _rollout_mean(returns_K, rollout_K, group_S)
    sizes_S = _sum(torch.ones_like(means_S), group_S)[group_S]
    others_S = (_sum(means_S, group_S)[group_S] - means_S) / (sizes_S - 1).clamp(min=1)
    centered_K = returns_K - others_S[rollout_K]
    return torch.where(sizes_S[rollout_K] > 1, centered_K, torch.zeros_like(centered_K)), {}


def _rollout_mean(values_K: torch.Tensor, rollout_K: torch.Tensor, group_S: torch.Tensor) -> torch.Tensor:
    """[S] the mean over each rollout's turns."""
    sums_S = values_K.new_zeros(group_S.numel()).index_add(0, rollout_K, values_K)
    return sums_S / torch.bincount(rollout_K, minlength=group_S.numel()).clamp(min=1)


def _sum(values_S: torch.Tensor, group_S: torch.Tensor) -> torch.Tensor:
    """[G] the sum over each group's rollouts."""
    num_groups = int(group_S.max()) + 1 if group_S.numel() else 0
    return values_S.new_zeros(num_groups).index_add(0, group_S, values_S)


TURN_ADVANTAGES: dict[str, Callable[..., tuple[torch.Tensor, Metrics]]] = {
    "group_mean_std": turn_group_mean_std,
    "group_mean": turn_group_mean,
    "leave_one_out": turn_leave_one_out,
}
"""The advantages of turns, by the names that `advantages.ADVANTAGES` has for those of rollouts."""
