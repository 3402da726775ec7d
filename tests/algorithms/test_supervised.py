"""Supervised losses against float64 loops. The batches' anchor stands for the reference and the teacher."""

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from algorithms import supervised
from algorithms.metrics import Metrics, summarize
from algorithms.supervised import bradley_terry, clipped_value_loss, dpo, reverse_kl_distillation, sft
from tests.algorithms import oracles
from tests.algorithms.ragged import Ragged, assert_same, every_case, make, stack

every_kind = pytest.mark.parametrize("kind", ["sigmoid", "ipo", "hinge"])


@every_case
def test_sft_is_minus_the_logprob_of_trained_tokens(case: str) -> None:
    def equation(b: Ragged) -> torch.Tensor:
        return stack([-b.current_T[t] if b.mask_T[t] > 0 else 0 * oracles.ONE for _, row in b.rows() for t in row])

    assert_same(make(case), lambda b: sft(b.current_T, b.mask_T), equation)


@every_case
@every_kind
@pytest.mark.parametrize(("beta", "label_smoothing"), [(0.1, 0.0), (0.7, 0.2)])
@pytest.mark.parametrize("seed", [0, 1])
def test_dpo_is_the_equation(case: str, kind: Any, beta: float, label_smoothing: float, seed: int) -> None:
    def losses(b: Ragged) -> torch.Tensor:
        options: dict[str, Any] = {"beta": beta, "kind": kind, "label_smoothing": label_smoothing}
        return dpo(b.current_T, b.anchor_T, b.mask_T, b.cu_seqlens, **options)[0]

    def equation(b: Ragged) -> torch.Tensor:
        return stack([preference_loss(gap, kind, beta, label_smoothing) for gap in gaps(b, kind)])

    # h is a sum of up to a dozen numbers of size 20 in `extreme`; ipo squares its distance from 1 / (2 beta).
    assert_same(_pairs(case, seed), losses, equation, tolerance=2e-6)


@every_kind
def test_dpo_in_bfloat16_is_the_equation_of_the_rounded_logprobs(kind: Any) -> None:
    batch = _pairs("ragged")
    rounded = replace(batch, current_T=batch.current_T.bfloat16(), anchor_T=batch.anchor_T.bfloat16())
    losses_P, _ = dpo(rounded.current_T, rounded.anchor_T, rounded.mask_T, rounded.cu_seqlens, kind=kind)
    expected = stack([preference_loss(gap, kind, 0.1, 0.0) for gap in gaps(rounded.double(), kind)])
    torch.testing.assert_close(losses_P.double(), expected, rtol=1e-2, atol=1e-2)


