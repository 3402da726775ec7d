import pytest
import torch

from headway.algorithms.ratios import k1
from headway.algorithms.returns import kl_shaped, kl_shaped_tokens, length_normalized, overlong_penalty, returns_to_go
from headway.algorithms.tokens import segment_sum
from tests.algorithms.ragged import Ragged, every_case, make


def kl_of(batch: Ragged) -> torch.Tensor:
    """Return numbers [T] up to +-20, with an absurd one at each masked place."""
    kl_T = k1(batch.current_T, batch.anchor_T, batch.mask_T)
    return torch.where(batch.mask_T > 0, kl_T, torch.full_like(kl_T, torch.nan))


def equation_13(length: int, limit: int, buffer: int) -> float:
    if length <= limit - buffer:
        return 0.0
    if length <= limit:
        return (limit - buffer - length) / buffer
    return -1.0


@pytest.mark.parametrize(("limit", "buffer"), [(20, 8), (20, 20), (20, 1), (20, 0)])
def test_overlong_penalty_is_the_equation(limit: int, buffer: int) -> None:
    lengths_S = torch.arange(60)
    expected = [equation_13(length, limit, buffer) for length in range(60)]
    for dtype in (torch.int64, torch.int32, torch.float64):
        got = overlong_penalty(lengths_S.to(dtype), limit=limit, buffer=buffer)
        assert got.is_floating_point()
        assert got.tolist() == pytest.approx(expected, abs=1e-6)


def test_the_penalty_has_no_step() -> None:
    lengths_S = torch.tensor([16384, 18432, 20480, 20481, 10**6])
    assert overlong_penalty(lengths_S, limit=20480, buffer=4096).tolist() == [0, -0.5, -1, -1, -1]
    assert overlong_penalty(lengths_S[:0], limit=20480, buffer=4096).tolist() == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("unit", [1.0, 1000.0])
def test_length_normalized_is_the_reward_per_token(dtype: torch.dtype, unit: float) -> None:
    rewards_S, lengths_S = torch.tensor([1.0, 1.0, -0.5, 0.3], dtype=dtype), torch.tensor([10, 4000, 7, 0])
    got = length_normalized(rewards_S, lengths_S, unit=unit)
    assert got.dtype == dtype
    assert got.tolist() == pytest.approx([unit / 10, unit / 4000, -0.5 * unit / 7, 0.3 * unit])


@every_case
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_kl_shaped_is_the_equation(case: str, dtype: torch.dtype) -> None:
    batch = make(case)
    kl_T, rewards_S = kl_of(batch), batch.advantages_S.to(dtype)
    expected = [float(rewards_S[s]) - 0.02 * sum(float(kl_T[t]) for t in row) for s, row in batch.trained()]
    got = kl_shaped(rewards_S, kl_T.requires_grad_(), batch.mask_T, batch.cu_seqlens, coefficient=0.02)
    assert got.dtype == dtype
    assert not got.requires_grad
    assert got.tolist() == pytest.approx(expected, rel=1e-6, abs=1e-6)


@every_case
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_kl_shaped_tokens_are_the_equation(case: str, dtype: torch.dtype) -> None:
    batch = make(case)
    kl_T, rewards_S = kl_of(batch), batch.advantages_S.to(dtype)
    expected = [0.0] * batch.mask_T.numel()
    for s, row in batch.trained():
        for t in row:
            expected[t] = -0.02 * float(kl_T[t]) + (float(rewards_S[s]) if t == row[-1] else 0.0)
    got = kl_shaped_tokens(rewards_S, kl_T.requires_grad_(), batch.mask_T, batch.cu_seqlens, coefficient=0.02)
    assert got.dtype == dtype
    assert not got.requires_grad
    assert got.tolist() == pytest.approx(expected, rel=1e-6, abs=1e-6)


@every_case
def test_token_rewards_sum_to_the_shaped_reward(case: str) -> None:
    batch = make(case)
    arguments = batch.advantages_S.double(), kl_of(batch), batch.mask_T, batch.cu_seqlens
    rewards_T, rewards_S = kl_shaped_tokens(*arguments, coefficient=0.1), kl_shaped(*arguments, coefficient=0.1)
    returns_T = returns_to_go(rewards_T, batch.mask_T, batch.cu_seqlens)
    sums_S = segment_sum(rewards_T, batch.cu_seqlens)
    for s, row in batch.trained():
        if row:
            assert float(sums_S[s]) == pytest.approx(float(rewards_S[s]))
            assert float(returns_T[row[0]]) == pytest.approx(float(rewards_S[s]))
        else:
            assert sums_S[s] == 0
            assert rewards_S[s] == batch.advantages_S[s]


def test_half_precision_estimates_are_summed_in_the_dtype_of_the_rewards() -> None:
    kl_T, cu_seqlens = torch.full((4000,), 0.01, dtype=torch.bfloat16), torch.tensor([0, 4000])
    got = kl_shaped(torch.zeros(1), kl_T, torch.ones(4000), cu_seqlens, coefficient=1.0)
    assert float(got) == pytest.approx(-40, rel=1e-2)
