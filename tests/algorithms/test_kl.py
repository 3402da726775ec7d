import math
from collections.abc import Callable

import pytest
import torch

from headway.algorithms.ratios import KL_ESTIMATORS, k1, k2, k3
from tests.algorithms import oracles
from tests.algorithms.ragged import Ragged, assert_same, every_case, make, stack

EQUATIONS = [(k1, lambda x: x), (k2, lambda x: x * x / 2), (k3, lambda x: torch.exp(-x) - 1 + x)]


@every_case
@pytest.mark.parametrize(("estimator", "equation"), EQUATIONS)
def test_estimators_are_their_equations(
    case: str,
    estimator: Callable[..., torch.Tensor],
    equation: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    def per_token(b: Ragged) -> torch.Tensor:
        terms = []
        for t in range(b.mask_T.numel()):
            x = (b.current_T[t] - b.anchor_T[t]).clamp(-oracles.LIMIT, oracles.LIMIT)
            terms.append(equation(x) if b.mask_T[t] > 0 else 0 * oracles.ONE)
        return stack(terms)

    assert_same(make(case), lambda b: estimator(b.current_T, b.anchor_T, b.mask_T), per_token, tolerance=2e-6)


def test_k1_and_k3_have_the_kl_as_expectation() -> None:
    policy, reference = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.3, 0.5])
    divergence = sum(p * math.log(p / q) for p, q in zip(policy.tolist(), reference.tolist(), strict=True))
    for estimator in (k1, k3):
        expectation = (policy * estimator(policy.log(), reference.log(), torch.ones(3))).sum()
        assert float(expectation) == pytest.approx(divergence, abs=1e-6)


def test_as_an_on_policy_loss_k2_has_the_gradient_of_the_kl_and_k1_none() -> None:
    logits, reference = torch.tensor([0.5, -0.3, 0.1]), torch.tensor([0.2, 0.3, 0.5])
    gradients = {}
    for name, estimator in KL_ESTIMATORS.items():
        free = logits.clone().requires_grad_()
        logprobs = free.log_softmax(0)
        expectation = (logprobs.exp().detach() * estimator(logprobs, reference.log(), torch.ones(3))).sum()
        gradients[name] = torch.autograd.grad(expectation, free)[0]
    free = logits.clone().requires_grad_()
    logprobs = free.log_softmax(0)
    exact = torch.autograd.grad((logprobs.exp() * (logprobs - reference.log())).sum(), free)[0]
    torch.testing.assert_close(gradients["k2"], exact)
    torch.testing.assert_close(gradients["k1"], torch.zeros(3))


@pytest.mark.parametrize("estimator", KL_ESTIMATORS.values())
def test_bfloat16_is_close(estimator: Callable[..., torch.Tensor]) -> None:
    batch = make("ragged")
    rough = estimator(batch.current_T.bfloat16(), batch.anchor_T.bfloat16(), batch.mask_T)
    exact = estimator(batch.current_T.bfloat16().double(), batch.anchor_T.bfloat16().double(), batch.mask_T)
    torch.testing.assert_close(rough.double(), exact, rtol=1e-2, atol=1e-2)
