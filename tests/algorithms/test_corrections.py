# mypy: disable-error-code="index"
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from headway.algorithms.correction_masks import (
    geometric_sequence_mask,
    kl_rejection,
    m2po,
    m2po_threshold,
    opsm,
    token_mask,
    veto,
)
from headway.algorithms.corrections import (
    CORRECTIONS,
    WEIGHTS,
    age_weight,
    decoupled,
    geometric_truncated_is,
    icepop,
    pair_truncated_is,
    self_normalized_is,
    sequence_truncated_is,
    truncated_is,
)
from headway.algorithms.metrics import merge, summarize
from headway.algorithms.ratios import token_log_ratio
from headway.algorithms.tokens import Tokens
from tests.algorithms import oracles
from tests.algorithms.ragged import Ragged, assert_same, every_case, make, stack

CAPPED = {
    truncated_is: oracles.token_ratios,
    sequence_truncated_is: lambda b: oracles.at_tokens(oracles.products(b), b),
    geometric_truncated_is: lambda b: oracles.at_tokens(oracles.geometric_means(b), b),
}
ESTIMATES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "k1": lambda x: -x,
    "k2": lambda x: x * x / 2,
    "k3": lambda x: torch.exp(x) - 1 - x,
}
OVER_SEQUENCE: dict[str, Callable[[list[float]], float]] = {
    "sequence_mean": lambda ks: abs(sum(ks) / max(len(ks), 1)),
    "sequence_sum": lambda ks: abs(sum(ks)),
    "sequence_max": lambda ks: max(map(abs, ks), default=0.0),
}
DECAYS: dict[str, Callable[[int, float], float]] = {
    "power": lambda lag, rate: (1 + lag) ** -rate,
    "exponential": lambda lag, rate: 2.718281828459045 ** (-rate * lag),
    "linear": lambda lag, rate: max(0.0, 1 - rate * lag),
}
# Options under which each correction does something on the ragged case of this seed, and nothing hangs on a batch.
ACTIVE_SEED = 1
ACTIVE: dict[str, dict[str, Any]] = {
    "truncated_is": {"cap": 1.1},
    "sequence_truncated_is": {"cap": 1.1},
    "geometric_truncated_is": {"cap": 1.1},
    "self_normalized_is": {"cap": 1.1, "mean_weight": 0.9},
    "icepop": {"low": 0.9, "high": 1.2},
    "decoupled": {},
    "token_mask": {"low": 0.9, "high": 1.2},
    "geometric_sequence_mask": {"low": 0.95, "high": 1.1},
    "kl_rejection": {"kind": "k3", "level": "sequence_mean", "threshold": 0.03},
    "veto": {"threshold": 0.7},
    "opsm": {"delta": 0.01},
    "m2po": {"limit": 0.15},
    "age_weight": {"kind": "linear", "rate": 0.4},
}


@every_case
@pytest.mark.parametrize("correction", CAPPED)
@pytest.mark.parametrize("cap", [2.0, 1.05])
def test_weights_are_truncated_ratios_without_gradient(
    case: str, correction: Callable[..., tuple[torch.Tensor, object]], cap: float
) -> None:
    def equation(b: Ragged) -> torch.Tensor:
        return CAPPED[correction](b).detach().clamp(max=cap)

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


@every_case
@pytest.mark.parametrize("mean_weight", [1.0, 0.8])
def test_self_normalized_is_divides_the_capped_ratio(case: str, mean_weight: float) -> None:
    assert_same(
        make(case),
        _weights(partial(self_normalized_is, cap=1.3, mean_weight=mean_weight)),
        lambda b: oracles.token_ratios(b).detach().clamp(max=1.3) / mean_weight,
        has_gradient=False,
    )


