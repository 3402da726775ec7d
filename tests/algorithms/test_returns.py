import itertools
import statistics
from collections.abc import Iterator

import pytest
import torch

from headway.algorithms.returns import (
    at_turn_ends,
    gae,
    returns_to_go,
    trained_ahead,
    turn_of_token,
    whiten,
    whitening_sums,
)
from tests.algorithms.ragged import Ragged, every_case, make, stack

DISCOUNTS = [(1.0, 0.95), (0.9, 0.8), (1.0, 1.0), (0.97, 0.0), (0.0, 1.0)]


def numbers(batch: Ragged, seed: int) -> torch.Tensor:
    """Return numbers [T] in float64, with an absurd one at each masked place, where it must not matter."""
    values_T = torch.randn(batch.mask_T.numel(), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return torch.where(batch.mask_T > 0, values_T, torch.full_like(values_T, torch.nan))


def scale(case: str) -> float:
    return 1e20 if case == "extreme" else 1.0


def gae_loop(
    batch: Ragged, rewards_T: torch.Tensor, values_T: torch.Tensor, gamma: float, lam: float
) -> tuple[torch.Tensor, torch.Tensor]:
    advantages, returns = [0.0] * batch.mask_T.numel(), [0.0] * batch.mask_T.numel()
    for _, row in batch.trained():
        next_advantage = next_value = 0.0
        for t in reversed(row):
            value = float(values_T[t])
            delta = float(rewards_T[t]) + gamma * next_value - value
            next_advantage, next_value = delta + gamma * lam * next_advantage, value
            advantages[t], returns[t] = next_advantage, next_advantage + value
    return torch.tensor(advantages, dtype=torch.float64), torch.tensor(returns, dtype=torch.float64)


def to_go_loop(batch: Ragged, rewards_T: torch.Tensor, gamma: float) -> torch.Tensor:
    returns_T = torch.zeros(batch.mask_T.numel(), dtype=torch.float64)
    for _, row in batch.trained():
        for k, t in enumerate(row):
            returns_T[t] = sum(gamma**j * float(rewards_T[u]) for j, u in enumerate(row[k:]))
    return returns_T


def turns(batch: Ragged) -> Iterator[tuple[int, list[list[int]]]]:
    """Return, for each sequence, the tokens of each of its turns."""
    for s, row in batch.rows():
        runs = itertools.groupby(row, key=lambda t: bool(batch.mask_T[t] > 0))
        yield s, [list(run) for is_trained, run in runs if is_trained]


@every_case
@pytest.mark.parametrize(("gamma", "lam"), DISCOUNTS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
def test_gae_is_the_equation(case: str, gamma: float, lam: float, dtype: torch.dtype, tolerance: float) -> None:
    batch = make(case)
    rewards_T, values_T = (numbers(batch, seed).to(dtype) for seed in (1, 2))
    expected = gae_loop(batch, rewards_T, values_T, gamma, lam)
    values_T = (values_T * scale(case)).requires_grad_()
    got = gae(rewards_T * scale(case), values_T, batch.mask_T, batch.cu_seqlens, gamma=gamma, lam=lam)
    for one, other in zip(got, expected, strict=True):
        assert one.dtype == dtype
        assert not one.requires_grad
        assert torch.isfinite(one).all()
        torch.testing.assert_close(one.double() / scale(case), other, rtol=tolerance, atol=2 * tolerance)


@every_case
def test_gae_with_values_in_half_precision(case: str) -> None:
    batch = make(case)
    rewards_T, values_T = (numbers(batch, seed) for seed in (1, 2))
    got = gae(rewards_T.float(), values_T.bfloat16(), batch.mask_T, batch.cu_seqlens)
    for one, other in zip(got, gae_loop(batch, rewards_T, values_T, 1.0, 0.95), strict=True):
        assert one.dtype == torch.float32
        torch.testing.assert_close(one.double(), other, rtol=1e-2, atol=2e-2)


@every_case
@pytest.mark.parametrize("gamma", [1.0, 0.9, 0.0])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
def test_returns_to_go_are_the_equation(case: str, gamma: float, dtype: torch.dtype, tolerance: float) -> None:
    batch = make(case)
    rewards_T = numbers(batch, 1).to(dtype)
    expected = to_go_loop(batch, rewards_T, gamma)
    scaled_T = (rewards_T * scale(case)).requires_grad_()
    got = returns_to_go(scaled_T, batch.mask_T, batch.cu_seqlens, gamma=gamma)
    assert got.dtype == dtype
    assert not got.requires_grad
    torch.testing.assert_close(got.double() / scale(case), expected, rtol=tolerance, atol=2 * tolerance)


def test_long_sequences_of_all_lengths() -> None:
    """The lengths lie around the powers of two, where the passes of the sum end."""
    lengths = torch.tensor([*range(1, 19), 31, 32, 33, 0, 64, 65, 300])
    total = int(lengths.sum())
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).int()
    for masked in (0.0, 0.4):
        mask_T = (torch.rand(total, generator=torch.Generator().manual_seed(6)) >= masked).float()
        batch = Ragged(cu_seqlens, mask_T, mask_T, mask_T, torch.zeros(len(lengths)), mask_T.long())
        rewards_T, values_T = (numbers(batch, seed) for seed in (1, 2))
        got = gae(rewards_T, values_T, mask_T, cu_seqlens, gamma=0.99, lam=0.95)
        expected = gae_loop(batch, rewards_T, values_T, 0.99, 0.95)
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)
        got_to_go = returns_to_go(rewards_T, mask_T, cu_seqlens)
        torch.testing.assert_close(got_to_go, to_go_loop(batch, rewards_T, 1.0), rtol=1e-10, atol=1e-10)


