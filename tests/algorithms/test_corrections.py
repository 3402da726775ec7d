from collections.abc import Callable
from functools import partial

import pytest
import torch

from algorithms.corrections.importance import (
    decoupled,
    geometric_truncated_is,
    sequence_truncated_is,
    truncated_is,
)
from algorithms.metrics import summarize
from algorithms.tokens import Tokens
from tests.algorithms import oracles
from tests.algorithms.ragged import Ragged, assert_same, every_case, make

WEIGHTS = {
    truncated_is: oracles.token_ratios,
    sequence_truncated_is: lambda b: oracles.at_tokens(oracles.products(b), b),
    geometric_truncated_is: lambda b: oracles.at_tokens(oracles.geometric_means(b), b),
}


@every_case
@pytest.mark.parametrize("correction", WEIGHTS)
@pytest.mark.parametrize("cap", [2.0, 1.05])
def test_weights_are_truncated_ratios_without_gradient(
    case: str, correction: Callable[..., tuple[torch.Tensor, object]], cap: float
) -> None:
    def equation(b: Ragged) -> torch.Tensor:
        return WEIGHTS[correction](b).detach().clamp(max=cap)

    assert_same(make(case), _weights(partial(correction, cap=cap)), equation, has_gradient=False)


@every_case
def test_decoupled_is_the_whole_ratio(case: str) -> None:
    assert_same(
        make(case),
        _weights(decoupled),
        lambda b: oracles.token_ratios(b).detach(),
        has_gradient=False,
        tolerance=2e-6,
    )


def test_capped_fraction_counts_trained_tokens_over_the_cap() -> None:
    batch = make("ragged")
    _, metrics = truncated_is(batch.current_T, batch.tokens, cap=1.1)
    ratios = oracles.token_ratios(batch.double())
    over = [bool(ratios[t] > 1.1) for _, row in batch.trained() for t in row]
    numbers = summarize({name: float(value) for name, value in metrics.items()})
    assert numbers["capped_fraction"] == pytest.approx(sum(over) / len(over))


def test_product_and_geometric_mean_differ_as_their_names_say() -> None:
    current_T, behavior_T = torch.full((4,), 0.1), torch.zeros(4)
    cu_seqlens, mask_T = torch.tensor([0, 4]), torch.ones(4)
    tokens = Tokens(behavior_T, torch.ones(4), mask_T, torch.zeros(4, dtype=torch.int64), cu_seqlens)
    product_T, _ = sequence_truncated_is(current_T, tokens)
    mean_T, _ = geometric_truncated_is(current_T, tokens)
    torch.testing.assert_close(product_T, torch.full((4,), 0.4).exp())
    torch.testing.assert_close(mean_T, torch.full((4,), 0.1).exp())


def _weights(correction: Callable[..., tuple[torch.Tensor, object]]) -> Callable[[Ragged], torch.Tensor]:
    return lambda b: correction(b.current_T, b.tokens)[0]
