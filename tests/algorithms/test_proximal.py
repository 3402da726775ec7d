# mypy: disable-error-code="call-arg"
from collections.abc import Callable

import pytest
import torch

from headway.algorithms.proximal import PROXIMAL, linear, log_linear
from headway.algorithms.ratios import token_ratio
from headway.algorithms.tokens import Tokens
from tests.algorithms import oracles
from tests.algorithms.ragged import Ragged, assert_same, every_case, make, stack


def mean_of_logarithms(alpha: float, mu: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return alpha * mu + (1 - alpha) * (mu + x)


def log_of_mean(alpha: float, mu: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return mu + torch.log(alpha + (1 - alpha) * torch.exp(x))


EQUATIONS = [(log_linear, mean_of_logarithms), (linear, log_of_mean)]


@every_case
@pytest.mark.parametrize(("function", "equation"), EQUATIONS)
@pytest.mark.parametrize("oldest", [1, 5, 1000])
def test_approximations_are_their_equations(
    case: str,
    function: Callable[[torch.Tensor, Tokens], torch.Tensor],
    equation: Callable[[float, torch.Tensor, torch.Tensor], torch.Tensor],
    oldest: int,
) -> None:
    def per_token(b: Ragged) -> torch.Tensor:
        values = []
        for t in range(b.mask_T.numel()):
            alpha = 1.0 if b.lags_T[t] == 0 else 1 / (int(b.lags_T[t]) * oldest)
            x = (b.current_T[t] - b.anchor_T[t]).detach().clamp(-oracles.LIMIT, oracles.LIMIT)
            values.append(equation(alpha, b.anchor_T[t], x) if b.mask_T[t] > 0 else 0 * oracles.ONE)
        return stack(values)

    assert_same(
        make(case),
        lambda b: function(b.current_T, b.tokens._replace(lags_T=b.lags_T * oldest)),
        per_token,
        has_gradient=False,
    )


@pytest.mark.parametrize("function", PROXIMAL.values())
@pytest.mark.parametrize("lag", [0, 1])
def test_a_fresh_or_next_to_fresh_token_is_anchored_to_its_sampler(
    function: Callable[[torch.Tensor, Tokens], torch.Tensor], lag: int
) -> None:
    batch = make("ragged")
    tokens = batch.tokens._replace(lags_T=torch.full_like(batch.lags_T, lag))
    assert torch.equal(function(batch.current_T, tokens) * batch.mask_T, batch.anchor_T * batch.mask_T)


def test_the_approximation_lies_between_its_neighbours_and_nears_the_current_policy_with_lag() -> None:
    batch = make("ragged")
    trained_T = batch.mask_T > 0
    low_T, high_T = torch.minimum(batch.current_T, batch.anchor_T), torch.maximum(batch.current_T, batch.anchor_T)
    distances = []
    for lag in (2, 4, 100):
        tokens = batch.tokens._replace(lags_T=torch.full_like(batch.lags_T, lag))
        by_logarithm_T, by_probability_T = log_linear(batch.current_T, tokens), linear(batch.current_T, tokens)
        for prox_T in (by_logarithm_T, by_probability_T):
            assert ((prox_T >= low_T - 1e-6) & (prox_T <= high_T + 1e-6))[trained_T].all()
        assert (by_probability_T >= by_logarithm_T - 1e-6)[trained_T].all()
        distances.append(float((by_logarithm_T - batch.current_T)[trained_T].abs().sum()))
    assert distances[0] > distances[1] > distances[2] > 0


def test_the_ratio_to_the_approximation_is_a_power_of_the_whole_ratio() -> None:
    batch = make("ragged")
    tokens = batch.tokens._replace(lags_T=torch.full_like(batch.lags_T, 4))
    clipped_T = token_ratio(batch.current_T, log_linear(batch.current_T, tokens), batch.mask_T)
    whole_T = token_ratio(batch.current_T, batch.anchor_T, batch.mask_T)
    torch.testing.assert_close(clipped_T, whole_T**0.25)


@pytest.mark.parametrize("function", PROXIMAL.values())
def test_masked_and_infinite_logprobs_give_finite_ones_without_gradient(
    function: Callable[[torch.Tensor, Tokens], torch.Tensor],
) -> None:
    batch = make("ragged")
    nowhere_T = batch.mask_T == 0
    tokens = batch.tokens._replace(
        behavior_logprobs_T=torch.where(nowhere_T, torch.nan, batch.anchor_T),
        lags_T=torch.where(nowhere_T, 3, 10**9),
    )
    impossible_T = torch.full_like(batch.current_T, -torch.inf).requires_grad_()
    proximal_T = function(impossible_T, tokens)
    assert torch.isfinite(proximal_T).all()
    assert not proximal_T.requires_grad
    assert (proximal_T[nowhere_T] == 0).all()


@pytest.mark.parametrize("function", PROXIMAL.values())
def test_bfloat16_is_close_and_a_sequence_alone_is_the_same(
    function: Callable[[torch.Tensor, Tokens], torch.Tensor],
) -> None:
    batch = make("ragged")
    packed_T = function(batch.current_T, batch.tokens)
    rough = batch.tokens._replace(behavior_logprobs_T=batch.anchor_T.bfloat16())
    torch.testing.assert_close(function(batch.current_T.bfloat16(), rough).float(), packed_T, rtol=1e-2, atol=1e-2)
    for _, row in batch.rows():
        part = slice(row.start, row.stop)
        alone = Tokens(*(values_T[part] for values_T in batch.tokens[:4]), torch.tensor([0, len(row)]))
        torch.testing.assert_close(function(batch.current_T[part], alone), packed_T[part])
