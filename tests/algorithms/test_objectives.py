import pytest
import torch

from algorithms.aggregation import sequence_mean, trained_sequences
from algorithms.metrics import summarize
from algorithms.objectives.gspo import gspo
from algorithms.objectives.policy_gradient import policy_gradient
from algorithms.objectives.ppo_clip import ppo_clip
from algorithms.tokens import Tokens
from tests.algorithms import oracles
from tests.algorithms.ragged import Ragged, assert_same, every_case, make, stack


def arguments(b: Ragged) -> tuple[torch.Tensor, torch.Tensor, Tokens]:
    return b.current_T, b.anchor_T, b.tokens


@every_case
@pytest.mark.parametrize(("low", "high"), [(0.2, 0.2), (0.2, 0.28), (0.0, 0.0)])
def test_ppo_clip_is_the_equation(case: str, low: float, high: float) -> None:
    assert_same(
        make(case),
        lambda b: ppo_clip(*arguments(b), clip_low=low, clip_high=high)[0],
        lambda b: oracles.ppo_losses(b, low, high),
    )


@every_case
@pytest.mark.parametrize(("low", "high"), [(3e-4, 4e-4), (0.1, 0.1)])
def test_gspo_averaged_over_sequences_is_equation_5_and_its_gradient(case: str, low: float, high: float) -> None:
    def loss(b: Ragged) -> torch.Tensor:
        sequences = float(trained_sequences(b.mask_T, b.cu_seqlens))
        shares_T = sequence_mean(b.mask_T, b.cu_seqlens, tokens=0, sequences=sequences)
        return (gspo(*arguments(b), clip_low=low, clip_high=high)[0] * shares_T).sum()

    assert_same(make(case), loss, lambda b: oracles.gspo_loss(b, low, high))


@every_case
def test_policy_gradient_is_minus_advantage_times_logprob(case: str) -> None:
    def equation(b: Ragged) -> torch.Tensor:
        return stack(
            [
                -b.advantages_S[s] * b.current_T[t] if b.mask_T[t] > 0 else 0 * oracles.ONE
                for s, row in b.rows()
                for t in row
            ]
        )

    assert_same(make(case), lambda b: policy_gradient(*arguments(b))[0], equation)


def test_at_ratio_one_all_objectives_have_the_policy_gradient() -> None:
    batch = make("ragged")
    gradients = []
    for objective in (ppo_clip, policy_gradient):
        current_T = batch.anchor_T.clone().requires_grad_()
        losses_T, _ = objective(current_T, batch.anchor_T, batch.tokens)
        gradients.append(torch.autograd.grad((losses_T * batch.mask_T).sum(), current_T)[0])
    torch.testing.assert_close(gradients[0], gradients[1], rtol=0, atol=1e-6)


@every_case
def test_clip_fraction_counts_trained_tokens_without_gradient(case: str) -> None:
    batch = make(case)
    _, metrics = ppo_clip(*arguments(batch), clip_low=0.2, clip_high=0.2)
    ratios, count = oracles.token_ratios(batch.double()), 0
    for s, row in batch.trained():
        for t in row:
            is_up = batch.advantages_S[s] > 0
            count += int(ratios[t] > 1.2 if is_up else ratios[t] < 0.8)
    trained = int(batch.mask_T.sum())
    share = summarize({name: float(value) for name, value in metrics.items()})["clip_fraction"]
    assert share == pytest.approx(count / trained if trained else 0.0)