def test_the_reported_mean_over_parts_normalizes_the_whole_batch() -> None:
    parts = [make("ragged", seed=1), make("ragged", seed=2)]
    reports = [self_normalized_is(b.current_T, b.tokens, cap=1.3)[1] for b in parts]
    mean_weight = summarize(merge(map(_floats, reports)))["capped_weight"]
    weights = [self_normalized_is(b.current_T, b.tokens, cap=1.3, mean_weight=mean_weight)[0] for b in parts]
    total = sum(float((w_T * b.mask_T).sum()) for w_T, b in zip(weights, parts, strict=True))
    assert mean_weight != pytest.approx(1.0, abs=1e-3)
    assert total / sum(float(b.mask_T.sum()) for b in parts) == pytest.approx(1.0, abs=1e-6)


@every_case
@pytest.mark.parametrize(("low", "high"), [(0.5, 5.0), (0.9, 1.2)])
def test_icepop_keeps_the_ratio_within_the_bounds_and_nothing_outside(case: str, low: float, high: float) -> None:
    def equation(b: Ragged) -> torch.Tensor:
        return stack([r.detach() if low <= r <= high else 0 * oracles.ONE for r in oracles.token_ratios(b)])

    assert_same(make(case), _weights(partial(icepop, low=low, high=high)), equation, has_gradient=False)


@every_case
@pytest.mark.parametrize(("low", "high"), [(0.125, 8.0), (0.9, 1.2)])
def test_token_mask_is_icepop_without_the_weight(case: str, low: float, high: float) -> None:
    def equation(b: Ragged) -> torch.Tensor:
        return _zero_or_one([low <= r <= high for r in oracles.token_ratios(b)])

    assert_same(make(case), _weights(partial(token_mask, low=low, high=high)), equation, has_gradient=False)


@every_case
@pytest.mark.parametrize(("low", "high"), [(0.99, 1.01), (0.95, 1.1), (0.1, 10.0)])
def test_geometric_sequence_mask_drops_whole_sequences(case: str, low: float, high: float) -> None:
    def equation(b: Ragged) -> torch.Tensor:
        means = oracles.geometric_means(b)
        return _at_tokens([low <= s <= high for s in means], b)

    assert_same(
        make(case), _weights(partial(geometric_sequence_mask, low=low, high=high)), equation, has_gradient=False
    )


@every_case
@pytest.mark.parametrize("kind", ESTIMATES)
@pytest.mark.parametrize("level", ["token", *OVER_SEQUENCE])
@pytest.mark.parametrize("threshold", [0.03, 0.4])
def test_kl_rejection_is_the_equation(case: str, kind: Any, level: Any, threshold: float) -> None:
    def equation(b: Ragged) -> torch.Tensor:
        estimates = [float(ESTIMATES[kind](x)) for x in _log_ratios(b)]
        if level == "token":
            return _zero_or_one([abs(k) <= threshold for k in estimates])
        return _at_tokens(
            [OVER_SEQUENCE[level]([estimates[t] for t in row]) <= threshold for _, row in b.trained()],
            b,
        )

    correction = partial(kl_rejection, kind=kind, level=level, threshold=threshold)
    assert_same(make(case), _weights(correction), equation, has_gradient=False)


def test_the_mean_of_k1_bounds_the_geometric_mean() -> None:
    batch, bound = make("ragged"), torch.tensor(1.05).log()
    by_kl, _ = kl_rejection(batch.current_T, batch.tokens, kind="k1", threshold=float(bound))
    by_ratio, _ = geometric_sequence_mask(batch.current_T, batch.tokens, low=1 / 1.05, high=1.05)
    assert torch.equal(by_kl, by_ratio)
    assert 0 < float(by_kl.mean()) < 1


@every_case
@pytest.mark.parametrize("threshold", [1e-4, 0.7])
def test_veto_drops_the_sequence_of_an_unlikely_token(case: str, threshold: float) -> None:
    def equation(b: Ragged) -> torch.Tensor:
        ratios = oracles.token_ratios(b)
        return _at_tokens([all(bool(ratios[t] >= threshold) for t in row) for _, row in b.trained()], b)

    assert_same(make(case), _weights(partial(veto, threshold=threshold)), equation, has_gradient=False)


