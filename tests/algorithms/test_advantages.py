import random
import statistics
from collections.abc import Callable

import pytest
import torch

from headway.algorithms.advantages import (
    ADVANTAGES,
    best_against_worst,
    global_mean_std,
    group_mean,
    group_mean_global_std,
    group_mean_std,
    informative_groups,
    leave_one_out,
    none,
)

SIZES = [[8, 8], [1, 2, 5, 3], [1], [1, 1], []]

Advantage = Callable[..., tuple[torch.Tensor, dict[str, torch.Tensor]]]
Rewards = list[list[float]]
"""The rewards of each group."""


def mean_std(own: float, group: list[float], batch: Rewards) -> float:
    std = statistics.stdev(group) if len(group) > 1 else 0.0
    return (own - statistics.mean(group)) / (std + 1e-4)


def mean_only(own: float, group: list[float], batch: Rewards) -> float:
    return own - statistics.mean(group)


def others(own: float, group: list[float], batch: Rewards) -> float:
    return own - (sum(group) - own) / (len(group) - 1) if len(group) > 1 else 0.0


def batch_mean_std(own: float, group: list[float], batch: Rewards) -> float:
    rewards = [reward for group in batch for reward in group]
    variance = statistics.variance(rewards) if len(rewards) > 1 else 0.0
    return (own - statistics.mean(rewards)) / (variance + 1e-8) ** 0.5


def mean_batch_std(own: float, group: list[float], batch: Rewards) -> float:
    centered = [reward - statistics.mean(group) for group in batch for reward in group]
    variance = statistics.variance(centered) if len(centered) > 1 else 0.0
    return (own - statistics.mean(group)) / (variance + 1e-8) ** 0.5


def best_or_worst(own: float, group: list[float], batch: Rewards) -> float:
    return float(own == max(group)) - float(own == min(group))


EQUATIONS = {
    group_mean_std: mean_std,
    group_mean: mean_only,
    leave_one_out: others,
    global_mean_std: batch_mean_std,
    group_mean_global_std: mean_batch_std,
    best_against_worst: best_or_worst,
    none: lambda own, group, batch: 0.0,
}


def shuffled(rewards: Rewards, rng: random.Random) -> list[tuple[int, float]]:
    """Permute sequences, because the members of a group need not lie together."""
    pairs = [(number, reward) for number, group in enumerate(rewards) for reward in group]
    rng.shuffle(pairs)
    return pairs


def group_numbers(pairs: list[tuple[int, float]]) -> torch.Tensor:
    return torch.tensor([number for number, _ in pairs], dtype=torch.int64)


@pytest.mark.parametrize(("function", "equation"), EQUATIONS.items())
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_advantages_are_the_equation(
    function: Advantage, equation: Callable[[float, list[float], Rewards], float], sizes: list[int], dtype: torch.dtype
) -> None:
    rng = random.Random(3)
    rewards = [[rng.random() for _ in range(size)] for size in sizes]
    pairs = shuffled(rewards, rng)
    expected = [equation(reward, rewards[number], rewards) for number, reward in pairs]
    got, _ = function(torch.tensor([reward for _, reward in pairs], dtype=dtype), group_numbers(pairs))
    assert got.dtype == dtype
    assert torch.isfinite(got).all()
    tolerance = 1e-5 if dtype == torch.float32 else 1e-10
    torch.testing.assert_close(got.double(), torch.tensor(expected, dtype=torch.float64), rtol=tolerance, atol=1e-6)


@pytest.mark.parametrize("function", [function for function in EQUATIONS if function not in (global_mean_std, none)])
def test_equal_rewards_teach_nothing(function: Advantage) -> None:
    rewards_S, group_S = torch.tensor([1.0, 1.0, 1.0, 0.0, 1.0]), torch.tensor([0, 0, 0, 1, 1])
    advantages_S, _ = function(rewards_S, group_S)
    assert advantages_S[:3].tolist() == [0, 0, 0]
    assert advantages_S[3:].abs().min() > 0


@pytest.mark.parametrize("function", EQUATIONS)
def test_flat_groups_are_counted(function: Advantage) -> None:
    _, metrics = function(torch.tensor([1.0, 1.0, 1.0, 0.0, 1.0]), torch.tensor([0, 0, 0, 1, 1]))
    assert (float(metrics["flat_groups_sum"]), float(metrics["flat_groups_count"])) == (1, 2)


@pytest.mark.parametrize("function", EQUATIONS)
@pytest.mark.parametrize("reward", [0.0, 0.1, 1.0])
def test_a_batch_of_equal_rewards_has_no_advantage(function: Advantage, reward: float) -> None:
    for dtype in (torch.float32, torch.float64):
        advantages_S, _ = function(torch.full((6,), reward, dtype=dtype), torch.tensor([0, 0, 0, 1, 1, 2]))
        assert advantages_S.abs().max() < 1e-3


def test_the_batch_is_the_baseline_of_samples_without_a_group() -> None:
    advantages_S, _ = global_mean_std(torch.tensor([0.0, 1.0, 1.0]), torch.tensor([0, 1, 2]))
    assert advantages_S[0] < 0 < advantages_S[1] == advantages_S[2]


def test_the_scale_is_that_of_the_centered_rewards() -> None:
    """Groups whose means lie far apart do not shrink each other's advantages."""
    rewards_S, group_S = torch.tensor([0.0, 1.0, 100.0, 101.0]), torch.tensor([0, 0, 1, 1])
    advantages_S, _ = group_mean_global_std(rewards_S, group_S)
    torch.testing.assert_close(advantages_S, torch.tensor([-0.5, 0.5, -0.5, 0.5]) * 3**0.5)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("tolerance", [0.0, 0.25])
def test_groups_are_informative_where_their_rewards_differ(sizes: list[int], tolerance: float) -> None:
    rng = random.Random(4)
    rewards = [[rng.choice([0.0, 0.2, 1.0]) for _ in range(size)] for size in sizes] + [[0.2, 0.2], [0.0, 0.2]]
    pairs = shuffled(rewards, rng)
    rewards_S, group_S = torch.tensor([reward for _, reward in pairs]), group_numbers(pairs)
    is_informative_G = informative_groups(rewards_S, group_S, tolerance=tolerance)
    assert is_informative_G.dtype == torch.bool
    assert is_informative_G.tolist() == [max(group) - min(group) > tolerance for group in rewards]


def test_of_several_best_and_worst_samples_the_first_make_the_pair() -> None:
    rewards_S, group_S = torch.tensor([0.0, 1.0, 0.0, 2.0, 1.0, 0.0, 1.0]), torch.tensor([0, 0, 1, 1, 0, 0, 1])
    advantages_S, _ = best_against_worst(rewards_S, group_S)
    assert advantages_S.tolist() == [-1, 1, -1, 1, 0, 0, 0]


def test_an_empty_batch_has_no_groups() -> None:
    assert informative_groups(torch.zeros(0), torch.zeros(0, dtype=torch.int64)).tolist() == []


def test_all_advantages_are_found_by_their_names() -> None:
    assert {name: function.__name__ for name, function in ADVANTAGES.items()} == {name: name for name in ADVANTAGES}
    assert set(ADVANTAGES.values()) == set(EQUATIONS)