@every_kind
def test_a_pair_alone_has_the_loss_that_it_has_inside_a_row(kind: Any) -> None:
    batch = _pairs("ragged")
    losses_P, _ = dpo(batch.current_T, batch.anchor_T, batch.mask_T, batch.cu_seqlens, kind=kind)
    for p in range(batch.num_sequences // 2):
        start, stop = int(batch.cu_seqlens[2 * p]), int(batch.cu_seqlens[2 * p + 2])
        inside, bounds = slice(start, stop), batch.cu_seqlens[2 * p : 2 * p + 3] - start
        alone_P, _ = dpo(batch.current_T[inside], batch.anchor_T[inside], batch.mask_T[inside], bounds, kind=kind)
        torch.testing.assert_close(alone_P, losses_P[p : p + 1], rtol=1e-6, atol=1e-6)


@every_case
@every_kind
def test_dpo_reports_margin_and_accuracy(case: str, kind: Any) -> None:
    batch = _pairs(case, 1)
    _, metrics = dpo(batch.current_T, batch.anchor_T, batch.mask_T, batch.cu_seqlens, beta=0.3, kind=kind)
    numbers, expected = _numbers(metrics), [float(gap) for gap in gaps(batch.double(), kind)]
    count = max(len(expected), 1)
    assert numbers["reward_margin"] == pytest.approx(0.3 * sum(expected) / count, rel=1e-5, abs=1e-6)
    assert numbers["reward_accuracy"] == pytest.approx(sum(gap > 0 for gap in expected) / count)


def test_ipo_does_not_depend_on_length_and_the_others_do() -> None:
    def loss(length: int, kind: Any) -> float:
        current_T = torch.cat([torch.full((length,), -1.0), torch.full((length,), -1.3)])
        bounds = torch.tensor([0, length, 2 * length])
        return float(dpo(current_T, torch.full((2 * length,), -1.1), torch.ones(2 * length), bounds, kind=kind)[0])

    assert loss(3, "ipo") == pytest.approx(loss(12, "ipo"), rel=1e-5)
    assert loss(3, "sigmoid") > loss(12, "sigmoid") + 0.01
    assert loss(3, "hinge") > loss(12, "hinge") + 0.01


@pytest.mark.parametrize("margin", [0.0, 1.5])
@pytest.mark.parametrize("scores", [[], [1.0, 0.5, -2.0, 0.3], [1e4, -1e4, -1e4, 1e4, 0.0, 0.0]])
def test_bradley_terry_is_the_equation(scores: list[float], margin: float) -> None:
    scores_S = torch.tensor(scores, requires_grad=True)
    exact_S = torch.tensor(scores, dtype=torch.float64, requires_grad=True)
    losses_P, metrics = bradley_terry(scores_S, margin=margin)
    pairs = range(len(scores) // 2)
    expected_P = stack([_softplus(margin - exact_S[2 * p] + exact_S[2 * p + 1]) for p in pairs])
    torch.testing.assert_close(losses_P.double(), expected_P, rtol=1e-6, atol=1e-6)
    differences = [scores[2 * p] - scores[2 * p + 1] for p in pairs]
    numbers, count = _numbers(metrics), max(len(differences), 1)
    assert numbers["score_margin"] == pytest.approx(sum(differences) / count)
    assert numbers["score_accuracy"] == sum(d > 0 for d in differences) / count
    if scores:
        _same_gradients(losses_P, scores_S, expected_P, exact_S)


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
    assert_same(batch, lambda b: reverse_kl_distillation(b.current_T, b.anchor_T, b.mask_T)[0], equation)
    _, metrics = reverse_kl_distillation(batch.current_T, batch.anchor_T, batch.mask_T)
    limited = (batch.current_T - batch.anchor_T).clamp(-oracles.LIMIT, oracles.LIMIT)[batch.mask_T > 0]
    assert _numbers(metrics)["reverse_kl"] == pytest.approx(float(limited.sum()) / max(len(limited), 1), abs=1e-6)


def test_reverse_kl_distillation_has_the_gradient_of_the_kl_in_expectation() -> None:
    """Over all tokens of a vocabulary, each weighted with its probability under the student."""
    generator = torch.Generator().manual_seed(0)
    logits_V, teacher_V = torch.randn(2, 6, generator=generator, dtype=torch.float64)
    logits_V.requires_grad_()
    student_V, teacher_V = logits_V.log_softmax(0), teacher_V.log_softmax(0)
    losses_V, _ = reverse_kl_distillation(student_V, teacher_V, torch.ones(6))
    expected_loss = (student_V.exp().detach() * losses_V).sum()
    kl = (student_V.exp() * (student_V - teacher_V)).sum()
    torch.testing.assert_close(
        torch.autograd.grad(expected_loss, logits_V, retain_graph=True)[0], torch.autograd.grad(kl, logits_V)[0]
    )


def test_what_stands_at_masked_places_never_matters() -> None:
    batch = _pairs("ragged")
    absurd_T = torch.tensor([float("nan"), float("-inf"), float("inf")])[torch.arange(batch.mask_T.numel()) % 3]
    is_masked_T = batch.mask_T == 0
    current_T = torch.where(is_masked_T, absurd_T, batch.current_T).requires_grad_()
    anchor_T = torch.where(is_masked_T, absurd_T.flip(0), batch.anchor_T)
    losses = (
        sft(current_T, batch.mask_T),
        *(dpo(current_T, anchor_T, batch.mask_T, batch.cu_seqlens, kind=k)[0] for k in ("sigmoid", "ipo", "hinge")),
        clipped_value_loss(current_T, anchor_T, anchor_T.flip(0), batch.mask_T * batch.mask_T.flip(0))[0],
        reverse_kl_distillation(current_T, anchor_T, batch.mask_T)[0],
    )
    for loss in losses:
        gradient_T = torch.autograd.grad(loss.sum(), current_T)[0]
        assert torch.isfinite(loss).all()
        assert torch.isfinite(gradient_T).all()
        assert (gradient_T[is_masked_T] == 0).all()


@pytest.mark.parametrize("function", [sft, dpo, bradley_terry, clipped_value_loss, reverse_kl_distillation])
def test_docstrings_name_their_source(function: Callable[..., object]) -> None:
    assert "\n\n    Source: " in (function.__doc__ or "")
    assert inspect.getmodule(function) is supervised


def gaps(b: Ragged, kind: Any) -> list[torch.Tensor]:
    """h of every pair."""
    scores = []
    for _, row in b.trained():
        log_ratios = [(b.current_T[t] - b.anchor_T[t]).clamp(-oracles.LIMIT, oracles.LIMIT) for t in row]
        scores.append(sum(log_ratios, 0 * oracles.ONE) / (max(len(row), 1) if kind == "ipo" else 1))
    return [scores[2 * p] - scores[2 * p + 1] for p in range(len(scores) // 2)]


def preference_loss(gap: torch.Tensor, kind: Any, beta: float, label_smoothing: float) -> torch.Tensor:
    if kind == "ipo":
        return (gap - 1 / (2 * beta)) ** 2
    if kind == "hinge":
        return torch.maximum(0 * gap, 1 - beta * gap)
    return (1 - label_smoothing) * _softplus(-beta * gap) + label_smoothing * _softplus(beta * gap)


def _softplus(x: torch.Tensor) -> torch.Tensor:
    """log(1 + exp(x)) = -log sigmoid(-x)"""
    return x + torch.log1p(torch.exp(-x)) if x > 0 else torch.log1p(torch.exp(x))


def _pairs(case: str, seed: int = 0) -> Ragged:
    """A batch with an even number of sequences: the last one is left out where there is no partner for it."""
    batch = make(case, seed)
    even = batch.num_sequences - batch.num_sequences % 2
    stop = int(batch.cu_seqlens[even])
    return Ragged(
        batch.cu_seqlens[: even + 1],
        batch.mask_T[:stop],
        batch.current_T[:stop],
        batch.anchor_T[:stop],
        batch.advantages_S[:even],
        batch.lags_T[:stop],
    )


def _values(batch: Ragged) -> Ragged:
    """Values within reason: a network's outputs, not logprobs of impossible tokens."""
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