@every_case
@pytest.mark.parametrize("delta", [1e-4, 0.05])
@pytest.mark.parametrize("seed", [0, 1])
def test_opsm_drops_bad_sequences_that_have_become_less_likely(case: str, delta: float, seed: int) -> None:
    def equation(b: Ragged) -> torch.Tensor:
        log_ratios = _log_ratios(b)
        drifts = [-float(sum(log_ratios[t] for t in row)) / max(len(row), 1) for _, row in b.trained()]
        return _at_tokens([not (a < 0 and d > delta) for a, d in zip(b.advantages_S, drifts, strict=True)], b)

    assert_same(make(case, seed), _weights(partial(opsm, delta=delta)), equation, has_gradient=False)


def _m2po_limit(b: Ragged, budget: float) -> float:
    """The largest |log r| of the outward tokens that stay when the largest are taken away one size after another."""
    advantages, log_ratios = b.tokens.advantages_T, _log_ratios(b)
    outward = [abs(float(x)) for x, a in zip(log_ratios, advantages, strict=True) if float(x * a) > 0]
    while outward and sum(x * x for x in outward) / len(outward) > budget:
        outward = [x for x in outward if x < max(outward)]
    return max(outward, default=0.0)


@every_case
@pytest.mark.parametrize("budget", [0.04, 0.01, 1e-9, 0.3, 1e9])
@pytest.mark.parametrize("seed", [0, 1])
def test_m2po_masks_the_largest_outward_tokens_until_the_rest_fits(case: str, budget: float, seed: int) -> None:
    def equation(b: Ragged) -> torch.Tensor:
        advantages, limit = b.tokens.advantages_T, _m2po_limit(b, budget)
        return _zero_or_one(
            [not (float(x * a) > 0 and abs(float(x)) > limit) for x, a in zip(_log_ratios(b), advantages, strict=True)]
        )

    batch = make(case, seed)
    assert_same(batch, _weights(partial(m2po, budget=budget)), equation, has_gradient=False)
    threshold = _whole_threshold([batch], budget)
    assert threshold == pytest.approx(_m2po_limit(batch.double(), budget), rel=1e-6)
    masked_T, _ = m2po(batch.current_T, batch.tokens, budget=budget)
    assert torch.equal(m2po(batch.current_T, batch.tokens, limit=threshold)[0], masked_T)


def test_m2po_with_the_threshold_of_the_batch_masks_parts_like_the_whole() -> None:
    tame, wild = make("ragged", seed=3), make("extreme", seed=4)
    threshold = _whole_threshold([tame, wild], 0.02)
    log_ratios, outward = [], []
    for b in (tame, wild):
        for x, a in zip(_log_ratios(b.double()), b.tokens.advantages_T, strict=True):
            log_ratios.append(float(x))
            outward.append(float(x * a) > 0)
    kept = [abs(x) <= threshold for x, is_outward in zip(log_ratios, outward, strict=True) if is_outward]
    squares = [x * x for x, is_outward in zip(log_ratios, outward, strict=True) if is_outward]
    assert sum(s for s, k in zip(squares, kept, strict=True) if k) / sum(kept) <= 0.02
    weights_T = torch.cat([m2po(b.current_T, b.tokens, limit=threshold)[0] for b in (tame, wild)])
    expected = [not (is_outward and abs(x) > threshold) for x, is_outward in zip(log_ratios, outward, strict=True)]
    assert weights_T.bool().tolist() == expected
    assert not all(expected)


def test_m2po_masks_equal_tokens_together() -> None:
    current_T = torch.tensor([0.1, 0.5, 0.5, -0.5])
    zeros_T = torch.zeros(4)
    tokens = Tokens(zeros_T, torch.ones(4), torch.ones(4), zeros_T.long(), torch.tensor([0, 4]))
    # One of the two at 0.5 would fit: (0.01 + 0.25) / 2 <= 0.15. The one at -0.5 goes inward and stays.
    assert m2po(current_T, tokens, budget=0.15)[0].tolist() == [1, 0, 0, 1]
    assert m2po(current_T, tokens, budget=0.2)[0].tolist() == [1, 1, 1, 1]