@every_case
def test_a_sequence_alone_gives_what_it_gives_in_a_row(case: str) -> None:
    batch = make(case)
    rewards_T, values_T = (numbers(batch, seed).float() for seed in (1, 2))
    packed = torch.stack(gae(rewards_T, values_T, batch.mask_T, batch.cu_seqlens))
    packed_turns_T = turn_of_token(batch.mask_T, batch.cu_seqlens)
    for _, row in batch.rows():
        part, bounds = slice(row.start, row.stop), torch.tensor([0, len(row)])
        alone = torch.stack(gae(rewards_T[part], values_T[part], batch.mask_T[part], bounds))
        assert torch.equal(packed[:, part], alone)
        assert torch.equal(packed_turns_T[part], turn_of_token(batch.mask_T[part], bounds))


def test_masked_tokens_are_as_if_absent() -> None:
    batch = make("ragged")
    is_trained_T = batch.mask_T > 0
    rewards_T, values_T = (numbers(batch, seed) for seed in (1, 2))
    counts = [len(row) for _, row in batch.trained()]
    without = torch.tensor([0, *itertools.accumulate(counts)])
    ones_T = torch.ones(sum(counts))
    assert 0 < sum(counts) < batch.mask_T.numel()
    for one, other in zip(
        gae(rewards_T, values_T, batch.mask_T, batch.cu_seqlens, gamma=0.9),
        gae(rewards_T[is_trained_T], values_T[is_trained_T], ones_T, without, gamma=0.9),
        strict=True,
    ):
        assert torch.equal(one[is_trained_T], other)
        assert (one[~is_trained_T] == 0).all()


def test_known_values() -> None:
    """With lam 1 a return is the rewards to go; a perfect critic leaves no advantage."""
    rewards_T, mask_T = torch.tensor([0.0, 9.0, 0.0, 1.0]), torch.tensor([1.0, 0.0, 1.0, 1.0])
    cu_seqlens = torch.tensor([0, 4])
    assert returns_to_go(rewards_T, mask_T, cu_seqlens, gamma=0.5).tolist() == [0.25, 0, 0.5, 1]
    advantages_T, returns_T = gae(rewards_T, torch.tensor([0.25, 9.0, 0.5, 1.0]), mask_T, cu_seqlens, gamma=0.5)
    assert advantages_T.tolist() == [0, 0, 0, 0]
    assert returns_T.tolist() == [0.25, 0, 0.5, 1]


