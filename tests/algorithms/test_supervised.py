"""Losses on labelled data against float64 loops. The batches' anchor stands for the teacher."""

from dataclasses import replace

import pytest
import torch

from headway.algorithms.distillation import reverse_kl_distillation, sft, teacher_advantages
from headway.algorithms.metrics import Metrics, read, summarize
from headway.algorithms.preferences import bradley_terry
from headway.algorithms.returns import clipped_value_loss
from headway.algorithms.tokens import Tokens
from tests.algorithms import oracles
from tests.algorithms.ragged import Ragged, assert_same, every_case, make, stack


@every_case
def test_sft_is_minus_the_logprob_of_trained_tokens(case: str) -> None:
    def equation(b: Ragged) -> torch.Tensor:
        return stack([-b.current_T[t] if b.mask_T[t] > 0 else 0 * oracles.ONE for _, row in b.rows() for t in row])

    assert_same(make(case), lambda b: sft(b.current_T, b.mask_T), equation)


@pytest.mark.parametrize("margins", [0.0, 1.5, [0.0, 0.5, 3.0]])
@pytest.mark.parametrize("centering", [0.0, 0.01])
@pytest.mark.parametrize("scores", [[], [1.0, 0.5, -2.0, 0.3, 1.0, 1.5], [1e4, -1e4, -1e4, 1e4, 0.0, 0.0]])
def test_bradley_terry_is_the_equation(scores: list[float], margins: float | list[float], centering: float) -> None:
    pairs = range(len(scores) // 2)
    margin = torch.tensor(margins[: len(pairs)]) if isinstance(margins, list) else margins
    scores_S = torch.tensor(scores, requires_grad=True)
    exact_S = torch.tensor(scores, dtype=torch.float64, requires_grad=True)
    losses_P, metrics = bradley_terry(scores_S, margin=margin, centering=centering)
    expected = []
    for p in pairs:
        wanted = margins[p] if isinstance(margins, list) else margins
        chosen, rejected = exact_S[2 * p], exact_S[2 * p + 1]
        expected.append(_softplus(wanted - chosen + rejected) + centering * (chosen + rejected) ** 2)
    expected_P = stack(expected)
    torch.testing.assert_close(losses_P.double(), expected_P, rtol=1e-6, atol=1e-6)
    differences = [scores[2 * p] - scores[2 * p + 1] for p in pairs]
    numbers, count = _numbers(metrics), max(len(differences), 1)
    assert numbers["score_chosen"] == pytest.approx(sum(scores[0::2]) / count)
    assert numbers["score_rejected"] == pytest.approx(sum(scores[1::2]) / count)
    assert numbers["score_margin"] == pytest.approx(sum(differences) / count)
    assert numbers["score_accuracy"] == sum(d > 0 for d in differences) / count
    if scores:
        _same_gradients(losses_P, scores_S, expected_P, exact_S)


def test_centering_is_what_gives_a_pair_of_equal_scores_a_pull_to_zero() -> None:
    scores_S = torch.tensor([3.0, 3.0], requires_grad=True)
    (plain_S,) = torch.autograd.grad(bradley_terry(scores_S)[0].sum(), scores_S)
    (centered_S,) = torch.autograd.grad(bradley_terry(scores_S, centering=0.01)[0].sum(), scores_S)
    assert plain_S.sum() == 0
    torch.testing.assert_close(centered_S - plain_S, torch.full((2,), 2 * 0.01 * 6.0))


@every_case
@pytest.mark.parametrize("clip", [0.2, 0.05])
def test_clipped_value_loss_is_the_equation(case: str, clip: float) -> None:
    batch = make(case, 1)
    exact = _values(batch)
    values_T = exact.current_T.float().requires_grad_()
    returns_T = torch.linspace(-2, 1, values_T.numel()).double()
    losses_T, metrics = clipped_value_loss(values_T, exact.anchor_T.float(), returns_T.float(), batch.mask_T, clip=clip)
    expected, clipped = [], 0
    for t in range(values_T.numel()):
        old, target, value = exact.anchor_T[t], returns_T[t], exact.current_T[t]
        if batch.mask_T[t] == 0:
            expected.append(0 * oracles.ONE)
            continue
        near = old + (value - old).clamp(-clip, clip)
        is_clipped = bool((value - old).abs() > clip) and bool((near - target).abs() > (value - target).abs())
        clipped += is_clipped
        expected.append(((near if is_clipped else value) - target) ** 2 / 2)
    expected_T = stack(expected)
    torch.testing.assert_close(losses_T.double(), expected_T, rtol=1e-6, atol=1e-6)
    trained = int(batch.mask_T.sum())
    assert _numbers(metrics)["value_clip_fraction"] == pytest.approx(clipped / trained if trained else 0.0)
    assert case != "ragged" or 0 < clipped < trained
    if trained:
        _same_gradients(losses_T, values_T, expected_T, exact.current_T)


@every_case
def test_reverse_kl_distillation_is_the_equation(case: str) -> None:
    def equation(b: Ragged) -> torch.Tensor:
        losses = []
        for t in range(len(b.mask_T)):
            gap = (b.current_T[t] - b.anchor_T[t]).detach().clamp(-oracles.LIMIT, oracles.LIMIT)
            losses.append(gap * b.current_T[t] if b.mask_T[t] > 0 else 0 * oracles.ONE)
        return stack(losses)

    batch = make(case)
    assert_same(batch, lambda b: reverse_kl_distillation(b.current_T, b.anchor_T, b.tokens)[0], equation)
    _, metrics = reverse_kl_distillation(batch.current_T, batch.anchor_T, batch.tokens)
    limited = (batch.current_T - batch.anchor_T).clamp(-oracles.LIMIT, oracles.LIMIT)[batch.mask_T > 0]
    numbers = read(metrics)
    assert summarize(numbers)["reverse_kl"] == pytest.approx(float(limited.sum()) / max(len(limited), 1), abs=1e-6)
    by_lag = [value for name, value in numbers.items() if name.endswith("/reverse_kl_sum")]
    assert sum(by_lag) == pytest.approx(float(limited.sum()), rel=1e-6, abs=1e-6)


def test_reverse_kl_distillation_has_the_gradient_of_the_kl_in_expectation() -> None:
    """The expectation runs over all tokens of a vocabulary, each weighted with its probability under the student."""
    generator = torch.Generator().manual_seed(0)
    logits_V, teacher_V = torch.randn(2, 6, generator=generator, dtype=torch.float64)
    logits_V.requires_grad_()
    student_V, teacher_V = logits_V.log_softmax(0), teacher_V.log_softmax(0)
    bounds = torch.tensor([0, 6], dtype=torch.int32)
    tokens = Tokens(student_V.detach(), torch.zeros(6), torch.ones(6), torch.zeros(6, dtype=torch.int64), bounds)
    losses_V, _ = reverse_kl_distillation(student_V, teacher_V, tokens)
    expected_loss = (student_V.exp().detach() * losses_V).sum()
    kl = (student_V.exp() * (student_V - teacher_V)).sum()
    torch.testing.assert_close(
        torch.autograd.grad(expected_loss, logits_V, retain_graph=True)[0], torch.autograd.grad(kl, logits_V)[0]
    )


def test_a_teachers_advantages_have_the_gradient_of_the_kl_in_expectation_however_old_the_samples() -> None:
    """The tokens of a whole vocabulary are drawn from an older policy and weighed by their ratio to the student."""
    generator = torch.Generator().manual_seed(0)
    logits_V, teacher_V, behavior_V = torch.randn(3, 6, generator=generator, dtype=torch.float64)
    logits_V.requires_grad_()
    student_V, teacher_V, behavior_V = (x_V.log_softmax(0) for x_V in (logits_V, teacher_V, behavior_V))
    bounds = torch.tensor([0, 6], dtype=torch.int32)
    tokens = Tokens(behavior_V, torch.full((6,), 3.0), torch.ones(6), torch.arange(6), bounds)
    advantages_V, metrics = teacher_advantages(student_V, teacher_V, tokens, coefficient=0.5)
    torch.testing.assert_close(advantages_V, 3.0 + 0.5 * (teacher_V - student_V.detach()))
    assert not advantages_V.requires_grad
    weights_V = (student_V - behavior_V).exp().detach()
    loss = -(behavior_V.exp() * weights_V * advantages_V * student_V).sum()
    kl = (student_V.exp() * (student_V - teacher_V)).sum()
    torch.testing.assert_close(
        torch.autograd.grad(loss, logits_V, retain_graph=True)[0], 0.5 * torch.autograd.grad(kl, logits_V)[0]
    )
    assert read(metrics)["by_lag/1/reverse_kl_sum"] == pytest.approx(float((student_V[1] - teacher_V[1]).detach()))
    assert summarize(read(metrics))["reverse_kl"] == pytest.approx(float((student_V - teacher_V).detach().mean()))


def _softplus(x: torch.Tensor) -> torch.Tensor:
    """log(1 + exp(x)) = -log sigmoid(-x)"""
    return x + torch.log1p(torch.exp(-x)) if x > 0 else torch.log1p(torch.exp(x))


def _values(batch: Ragged) -> Ragged:
    """Return values as a network puts them out, none as far off as the logprob of an impossible token."""
    limited_T = (batch.current_T - batch.anchor_T).clamp(-50, 50) + batch.anchor_T
    return replace(batch, current_T=torch.where(batch.mask_T > 0, limited_T, batch.current_T)).double(
        requires_grad=True
    )


def _same_gradients(losses: torch.Tensor, inputs: torch.Tensor, expected: torch.Tensor, exact: torch.Tensor) -> None:
    weights = torch.linspace(0.5, 1.5, losses.numel(), dtype=torch.float64)
    got = torch.autograd.grad((losses * weights.float()).sum(), inputs)[0]
    wanted = torch.autograd.grad((expected * weights).sum(), exact)[0]
    assert torch.isfinite(got).all()
    torch.testing.assert_close(got.double(), wanted, rtol=1e-6, atol=1e-6)


def _numbers(metrics: Metrics) -> dict[str, float]:
    return summarize({name: float(value) for name, value in metrics.items()})