@every_case
@pytest.mark.parametrize("kind", DECAYS)
@pytest.mark.parametrize(("rate", "zero_above_lag"), [(0.5, None), (0.1, 2), (0.1, 0)])
def test_age_weight_is_its_function_of_lag(case: str, kind: Any, rate: float, zero_above_lag: int | None) -> None:
    def equation(b: Ragged) -> torch.Tensor:
        weights = []
        for lag, m in zip(b.lags_T.tolist(), b.mask_T.tolist(), strict=True):
            weight = 0.0 if zero_above_lag is not None and lag > zero_above_lag else DECAYS[kind](lag, rate)
            weights.append((weight if m else 1.0) * oracles.ONE)
        return stack(weights)

    correction = partial(age_weight, kind=kind, rate=rate, zero_above_lag=zero_above_lag)
    assert_same(make(case), _weights(correction), equation, has_gradient=False)


@pytest.mark.parametrize("kind", DECAYS)
def test_age_weight_is_one_when_fresh_and_falls_with_age(kind: Any) -> None:
    lags_T = torch.arange(20)
    tokens = Tokens(torch.zeros(20), torch.ones(20), torch.ones(20), lags_T, torch.tensor([0, 20]))
    weights_T, _ = age_weight(torch.zeros(20), tokens, kind=kind, rate=0.01)
    assert float(weights_T[0]) == 1
    assert (weights_T.diff() < 0).all()


@pytest.mark.parametrize("case", ["ragged", "some_masked", "one_token", "extreme", "all_masked"])
def test_a_pair_is_weighed_by_the_product_over_both_responses(case: str) -> None:
    batch = make(case, ACTIVE_SEED).double()
    bounds = [*batch.cu_seqlens.tolist()]
    bounds = bounds if len(bounds) % 2 else [*bounds, bounds[-1]]  # an empty response makes the last pair
    tokens = batch.tokens._replace(cu_seqlens=torch.tensor(bounds))
    weights_T, metrics = pair_truncated_is(batch.current_T, tokens, cap=1.5)
    for first, end in zip(bounds[0:-2:2], bounds[2::2], strict=True):
        trained = [t for t in range(first, end) if batch.mask_T[t] > 0]
        total = sum(float(batch.current_T[t] - batch.anchor_T[t]) for t in trained)
        expected = min(math.exp(min(max(total, -20.0), 20.0)), 1.5)
        assert weights_T[first:end].tolist() == pytest.approx([expected] * (end - first))
    assert summarize(_floats(metrics)).keys() == {"capped_fraction"}


def test_every_correction_is_active_in_these_tests_and_reports_its_fraction() -> None:
    batch = make("ragged", ACTIVE_SEED)
    assert set(ACTIVE) == set(CORRECTIONS)
    assert set(CORRECTIONS) > WEIGHTS
    for name, correction in CORRECTIONS.items():
        weights_T, metrics = correction(batch.current_T, batch.tokens, **ACTIVE[name])
        assert (weights_T != 1)[batch.mask_T > 0].any(), name
        assert any(key.endswith("_fraction_sum") for key in metrics), name
        assert not any(value.requires_grad for value in metrics.values()), name
        if name not in WEIGHTS | {"age_weight"}:
            assert set(weights_T.tolist()) == {0.0, 1.0}, name


@pytest.mark.parametrize("name", sorted(set(CORRECTIONS) - WEIGHTS | {"icepop"}))
def test_masked_fraction_counts_trained_tokens_with_weight_zero(name: str) -> None:
    batch = make("ragged", ACTIVE_SEED)
    weights_T, metrics = CORRECTIONS[name](batch.current_T, batch.tokens, **ACTIVE[name])
    numbers = summarize(_floats(metrics))
    fraction = next(value for key, value in numbers.items() if key.endswith("_masked_fraction"))
    trained = [t for _, row in batch.trained() for t in row]
    assert fraction == pytest.approx(sum(float(weights_T[t]) == 0 for t in trained) / len(trained))
    assert fraction > 0


