"""Shapes the rewards of a batch's trajectories, and compares them; each trajectory gets an advantage.

rewards ─ length, overlong penalty, KL ─► shaped rewards ─ advantage function ─► advantages
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from headway.algorithms.returns import length_normalized, overlong_penalty
from headway.broker.errors import HeadwayError
from headway.broker.schema import Group, Trajectory
from headway.learner.algorithm_config import RewardShapingConfig

from .composition import Advantage

MOST_NAMES = 500
"""The most scores and measures of one batch, those of most samples: a function may name a measure for each prompt."""


@dataclass(frozen=True, kw_only=True)
class RewardStats:
    """Rewards of one batch, over trajectories, as the reward functions gave them."""

    mean: float
    std: float
    """The standard deviation over the whole batch, dividing by n."""
    flat_groups: float
    """The share of groups whose samples all got the same reward, so that comparing them teaches nothing."""
    components: dict[str, float]
    """The mean of each reward function's score and of every further measure, over the samples that have it."""
    counts: dict[str, int]
    """These samples' number."""
    truncated: float | None
    """The mean of truncated samples; None: there are none."""


def trajectories_of(groups: Sequence[Group]) -> list[Trajectory]:
    """Returns all trajectories in the order of `groups`."""
    return [trajectory for group in groups for trajectory in group.trajectories]


def is_informative(group: Group, *, masks_truncated: bool) -> bool:
    """True where the group's samples differ in reward, so that comparing them teaches something; with
    `masks_truncated`, where one of them was not truncated, too."""
    if masks_truncated and all(is_truncated(trajectory) for trajectory in group.trajectories):
        return False
    return len({trajectory.reward for trajectory in group.trajectories}) > 1


def is_truncated(trajectory: Trajectory) -> bool:
    """True where the response ended at its longest length, and not by itself; of an episode, its last turn."""
    return trajectory.finish_reason == "length"


def shaped_rewards(groups: Sequence[Group], config: RewardShapingConfig, max_new_tokens: int) -> torch.Tensor:
    """[S] float64 rewards. Raises HeadwayError for a reward that is not finite."""
    trajectories = trajectories_of(groups)
    for trajectory in trajectories:
        if not math.isfinite(trajectory.reward):
            raise HeadwayError(f"trajectory {trajectory.tid} has reward {trajectory.reward}; rewards must be finite.")
    rewards_S = torch.tensor([trajectory.reward for trajectory in trajectories], dtype=torch.float64)
    lengths_S = torch.tensor([len(trajectory.response_tokens) for trajectory in trajectories], dtype=torch.int64)
    if config.length_normalized:
        rewards_S = length_normalized(rewards_S, lengths_S, unit=float(max_new_tokens))
    if config.overlong_buffer:
        rewards_S = rewards_S + overlong_penalty(lengths_S, limit=max_new_tokens, buffer=config.overlong_buffer)
    return rewards_S


def group_advantages(groups: Sequence[Group], rewards_S: torch.Tensor, advantage: Advantage) -> list[float]:
    """Returns an advantage for each trajectory, in the order of `groups`."""
    advantages_S, _ = advantage(rewards_S, group_indices(groups))
    return [float(advantage) for advantage in advantages_S.tolist()]


def reward_stats(groups: Sequence[Group]) -> RewardStats:
    """Returns statistics of the rewards before any shaping."""
    trajectories = trajectories_of(groups)
    rewards_S = torch.tensor([trajectory.reward for trajectory in trajectories], dtype=torch.float64)
    counts = Counter(name for trajectory in trajectories for name in trajectory.rewards)
    kept = dict(sorted(counts.most_common(MOST_NAMES)))
    cut = [trajectory.reward for trajectory in trajectories if is_truncated(trajectory)]
    flat = [not is_informative(group, masks_truncated=False) for group in groups]
    return RewardStats(
        mean=float(rewards_S.mean()) if trajectories else 0.0,
        std=float(rewards_S.std(correction=0)) if trajectories else 0.0,
        flat_groups=sum(flat) / len(flat) if flat else 0.0,
        components={n: sum(t.rewards.get(n, 0.0) for t in trajectories) / count for n, count in kept.items()},
        counts=kept,
        truncated=sum(cut) / len(cut) if cut else None,
    )


def group_indices(groups: Sequence[Group]) -> torch.Tensor:
    """[S] the number of each trajectory's group."""
    return torch.tensor([number for number, group in enumerate(groups) for _ in group.trajectories], dtype=torch.int64)
