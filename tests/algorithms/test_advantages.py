import random
import statistics
from collections.abc import Callable

import pytest
import torch

from algorithms.advantages import group_mean, group_mean_std, leave_one_out


def mean_std(own: float, group: list[float]) -> float:
    std = statistics.stdev(group) if len(group) > 1 else 0.0
    return (own - statistics.mean(group)) / (std + 1e-4)


def mean_only(own: float, group: list[float]) -> float:
    return own - statistics.mean(group)


def others(own: float, group: list[float]) -> float:
    return own - (sum(group) - own) / (len(group) - 1) if len(group) > 1 else 0.0


ALL = [(group_mean_std, mean_std), (group_mean, mean_only), (leave_one_out, others)]


@pytest.mark.parametrize(("function", "equation"), ALL)
@pytest.mark.parametrize("sizes", [[8, 8], [1, 2, 5, 3], [1], []])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_advantages_are_the_equation(
    function: Callable[..., tuple[torch.Tensor, dict[str, torch.Tensor]]],
    equation: Callable[[float, list[float]], float],
    sizes: list[int],
    dtype: torch.dtype,
) -> None:
    rng = random.Random(3)
    rewards = [[rng.random() for _ in range(size)] for size in sizes]
    pairs = [(number, reward) for number, group in enumerate(rewards) for reward in group]
    rng.shuffle(pairs)  # groups need not lie together
    expected = torch.tensor([equation(reward, rewards[number]) for number, reward in pairs], dtype=torch.float64)
    rewards_S = torch.tensor([reward for _, reward in pairs], dtype=dtype)
    got, _ = function(rewards_S, torch.tensor([number for number, _ in pairs], dtype=torch.int64))
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("function", "_"), ALL)
def test_equal_rewards_teach_nothing(
    function: Callable[..., tuple[torch.Tensor, dict[str, torch.Tensor]]], _: object
) -> None:
    rewards_S, group_S = torch.tensor([1.0, 1.0, 1.0, 0.0, 1.0]), torch.tensor([0, 0, 0, 1, 1])
    advantages_S, metrics = function(rewards_S, group_S)
    assert advantages_S[:3].tolist() == [0, 0, 0]
    assert advantages_S[3:].abs().min() > 0
    assert (float(metrics["flat_groups_sum"]), float(metrics["flat_groups_count"])) == (1, 2)