def test_capped_fraction_counts_trained_tokens_over_the_cap() -> None:
    batch = make("ragged")
    _, metrics = truncated_is(batch.current_T, batch.tokens, cap=1.1)
    ratios = oracles.token_ratios(batch.double())
    over = [bool(ratios[t] > 1.1) for _, row in batch.trained() for t in row]
    assert summarize(_floats(metrics))["capped_fraction"] == pytest.approx(sum(over) / len(over))


@pytest.mark.parametrize("name", CORRECTIONS)
@pytest.mark.parametrize("case", ["ragged", "some_masked", "one_token", "extreme"])
def test_a_sequence_alone_is_weighed_as_in_its_row(name: str, case: str) -> None:
    batch = make(case, ACTIVE_SEED)
    correction = partial(CORRECTIONS[name], **ACTIVE[name])
    packed_T, _ = correction(batch.current_T, batch.tokens)
    alone = [correction(batch.current_T[part], _alone(batch, part))[0] for part in _parts(batch)]
    torch.testing.assert_close(torch.cat(alone), packed_T)


@pytest.mark.parametrize("name", CORRECTIONS)
def test_an_impossible_token_never_makes_a_weight_infinite(name: str) -> None:
    batch = make("ragged", ACTIVE_SEED)
    impossible_T = torch.full_like(batch.current_T, -torch.inf).requires_grad_()
    weights_T, metrics = CORRECTIONS[name](impossible_T, batch.tokens, **ACTIVE[name])
    assert torch.isfinite(weights_T).all()
    assert not weights_T.requires_grad
    assert all(torch.isfinite(value) for value in metrics.values())


@pytest.mark.parametrize("name", CORRECTIONS)
def test_bfloat16_logprobs_are_close(name: str) -> None:
    batch = make("ragged", ACTIVE_SEED)
    rough = Ragged(
        batch.cu_seqlens,
        batch.mask_T,
        batch.current_T.bfloat16(),
        batch.anchor_T.bfloat16(),
        batch.advantages_S,
        batch.lags_T,
    )
    got_T, _ = CORRECTIONS[name](rough.current_T, rough.tokens, **ACTIVE[name])
    expected_T, _ = CORRECTIONS[name](rough.double().current_T, rough.double().tokens, **ACTIVE[name])
    torch.testing.assert_close(got_T.double(), expected_T, rtol=1e-2, atol=1e-2)


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


def _log_ratios(b: Ragged) -> list[torch.Tensor]:
    """log r_t, clamped; 0 where the mask is 0."""
    limit = oracles.LIMIT
    return [
        (c - a).detach().clamp(-limit, limit) if m > 0 else 0 * oracles.ONE
        for c, a, m in zip(b.current_T, b.anchor_T, b.mask_T, strict=True)
    ]


def _zero_or_one(kept: list[bool]) -> torch.Tensor:
    return stack([float(k) * oracles.ONE for k in kept])


def _at_tokens(kept_S: list[bool], b: Ragged) -> torch.Tensor:
    return _zero_or_one([kept_S[s] for s, row in b.rows() for _ in row])


def _whole_threshold(batches: list[Ragged], budget: float) -> float:
    return m2po_threshold(
        torch.cat([token_log_ratio(b.current_T, b.anchor_T, b.mask_T) for b in batches]),
        torch.cat([b.mask_T for b in batches]),
        torch.cat([b.tokens.advantages_T for b in batches]),
        budget=budget,
    )


def _parts(b: Ragged) -> list[slice]:
    return [slice(row.start, row.stop) for _, row in b.rows()]


def _alone(b: Ragged, part: slice) -> Tokens:
    behavior_T, advantages_T, mask_T, lags_T, _ = b.tokens
    cu_seqlens = torch.tensor([0, part.stop - part.start], dtype=torch.int32)
    return Tokens(behavior_T[part], advantages_T[part], mask_T[part], lags_T[part], cu_seqlens)


def _floats(metrics: dict[str, torch.Tensor]) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items()}
