"""Losses of preferences against float64 loops over pairs and responses. The batches' anchor is the reference."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from headway.algorithms.metrics import Metrics, merge, summarize
from headway.algorithms.preferences import (
    PREFERENCES,
    REFERENCE_FREE,
    kto,
    length_desensitized_dpo,
    orpo,
    reference_point_of,
    reference_point_sums,
    robust_dpo,
)
from tests.algorithms import oracles
from tests.algorithms.ragged import Ragged, assert_same, every_case, make, stack

Oracle = Callable[..., torch.Tensor]
"""Returns the loss of a pair, from the logprobs of both responses' trained tokens, their references' and options."""

SETTINGS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("dpo", {}),
    ("dpo", {"beta": 0.7, "label_smoothing": 0.2}),
    ("ipo", {}),
    ("ipo", {"beta": 0.7}),
    ("hinge", {}),
    ("hinge", {"beta": 0.7}),
    ("robust_dpo", {}),
    ("robust_dpo", {"beta": 0.7, "label_smoothing": 0.3}),
    ("length_desensitized_dpo", {"alpha": 0.3}),
    ("length_desensitized_dpo", {"alpha": 0.0, "beta": 0.7, "label_smoothing": 0.2}),
    ("simpo", {}),
    ("simpo", {"beta": 0.5, "gamma": 0.2}),
    ("orpo", {}),
    ("orpo", {"beta": 0.7, "nll_length": 4.5}),
)
every_setting = pytest.mark.parametrize(("name", "options"), SETTINGS)
every_kind = pytest.mark.parametrize("name", PREFERENCES)


def losses_of(name: str, b: Ragged, **options: Any) -> tuple[torch.Tensor, Metrics]:
    if name == "length_desensitized_dpo":
        options = {"alpha": 0.3} | options
    reference_T: Any = None if name in REFERENCE_FREE else b.anchor_T
    return PREFERENCES[name](b.current_T, reference_T, b.mask_T, b.cu_seqlens, **options)


@every_case
@every_setting
def test_every_loss_is_its_equation(case: str, name: str, options: dict[str, Any]) -> None:
    def equation(b: Ragged) -> torch.Tensor:
        return stack([ORACLES[name](*pair, **options) for pair in pairs_of(b)])

    # A reward is a sum of up to a dozen numbers of size 20 in `extreme`; ipo squares its distance from 1 / (2 beta).
    assert_same(_pairs(case, 1), lambda b: losses_of(name, b, **options)[0], equation, tolerance=2e-6)


@every_setting
def test_gradients_are_those_of_finite_differences(name: str, options: dict[str, Any]) -> None:
    batch = _pairs("ragged", 1).double()

    def losses(trained_N: torch.Tensor) -> torch.Tensor:
        current_T = batch.current_T.masked_scatter(batch.mask_T > 0, trained_N)
        return losses_of(name, replace(batch, current_T=current_T), **options)[0]

    assert torch.autograd.gradcheck(losses, batch.current_T[batch.mask_T > 0].requires_grad_(), fast_mode=True)


@pytest.mark.parametrize("name", ["dpo", "ipo", "hinge"])
def test_in_bfloat16_a_loss_is_the_equation_of_the_rounded_logprobs(name: str) -> None:
    batch = _pairs("ragged")
    rounded = replace(batch, current_T=batch.current_T.bfloat16(), anchor_T=batch.anchor_T.bfloat16())
    expected = stack([ORACLES[name](*pair) for pair in pairs_of(rounded.double())])
    torch.testing.assert_close(losses_of(name, rounded)[0].double(), expected, rtol=1e-2, atol=1e-2)


@every_kind
def test_a_pair_alone_has_the_loss_that_it_has_inside_a_row(name: str) -> None:
    batch = _pairs("ragged")
    losses_P, metrics = losses_of(name, batch)
    alone = [losses_of(name, _part(batch, 2 * p, 2 * p + 2)) for p in range(batch.num_sequences // 2)]
    torch.testing.assert_close(torch.cat([each for each, _ in alone]), losses_P, rtol=1e-6, atol=1e-6)
    merged = merge([{key: float(value) for key, value in each.items()} for _, each in alone])
    assert merged == pytest.approx({key: float(value) for key, value in metrics.items()}, rel=1e-5)


@every_case
@every_setting
def test_metrics_are_means_over_pairs(case: str, name: str, options: dict[str, Any]) -> None:
    batch = _pairs(case, 1)
    numbers = _numbers(losses_of(name, batch, **options)[1])
    rewards = [REWARDS[name](*pair, **options) for pair in pairs_of(batch.double())]
    margins = [float(chosen - rejected) for chosen, rejected in rewards]
    logprobs = [(float(_sum(pair[0])), float(_sum(pair[1]))) for pair in pairs_of(batch.double())]

    def mean(values: list[float]) -> Any:
        return pytest.approx(sum(values) / max(len(values), 1), rel=1e-5, abs=1e-6)

    assert numbers["reward_chosen"] == mean([float(chosen) for chosen, _ in rewards])
    assert numbers["reward_rejected"] == mean([float(rejected) for _, rejected in rewards])
    assert numbers["reward_margin"] == mean(margins)
    assert numbers["reward_accuracy"] == mean([float(margin > 0) for margin in margins])
    assert numbers["logprob_chosen"] == mean([chosen for chosen, _ in logprobs])
    assert numbers["logprob_rejected"] == mean([rejected for _, rejected in logprobs])


@pytest.mark.parametrize("name", ["ipo", "simpo", "orpo"])
def test_losses_of_means_do_not_depend_on_length_and_dpo_does(name: str) -> None:
    def loss(length: int, name: str) -> float:
        current_T = torch.cat([torch.full((length,), -1.0), torch.full((length,), -1.3)])
        bounds, ones_T = torch.tensor([0, length, 2 * length]), torch.ones(2 * length)
        return float(PREFERENCES[name](current_T, torch.full((2 * length,), -1.1), ones_T, bounds)[0])

    assert loss(3, name) == pytest.approx(loss(12, name), rel=1e-5)
    assert loss(3, "dpo") > loss(12, "dpo") + 0.01


def test_robust_dpo_over_flipped_labels_is_dpo_over_the_right_ones() -> None:
    batch, flip_rate = _pairs("ragged").double(), 0.2
    flipped = _in_order(batch, [s ^ 1 for s in range(batch.num_sequences)])
    kept_P, _ = losses_of("robust_dpo", batch, label_smoothing=flip_rate)
    flipped_P, _ = losses_of("robust_dpo", flipped, label_smoothing=flip_rate)
    torch.testing.assert_close((1 - flip_rate) * kept_P + flip_rate * flipped_P, losses_of("dpo", batch)[0])


@pytest.mark.parametrize("label_smoothing", [-0.1, 0.5, 0.7])
def test_robust_dpo_refuses_a_share_of_flipped_labels_that_it_cannot_correct(label_smoothing: float) -> None:
    b = _pairs("ragged")
    with pytest.raises(ValueError, match=r"label_smoothing is .* less than 0\.5"):
        robust_dpo(b.current_T, b.anchor_T, b.mask_T, b.cu_seqlens, label_smoothing=label_smoothing)


def test_length_desensitized_dpo_with_alpha_1_is_dpo_and_with_0_ignores_the_longer_tail() -> None:
    """The chosen response is the longer one in the first pair, the rejected one in the second."""
    batch = _in_order(_pairs("ragged"), [0, 1, 3, 2])
    current_T = batch.current_T.clone().requires_grad_()
    inputs = (current_T, batch.anchor_T, batch.mask_T, batch.cu_seqlens)
    torch.testing.assert_close(length_desensitized_dpo(*inputs, alpha=1.0)[0], losses_of("dpo", batch)[0])
    (gradient_T,) = torch.autograd.grad(length_desensitized_dpo(*inputs, alpha=0.0)[0].sum(), current_T)
    rows = [row for _, row in batch.trained()]
    kept = [int((gradient_T[row] != 0).sum()) for row in rows]
    shorter = [min(len(rows[2 * p]), len(rows[2 * p + 1])) for p in (0, 1)]
    assert kept == [shorter[0], shorter[0], shorter[1], shorter[1]]
    assert len(rows[0]) > shorter[0] > 0
    assert len(rows[3]) > shorter[1] > 0
    assert (gradient_T[rows[3][: shorter[1]]] != 0).all()


def test_orpo_with_the_mean_chosen_length_has_the_mean_over_the_batchs_chosen_tokens() -> None:
    batch = _pairs("ragged").double()
    rows = [row for _, row in batch.trained()]
    chosen = [t for row in rows[0::2] for t in row]
    losses_P, metrics = losses_of("orpo", batch, beta=0.0, nll_length=len(chosen) / (len(rows) // 2))
    torch.testing.assert_close(losses_P.mean(), -batch.current_T[chosen].mean())
    assert _numbers(metrics)["chosen_nll"] == pytest.approx(float(losses_P.mean()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_orpo_of_certain_tokens_is_finite(dtype: torch.dtype) -> None:
    current_T = torch.tensor([0.0, 0.0, -1e-6, -200.0], dtype=dtype, requires_grad=True)
    losses_P, metrics = orpo(current_T, None, torch.ones(4), torch.tensor([0, 2, 3, 3, 4]))
    (gradient_T,) = torch.autograd.grad(losses_P.sum(), current_T)
    assert torch.isfinite(losses_P).all()
    assert torch.isfinite(gradient_T).all()
    assert math.isfinite(_numbers(metrics)["log_odds_ratio"])


KTO_OPTIONS: tuple[dict[str, Any], ...] = ({}, {"beta": 0.7, "desirable_weight": 1.5, "undesirable_weight": 0.5})
every_kto = pytest.mark.parametrize("options", KTO_OPTIONS)


@every_case
@every_kto
@pytest.mark.parametrize("point", [0.0, 0.4])
def test_kto_is_the_equation(case: str, options: dict[str, Any], point: float) -> None:
    def losses(b: Ragged) -> torch.Tensor:
        return kto(b.current_T, b.anchor_T, b.mask_T, b.cu_seqlens, desirable(b), point, **options)[0]

    def equation(b: Ragged) -> torch.Tensor:
        return stack([kto_loss(gain, bool(s % 2), point, **options) for s, gain in enumerate(log_ratios(b))])

    assert_same(make(case, 1), losses, equation, tolerance=2e-6)


@every_kto
def test_gradients_of_kto_are_those_of_finite_differences(options: dict[str, Any]) -> None:
    b = make("ragged", 1).double()

    def losses(trained_N: torch.Tensor) -> torch.Tensor:
        current_T = b.current_T.masked_scatter(b.mask_T > 0, trained_N)
        return kto(current_T, b.anchor_T, b.mask_T, b.cu_seqlens, desirable(b), 0.4, **options)[0]

    assert torch.autograd.gradcheck(losses, b.current_T[b.mask_T > 0].requires_grad_(), fast_mode=True)


def test_kto_and_its_reference_point_do_not_depend_on_how_the_batch_is_cut() -> None:
    whole = make("ragged", 1)
    whole = replace(whole, anchor_T=whole.anchor_T - 0.2)  # so that the reference point is above 0
    parts = [_part(whole, start, stop) for start, stop in ((0, 2), (2, 3), (3, 5), (5, 5))]

    def point_of(batches: list[Ragged]) -> float:
        sums = [reference_point_sums(b.current_T, b.anchor_T, b.mask_T, b.cu_seqlens) for b in batches]
        return reference_point_of(*map(sum, zip(*sums, strict=True)))

    def losses(batches: list[Ragged], labels: list[torch.Tensor]) -> torch.Tensor:
        point = point_of(batches)
        return torch.cat(
            [
                kto(b.current_T, b.anchor_T, b.mask_T, b.cu_seqlens, label_S, point)[0]
                for b, label_S in zip(batches, labels, strict=True)
            ]
        )

    labels_S = desirable(whole)
    torch.testing.assert_close(
        losses([whole], [labels_S]), losses(parts, [labels_S[:2], labels_S[2:3], labels_S[3:], labels_S[:0]])
    )
    assert point_of([whole]) == point_of(parts) > 0


@every_case
def test_the_reference_point_is_the_mean_log_ratio_and_never_negative(case: str) -> None:
    b = make(case, 1).double()
    gains = [float(gain) for gain, (_, row) in zip(log_ratios(b), b.trained(), strict=True) if row]
    mean = sum(gains) / max(len(gains), 1)
    for sign in (1, -1):
        policy_T, reference_T = (b.current_T, b.anchor_T)[::sign]
        sums = reference_point_sums(policy_T, reference_T, b.mask_T, b.cu_seqlens)
        assert reference_point_of(*sums) == pytest.approx(max(0.0, sign * mean))


@every_case
def test_kto_reports_each_kind_of_response(case: str) -> None:
    b = make(case, 1).double()
    _, metrics = kto(b.current_T, b.anchor_T, b.mask_T, b.cu_seqlens, desirable(b), 0.4, beta=0.3)
    numbers, gains = _numbers(metrics), [float(gain) for gain in log_ratios(b)]
    logprobs = [float(sum(b.current_T[t] for t in row)) for _, row in b.trained()]
    for kind, first in (("desirable", 1), ("undesirable", 0)):
        count = max(len(gains[first::2]), 1)
        assert numbers[f"reward_{kind}"] == pytest.approx(0.3 * sum(gains[first::2]) / count)
        assert numbers[f"logprob_{kind}"] == pytest.approx(sum(logprobs[first::2]) / count)
    right = [gain > 0.4 if s % 2 else gain < 0.4 for s, gain in enumerate(gains)]
    assert numbers["reward_accuracy"] == pytest.approx(sum(right) / max(len(right), 1))


# --- the equations


def log_odds(logprobs: list[torch.Tensor]) -> torch.Tensor:
    log_p = _mean(logprobs).clamp(max=-math.exp(-oracles.LIMIT))
    return log_p - torch.log(-torch.expm1(log_p))


def smoothed(margin: torch.Tensor, e: float) -> torch.Tensor:
    return (1 - e) * _softplus(-margin) + e * _softplus(margin)


def margin_of(name: str, c: Any, r: Any, rc: Any, rr: Any, **options: Any) -> torch.Tensor:
    chosen, rejected = REWARDS[name](c, r, rc, rr, **options)
    return chosen - rejected


def desensitized(c: Any, r: Any, rc: Any, rr: Any, *, alpha: float, beta: float = 0.1, **_: Any) -> Any:
    shorter, rewards = min(len(c), len(r)), []
    for logprobs, references in ((c, rc), (r, rr)):
        ratios = _ratios(logprobs, references)
        rewards.append(beta * (_sum(ratios[:shorter]) + alpha * _sum(ratios[shorter:])))
    return rewards


def summed(c: Any, r: Any, rc: Any, rr: Any, *, beta: float = 0.1, **_: Any) -> Any:
    return beta * _sum(_ratios(c, rc)), beta * _sum(_ratios(r, rr))


REWARDS: dict[str, Callable[..., Any]] = {
    "dpo": summed,
    "hinge": summed,
    "robust_dpo": summed,
    "length_desensitized_dpo": desensitized,
    "ipo": lambda c, r, rc, rr, beta=0.1: (beta * _mean(_ratios(c, rc)), beta * _mean(_ratios(r, rr))),
    "simpo": lambda c, r, rc, rr, beta=2.0, gamma=1.0: (beta * _mean(c), beta * _mean(r)),
    "orpo": lambda c, r, rc, rr, beta=0.1, nll_length=None: (beta * _mean(c), beta * _mean(r)),
}


def dpo_loss(*pair: Any, label_smoothing: float = 0.0, **options: Any) -> torch.Tensor:
    return smoothed(margin_of("dpo", *pair, **options), label_smoothing)


def robust_loss(*pair: Any, label_smoothing: float = 0.1, **options: Any) -> torch.Tensor:
    margin, e = margin_of("dpo", *pair, **options), label_smoothing
    return ((1 - e) * _softplus(-margin) - e * _softplus(margin)) / (1 - 2 * e)


def desensitized_loss(*pair: Any, label_smoothing: float = 0.0, **options: Any) -> torch.Tensor:
    return smoothed(margin_of("length_desensitized_dpo", *pair, **options), label_smoothing)


def orpo_loss(c: Any, r: Any, *_: Any, beta: float = 0.1, nll_length: float | None = None) -> torch.Tensor:
    nll = -_sum(c) / (nll_length or max(len(c), 1))
    return nll + beta * _softplus(log_odds(r) - log_odds(c))


ORACLES: dict[str, Oracle] = {
    "dpo": dpo_loss,
    "ipo": lambda *pair, beta=0.1: (margin_of("ipo", *pair, beta=1.0) - 1 / (2 * beta)) ** 2,
    "hinge": lambda *pair, beta=0.1: (1 - margin_of("hinge", *pair, beta=beta)).clamp(min=0),
    "robust_dpo": robust_loss,
    "length_desensitized_dpo": desensitized_loss,
    "simpo": lambda *pair, beta=2.0, gamma=1.0: _softplus(gamma - margin_of("simpo", *pair, beta=beta)),
    "orpo": orpo_loss,
}


def kto_loss(
    gain: torch.Tensor,
    is_desirable: bool,
    point: float,
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> torch.Tensor:
    if is_desirable:
        return desirable_weight * (1 - 1 / (1 + torch.exp(-beta * (gain - point))))
    return undesirable_weight * (1 - 1 / (1 + torch.exp(-beta * (point - gain))))


# --- batches


def pairs_of(b: Ragged) -> list[tuple[list[torch.Tensor], ...]]:
    """(chosen, rejected, and their references): lists of the logprobs of trained tokens."""
    rows = [row for _, row in b.trained()]
    return [
        tuple([values_T[t] for t in row] for values_T in (b.current_T, b.anchor_T) for row in rows[2 * p : 2 * p + 2])
        for p in range(len(rows) // 2)
    ]


def log_ratios(b: Ragged) -> list[torch.Tensor]:
    """Return the log ratio of every response."""
    return [_sum(_ratios([b.current_T[t] for t in row], [b.anchor_T[t] for t in row])) for _, row in b.trained()]


def desirable(b: Ragged) -> torch.Tensor:
    """Mark every second response as desirable."""
    return torch.arange(b.num_sequences) % 2 == 1


def _ratios(logprobs: list[torch.Tensor], references: list[torch.Tensor]) -> list[torch.Tensor]:
    return [(p - q).clamp(-oracles.LIMIT, oracles.LIMIT) for p, q in zip(logprobs, references, strict=True)]


def _sum(values: list[torch.Tensor]) -> torch.Tensor:
    return sum(values, 0 * oracles.ONE)


def _mean(values: list[torch.Tensor]) -> torch.Tensor:
    return _sum(values) / max(len(values), 1)


def _softplus(x: torch.Tensor) -> torch.Tensor:
    """log(1 + exp(x)) = -log sigmoid(-x)"""
    return x + torch.log1p(torch.exp(-x)) if x > 0 else torch.log1p(torch.exp(x))


def _part(batch: Ragged, first: int, last: int) -> Ragged:
    """Sequences first to last, the last one excluded."""
    start, stop = int(batch.cu_seqlens[first]), int(batch.cu_seqlens[last])
    return Ragged(
        batch.cu_seqlens[first : last + 1] - start,
        batch.mask_T[start:stop],
        batch.current_T[start:stop],
        batch.anchor_T[start:stop],
        batch.advantages_S[first:last],
        batch.lags_T[start:stop],
    )


def _in_order(batch: Ragged, order: list[int]) -> Ragged:
    """The same sequences in another order."""
    parts = [_part(batch, s, s + 1) for s in order]
    lengths = torch.tensor([0, *(part.mask_T.numel() for part in parts)])

    def joined(name: str) -> torch.Tensor:
        return torch.cat([getattr(part, name) for part in parts])

    names = ("mask_T", "current_T", "anchor_T", "advantages_S", "lags_T")
    return Ragged(lengths.cumsum(0).int(), *map(joined, names))


def _pairs(case: str, seed: int = 0) -> Ragged:
    """Return a batch with an even number of sequences: the last one is left out where it has no partner."""
    batch = make(case, seed)
    return _part(batch, 0, batch.num_sequences - batch.num_sequences % 2)


def _numbers(metrics: Metrics) -> dict[str, float]:
    return summarize({name: float(value) for name, value in metrics.items()})