@every_case
def test_whitened_tokens_have_the_mean_and_variance_of_the_batch(case: str) -> None:
    batch = make(case)
    values_T = numbers(batch, 1).float() * scale(case) + 1000
    trained = [float(values_T[t]) for _, row in batch.trained() for t in row]
    mean = statistics.mean(trained) if trained else 0.0
    variance = statistics.variance(trained) if len(trained) > 1 else 0.0
    equation_T = stack([(value.double() - mean) / (variance + 1e-8) ** 0.5 for value in values_T])
    expected = torch.where(batch.mask_T > 0, equation_T, torch.zeros_like(equation_T))
    sums = whitening_sums(values_T, batch.mask_T)
    got = whiten(values_T.clone().requires_grad_(), batch.mask_T, *sums)
    assert got.dtype == torch.float32
    assert not got.requires_grad
    torch.testing.assert_close(got.double(), expected, rtol=1e-6, atol=1e-6)


def test_sums_of_parts_are_those_of_the_whole() -> None:
    batch, split = make("ragged"), 9
    values_T = numbers(batch, 1)
    whole = whitening_sums(values_T, batch.mask_T)
    parts = [whitening_sums(values_T[part], batch.mask_T[part]) for part in (slice(split), slice(split, None))]
    together = tuple(sum(sums) for sums in zip(*parts, strict=True))
    torch.testing.assert_close(together, whole)


@pytest.mark.parametrize("values", [[], [3.0], [0.1, 0.1, 0.1]])
def test_values_without_variance_become_zero(values: list[float]) -> None:
    values_T, mask_T = torch.tensor(values), torch.ones(len(values))
    assert whiten(values_T, mask_T, *whitening_sums(values_T, mask_T)).abs().sum() < 1e-6


@every_case
def test_turns_are_runs_of_trained_tokens(case: str) -> None:
    batch = make(case)
    expected = [-1] * batch.mask_T.numel()
    for _, runs in turns(batch):
        for number, run in enumerate(runs):
            for t in run:
                expected[t] = number
    got = turn_of_token(batch.mask_T, batch.cu_seqlens)
    assert got.dtype == torch.int64
    assert got.tolist() == expected


@every_case
def test_turn_rewards_stand_at_the_last_token_of_their_turn(case: str) -> None:
    batch = make(case)
    rewards, expected = [], torch.zeros(batch.mask_T.numel())
    for s, runs in turns(batch):
        rewards.append(torch.arange(1.0, len(runs) + 1) + 10 * s)
        for number, run in enumerate(runs):
            expected[run[-1]] = rewards[s][number]
    assert torch.equal(at_turn_ends(rewards, batch.mask_T, batch.cu_seqlens), expected)


def test_a_wrong_number_of_turn_rewards_is_an_error() -> None:
    mask_T, cu_seqlens = torch.tensor([1.0, 0.0, 1.0, 1.0]), torch.tensor([0, 3, 3, 4])
    right = [torch.ones(2), torch.ones(0), torch.ones(1)]
    assert at_turn_ends(right, mask_T, cu_seqlens).tolist() == [1, 0, 1, 1]
    for wrong in ([torch.ones(1), torch.ones(0), torch.ones(2)], [torch.ones(2), torch.ones(1)]):
        with pytest.raises(ValueError, match=r"\[2, 0, 1\] runs"):
            at_turn_ends(wrong, mask_T, cu_seqlens)


@every_case
def test_trained_tokens_ahead_are_counted(case: str) -> None:
    batch = make(case)
    expected = [sum(int(batch.mask_T[u] > 0) for u in range(t + 1, row.stop)) for _, row in batch.rows() for t in row]
    assert trained_ahead(batch.mask_T, batch.cu_seqlens).tolist() == expected
