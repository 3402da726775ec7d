"""Random packed batches, tame and nasty, and the comparison of a function with a float64 loop."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch

from headway.algorithms.tokens import Tokens, spread

CASES = ("ragged", "empty", "one_token", "all_masked", "some_masked", "extreme")
every_case = pytest.mark.parametrize("case", CASES)


@dataclass(frozen=True)
class Ragged:
    cu_seqlens: torch.Tensor
    mask_T: torch.Tensor
    current_T: torch.Tensor
    anchor_T: torch.Tensor
    advantages_S: torch.Tensor
    lags_T: torch.Tensor

    @property
    def tokens(self) -> Tokens:
        advantages_T = spread(self.advantages_S, self.cu_seqlens)
        return Tokens(self.anchor_T, advantages_T, self.mask_T, self.lags_T, self.cu_seqlens)

    @property
    def num_sequences(self) -> int:
        return self.cu_seqlens.numel() - 1

    def rows(self) -> Iterator[tuple[int, range]]:
        bounds = self.cu_seqlens.tolist()
        for s in range(self.num_sequences):
            yield s, range(bounds[s], bounds[s + 1])

    def trained(self) -> Iterator[tuple[int, list[int]]]:
        for s, row in self.rows():
            yield s, [t for t in row if self.mask_T[t] > 0]

    def double(self, *, requires_grad: bool = False) -> "Ragged":
        current_T = self.current_T.double().requires_grad_(requires_grad)
        return Ragged(
            self.cu_seqlens,
            self.mask_T.double(),
            current_T,
            self.anchor_T.double(),
            self.advantages_S.double(),
            self.lags_T,
        )


def make(case: str, seed: int = 0) -> Ragged:
    generator = torch.Generator().manual_seed(seed)
    lengths = {"empty": [], "one_token": [1, 1, 1]}.get(case, [5, 1, 12, 3, 7])
    total = sum(lengths)
    mask_T = (torch.rand(total, generator=generator) < 0.75).float()
    if case == "one_token":
        mask_T = torch.ones(total)
    if case == "all_masked":
        mask_T = torch.zeros(total)
    if case == "some_masked":
        mask_T[5:18] = 0
    anchor_T = -2 * torch.rand(total, generator=generator)
    shift_T = 0.3 * torch.randn(total, generator=generator)
    if case == "extreme":
        shift_T = torch.tensor([-1e4, 1e4, 30.0, -30.0, 0.5, -1e30, 0.0])[torch.arange(total) % 7]
    advantages_S = torch.randn(len(lengths), generator=generator)
    cu_seqlens = torch.tensor([0, *torch.tensor(lengths, dtype=torch.int64).cumsum(0).tolist()], dtype=torch.int32)
    # Values at masked places must never matter.
    current_T = torch.where(mask_T > 0, anchor_T + shift_T, torch.full_like(anchor_T, -1e30))
    lags_T = torch.randint(0, 5, (total,), generator=generator)
    return Ragged(cu_seqlens, mask_T, current_T, anchor_T, advantages_S, lags_T)


def assert_same(
    batch: Ragged,
    function: Callable[[Ragged], torch.Tensor],
    oracle: Callable[[Ragged], torch.Tensor],
    *,
    has_gradient: bool = True,
    tolerance: float = 1e-6,
) -> None:
    """Assert that values and gradients (of a weighted sum, so that every element counts) agree and are finite."""
    single = Ragged(
        batch.cu_seqlens,
        batch.mask_T,
        batch.current_T.clone().requires_grad_(),
        batch.anchor_T,
        batch.advantages_S,
        batch.lags_T,
    )
    double = batch.double(requires_grad=True)
    got, expected = function(single), oracle(double)
    assert torch.isfinite(got).all()
    torch.testing.assert_close(got.double(), expected, rtol=tolerance, atol=tolerance)
    if not has_gradient:
        assert not got.requires_grad
        return
    weights = torch.linspace(0.5, 1.5, got.numel(), dtype=torch.float64).reshape(got.shape)
    got_gradient = torch.autograd.grad((got * weights.float()).sum(), single.current_T)[0]
    if not expected.requires_grad:  # the oracle met no token at all
        assert got_gradient.abs().sum() == 0
        return
    expected_gradient = torch.autograd.grad((expected * weights).sum(), double.current_T, allow_unused=True)[0]
    assert torch.isfinite(got_gradient).all()
    torch.testing.assert_close(got_gradient.double(), expected_gradient, rtol=tolerance, atol=tolerance)


def stack(values: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(values) if values else torch.zeros(0, dtype=torch.float64)
