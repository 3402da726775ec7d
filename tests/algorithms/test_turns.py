"""Returns along a tree of turns, and their comparison within a group, against float64 loops."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headway.algorithms.advantages import ADVANTAGES
from headway.algorithms.turns import TURN_ADVANTAGES, turn_returns

rewards = st.integers(-8, 8).map(lambda eighths: eighths / 8)


@st.composite
def trees(draw: st.DrawFn) -> tuple[list[float], list[int]]:
    """Return the rewards and the parents of turns."""
    size = draw(st.integers(1, 7))
    parents = [draw(st.integers(-1, number - 1)) for number in range(size)]
    return draw(st.lists(rewards, min_size=size, max_size=size)), parents


def path_of(turn: int, parents: list[int]) -> list[int]:
    """Return the turn and those before it, the nearest first."""
    return [turn, *path_of(parents[turn], parents)] if turn >= 0 else []


@given(trees(), rewards, st.sampled_from([1.0, 0.5, 0.9]))
def test_a_return_has_what_was_earned_later_on_its_path(
    tree: tuple[list[float], list[int]], outcome: float, gamma: float
) -> None:
    own, parents = tree
    paths = [path_of(turn, parents) for turn in range(len(own))]
    expected = []
    for turn in range(len(own)):
        later = {number: path.index(turn) for number, path in enumerate(paths) if turn in path}
        earned = sum(gamma**distance * own[number] for number, distance in later.items())
        expected.append(earned + gamma ** later[max(later)] * outcome)
    found_K = turn_returns(torch.tensor(own).double(), torch.tensor(parents), outcome=outcome, gamma=gamma)
    assert found_K.tolist() == pytest.approx(expected)
    assert found_K.dtype is torch.float64


def test_an_abandoned_conversation_ends_with_the_episodes_outcome() -> None:
    own_K, parents_K = torch.tensor([0.0, 1.0, 0.0, 0.0]), torch.tensor([-1, 0, -1, 2])
    assert turn_returns(own_K, parents_K, outcome=4.0, gamma=0.5).tolist() == [2.5, 5.0, 2.0, 4.0]


@st.composite
def groups(draw: st.DrawFn) -> list[list[list[float]]]:
    """Return the returns of turns, by group and rollout."""
    turns = st.lists(rewards, min_size=1, max_size=4)
    return draw(st.lists(st.lists(turns, min_size=1, max_size=4), min_size=1, max_size=3))


def tensors(made: list[list[list[float]]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rollouts = [turns for group in made for turns in group]
    returns_K = torch.tensor([value for turns in rollouts for value in turns], dtype=torch.float64)
    rollout_K = torch.tensor([number for number, turns in enumerate(rollouts) for _ in turns])
    return returns_K, rollout_K, torch.tensor([number for number, group in enumerate(made) for _ in group])


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


@given(groups())
def test_a_rollout_counts_once_in_its_group_however_many_turns_it_has(made: list[list[list[float]]]) -> None:
    expected: dict[str, list[float]] = {name: [] for name in TURN_ADVANTAGES}
    for group in made:
        means = [mean(turns) for turns in group]
        size, middle = len(group), mean(means)
        variance = sum(mean([(value - middle) ** 2 for value in turns]) for turns in group) / max(size - 1, 1)
        for own, turns in enumerate(group):
            others = mean([one for place, one in enumerate(means) if place != own]) if size > 1 else 0.0
            for value in turns:
                centered = value - middle if size > 1 else 0.0
                expected["group_mean"].append(centered)
                expected["group_mean_std"].append(centered / (variance**0.5 + 1e-4))
                expected["leave_one_out"].append(value - others if size > 1 else 0.0)
    for name, advantage in TURN_ADVANTAGES.items():
        found_K, _ = advantage(*tensors(made))
        assert found_K.tolist() == pytest.approx(expected[name], abs=1e-9)
        assert found_K.dtype is torch.float64


@given(groups())
def test_turns_of_one_return_have_the_advantage_of_their_rollout(made: list[list[list[float]]]) -> None:
    alike = [[[turns[0]] * len(turns) for turns in group] for group in made]
    returns_K, rollout_K, group_S = tensors(alike)
    rewards_S = torch.tensor([turns[0] for group in alike for turns in group], dtype=torch.float64)
    for name, advantage in TURN_ADVANTAGES.items():
        expected_S, _ = ADVANTAGES[name](rewards_S, group_S)
        found_K, _ = advantage(returns_K, rollout_K, group_S)
        torch.testing.assert_close(found_K, expected_S[rollout_K], rtol=0, atol=1e-9)


def test_no_turns_have_no_advantages() -> None:
    nothing = torch.zeros(0, dtype=torch.int64)
    for advantage in TURN_ADVANTAGES.values():
        assert advantage(torch.zeros(0), nothing, nothing)[0].numel() == 0
