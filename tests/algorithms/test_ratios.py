import torch

from headway.algorithms.ratios import geometric_sequence_ratio, gspo_token_ratio, sequence_ratio, token_ratio
from tests.algorithms import oracles
from tests.algorithms.ragged import Ragged, assert_same, every_case, make


@every_case
def test_token_ratio_is_the_equation(case: str) -> None:
    assert_same(make(case), lambda b: token_ratio(b.current_T, b.anchor_T, b.mask_T), oracles.token_ratios)


@every_case
def test_sequence_ratio_is_the_product(case: str) -> None:
    assert_same(
        make(case),
        lambda b: sequence_ratio(b.current_T, b.anchor_T, b.mask_T, b.cu_seqlens),
        oracles.products,
    )


@every_case
def test_geometric_ratio_is_the_root_of_the_product(case: str) -> None:
    assert_same(
        make(case),
        lambda b: geometric_sequence_ratio(b.current_T, b.anchor_T, b.mask_T, b.cu_seqlens),
        oracles.geometric_means,
    )


@every_case
def test_gspo_token_form_has_the_sequence_ratio_as_value_and_the_tokens_gradient(case: str) -> None:
    def equation_14(b: Ragged) -> torch.Tensor:
        means, terms = oracles.geometric_means(b).detach(), []
        for s, row in b.rows():
            for t in row:
                logprob = b.current_T[t] if b.mask_T[t] > 0 else 0 * oracles.ONE
                total = sum(float((b.current_T[u] - b.anchor_T[u]).detach()) for u in row if b.mask_T[u] > 0)
                count = max(sum(int(b.mask_T[u] > 0) for u in row), 1)
                is_free = abs(total / count) <= oracles.LIMIT
                terms.append(means[s] * torch.exp(logprob - logprob.detach()) if is_free else means[s])
        return torch.stack(terms) if terms else torch.zeros(0, dtype=torch.float64)

    assert_same(make(case), lambda b: gspo_token_ratio(b.current_T, b.anchor_T, b.mask_T, b.cu_seqlens), equation_14)


def test_equal_policies_have_ratio_exactly_one() -> None:
    batch = make("ragged")
    arguments = batch.anchor_T, batch.anchor_T, batch.mask_T
    assert (token_ratio(*arguments) == 1).all()
    assert (sequence_ratio(*arguments, batch.cu_seqlens) == 1).all()
    assert (gspo_token_ratio(*arguments, batch.cu_seqlens) == 1).all()


def test_infinite_logprobs_stay_finite() -> None:
    mask_T, zeros_T = torch.ones(2), torch.zeros(2)
    minus_infinity_T = torch.full((2,), -torch.inf, requires_grad=True)
    ratio_T = token_ratio(minus_infinity_T, zeros_T, mask_T)
    assert torch.isfinite(ratio_T).all()
    assert torch.isfinite(torch.autograd.grad(ratio_T.sum(), minus_infinity_T)[0]).all()
