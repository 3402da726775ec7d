import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from headway.algorithms.aggregation import sequence_mean, trained_sequences
from headway.algorithms.metrics import Metrics, read, summarize
from headway.algorithms.objectives import IGNORES_ANCHOR, OBJECTIVES, gspo, policy_gradient, ppo_clip
from headway.algorithms.tokens import Tokens
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
    share = _numbers(metrics)["clip_fraction"]
    assert share == pytest.approx(count / trained if trained else 0.0)


LOW, HIGH = 0.11, 0.13
"""Bounds that many tokens of the batches cross, while no token lies on one."""

OTHERS: list[tuple[str, dict[str, float | str], Callable[[Ragged], torch.Tensor]]] = [
    ("ppo_clip", {"dual_clip": 1.3}, lambda b: oracles.dual_clipped_losses(b, 0.2, 0.2, 1.3)),
    ("ppo_clip", {"dual_clip": 3.0}, lambda b: oracles.dual_clipped_losses(b, 0.2, 0.2, 3.0)),
    ("cispo", {}, lambda b: oracles.weighted_losses(b, oracles.cispo_weight(1.0, 4.0))),
    (
        "cispo",
        {"clip_low": LOW, "clip_high": HIGH},
        lambda b: oracles.weighted_losses(b, oracles.cispo_weight(LOW, HIGH)),
    ),
    ("sequence_clip", {}, lambda b: oracles.sequence_clip_losses(b, 0.2, 0.2)),
    (
        "sequence_clip",
        {"clip_low": LOW, "clip_high": HIGH},
        lambda b: oracles.sequence_clip_losses(b, LOW, HIGH),
    ),
    ("topr", {}, lambda b: oracles.topr_losses(b, 1.0)),
    ("topr", {"cap": 0.7}, lambda b: oracles.topr_losses(b, 0.7)),
    ("aspo", {}, lambda b: oracles.weighted_losses(b, oracles.aspo_weight(0.2, 0.2, 3.0))),
    (
        "aspo",
        {"clip_low": LOW, "clip_high": HIGH, "dual_clip": 1.15},
        lambda b: oracles.weighted_losses(b, oracles.aspo_weight(LOW, HIGH, 1.15)),
    ),
    ("sapo", {}, lambda b: oracles.sapo_losses(b, 1.0, 1.05)),
    ("sapo", {"tau_positive": 2.0, "tau_negative": 5.0}, lambda b: oracles.sapo_losses(b, 2.0, 5.0)),
    ("dppo", {}, lambda b: oracles.weighted_losses(b, oracles.dppo_weight("tv", 0.15, 20.0))),
    (
        "dppo",
        {"threshold": 0.03, "cap": 1.2},
        lambda b: oracles.weighted_losses(b, oracles.dppo_weight("tv", 0.03, 1.2)),
    ),
    (
        "dppo",
        {"divergence": "kl", "threshold": 0.05},
        lambda b: oracles.weighted_losses(b, oracles.dppo_weight("kl", 0.05, 20.0)),
    ),
    (
        "dppo",
        {"divergence": "kl", "threshold": 0.004},
        lambda b: oracles.weighted_losses(b, oracles.dppo_weight("kl", 0.004, 20.0)),
    ),
]
every_other = pytest.mark.parametrize(
    ("name", "options", "oracle"), OTHERS, ids=[f"{name}-{options}" for name, options, _ in OTHERS]
)


@every_case
@pytest.mark.parametrize("seed", [0, 1])  # mostly good samples, mostly bad ones
@every_other
def test_losses_and_gradients_are_the_equations(
    case: str, seed: int, name: str, options: dict[str, float | str], oracle: Callable[[Ragged], torch.Tensor]
) -> None:
    # A float32 sum of log ratios of +-1e4 is exact to 1e-3, and no bound hides it here.
    tolerance = 1e-3 if (name, case) == ("sequence_clip", "extreme") else 1e-6
    assert_same(make(case, seed), lambda b: OBJECTIVES[name](*arguments(b), **options)[0], oracle, tolerance=tolerance)


@pytest.mark.parametrize("case", ["ragged", "one_token", "some_masked"])
@every_other
def test_in_bfloat16_they_are_the_equations_of_the_rounded_logprobs(
    case: str, name: str, options: dict[str, float | str], oracle: Callable[[Ragged], torch.Tensor]
) -> None:
    batch = make(case)
    rounded = replace(batch, current_T=batch.current_T.bfloat16(), anchor_T=batch.anchor_T.bfloat16())
    current_T = rounded.current_T.clone().requires_grad_()
    losses_T = OBJECTIVES[name](current_T, rounded.anchor_T, rounded.tokens, **options)[0]
    exact = rounded.double(requires_grad=True)
    expected_T = oracle(exact)
    torch.testing.assert_close(losses_T.double(), expected_T, rtol=1e-2, atol=1e-2)
    gradient_T = torch.autograd.grad(losses_T.sum(), current_T)[0]
    expected_gradient_T = torch.autograd.grad(expected_T.sum(), exact.current_T)[0]
    torch.testing.assert_close(gradient_T.double(), expected_gradient_T, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_sequence_alone_gets_what_it_gets_inside_a_row(name: str) -> None:
    batch = make("ragged")
    packed = _losses_and_gradient(name, batch)
    for s, row in batch.rows():
        inside = slice(row.start, row.stop)
        alone = Ragged(
            torch.tensor([0, len(row)]),
            batch.mask_T[inside],
            batch.current_T[inside],
            batch.anchor_T[inside],
            batch.advantages_S[s : s + 1],
            batch.lags_T[inside],
        )
        for got, expected in zip(_losses_and_gradient(name, alone), packed, strict=True):
            torch.testing.assert_close(got, expected[inside], rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_at_ratio_one_every_objective_has_the_policy_gradient(name: str) -> None:
    batch = make("ragged")
    on_policy = replace(batch, current_T=batch.anchor_T)
    trained_T = batch.mask_T > 0
    _, gradient_T = _losses_and_gradient(name, on_policy)
    torch.testing.assert_close(gradient_T[trained_T], -batch.tokens.advantages_T[trained_T], rtol=0, atol=1e-6)


@every_case
@pytest.mark.parametrize(("low", "high"), [(3e-4, 4e-4), (0.03, 0.02)])
def test_gspo_token_is_equations_13_and_14(case: str, low: float, high: float) -> None:
    batch = make(case)
    advantages_T = torch.randn(batch.mask_T.numel(), generator=torch.Generator().manual_seed(1))
    numbers = advantages_T.double().tolist()

    def losses(b: Ragged) -> torch.Tensor:
        tokens = b.tokens._replace(advantages_T=advantages_T)
        return OBJECTIVES["gspo_token"](b.current_T, b.anchor_T, tokens, clip_low=low, clip_high=high)[0]

    assert_same(batch, losses, lambda b: oracles.gspo_token_losses(b, numbers, low, high))


def test_gspo_clips_by_the_sequence_gspo_token_by_the_token() -> None:
    current_T, anchor_T = torch.full((2,), 0.1), torch.zeros(2)
    sequence = torch.tensor([0, 2])
    tokens = Tokens(anchor_T, torch.tensor([3.0, -1.0]), torch.ones(2), torch.zeros(2, dtype=torch.int64), sequence)
    ratio = math.exp(0.1)
    as_sequence_T, _ = OBJECTIVES["gspo"](current_T, anchor_T, tokens, clip_low=0.01, clip_high=0.01)
    as_tokens_T, _ = OBJECTIVES["gspo_token"](current_T, anchor_T, tokens, clip_low=0.01, clip_high=0.01)
    torch.testing.assert_close(as_sequence_T, torch.tensor([-1.01, -1.01]))
    torch.testing.assert_close(as_tokens_T, torch.tensor([-3.03, ratio]))


CLIPPED: dict[str, tuple[dict[str, float], Callable[[float, float, float], bool]]] = {
    "ppo_clip": (
        {"clip_low": LOW, "clip_high": HIGH, "dual_clip": 1.3},
        lambda r, a, _: r > 1 + HIGH if a > 0 else r < 1 - LOW or r > 1.3,
    ),
    "sequence_clip": (
        {"clip_low": LOW, "clip_high": HIGH},
        lambda _, a, product: product > 1 + HIGH if a > 0 else product < 1 - LOW,
    ),
    "cispo": ({"clip_low": LOW, "clip_high": HIGH}, lambda r, a, _: not 1 - LOW <= r <= 1 + HIGH),
    "topr": ({"cap": 0.5}, lambda r, a, product: a < 0 and product > 0.5),
    "aspo": (
        {"clip_low": LOW, "clip_high": HIGH, "dual_clip": 1.15},
        lambda r, a, _: r > 1 + HIGH or 1 / r > 1.15 if a > 0 else r < 1 - LOW or r > 1.15,
    ),
}


@pytest.mark.parametrize("name", CLIPPED)
def test_clip_fraction_counts_what_the_bounds_changed(name: str) -> None:
    options, is_clipped = CLIPPED[name]
    batch = make("ragged", seed=1)
    exact = batch.double()
    ratios, products = oracles.token_ratios(exact), oracles.products(exact)
    clipped = [
        is_clipped(float(ratios[t]), float(exact.advantages_S[s]), float(products[s]))
        for s, row in batch.trained()
        for t in row
    ]
    assert 0 < sum(clipped) < len(clipped)
    share = _numbers(OBJECTIVES[name](*arguments(batch), **options)[1])["clip_fraction"]
    assert share == pytest.approx(sum(clipped) / len(clipped))


@pytest.mark.parametrize(("kind", "threshold"), [("tv", 0.03), ("kl", 0.004)])
def test_dppo_clip_fraction_counts_masked_tokens(kind: str, threshold: float) -> None:
    batch = make("ragged")
    weight = oracles.dppo_weight(kind, threshold, 20.0)
    exact = batch.double()
    ratios = oracles.token_ratios(exact).tolist()
    masked = [
        weight(ratios[t], float(exact.advantages_S[s]), float(exact.current_T[t]), float(exact.anchor_T[t])) == 0
        for s, row in batch.trained()
        for t in row
    ]
    assert 0 < sum(masked) < len(masked)
    _, metrics = OBJECTIVES["dppo"](*arguments(batch), divergence=kind, threshold=threshold)
    assert _numbers(metrics)["clip_fraction"] == pytest.approx(sum(masked) / len(masked))


def test_dppo_kl_is_exact_near_certainty() -> None:
    # 1 - exp(log p) would be off by a tenth in float32, and the divergence by two hundredths.
    anchor_T, current_T = torch.tensor([-1e-4]), torch.tensor([-2e-7])
    tokens = Tokens(anchor_T, torch.ones(1), torch.ones(1), torch.zeros(1, dtype=torch.int64), torch.tensor([0, 1]))
    exact = oracles.binary_divergence("kl", float(current_T), float(anchor_T))
    for threshold, is_masked in ((exact * 0.99, 1.0), (exact * 1.01, 0.0)):
        _, metrics = OBJECTIVES["dppo"](current_T, anchor_T, tokens, divergence="kl", threshold=threshold)
        assert _numbers(metrics)["clip_fraction"] == is_masked


def test_sapo_gate_is_the_factor_on_the_gradient() -> None:
    batch = make("ragged")
    trained_T = batch.mask_T > 0
    _, gradient_T = _losses_and_gradient("sapo", batch)
    ratios_T = oracles.token_ratios(batch.double())
    factors_T = gradient_T / (-ratios_T * batch.tokens.advantages_T)
    gate = _numbers(OBJECTIVES["sapo"](*arguments(batch))[1])["gate"]
    assert gate == pytest.approx(float(factors_T[trained_T].mean()), rel=1e-4)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_only_those_that_say_so_ignore_the_anchor(name: str) -> None:
    batch = make("ragged", seed=1)
    other = replace(batch, anchor_T=batch.anchor_T + 0.01)
    same = torch.equal(_losses_and_gradient(name, batch)[1], _losses_and_gradient(name, other)[1])
    assert same == (name in IGNORES_ANCHOR)


def _losses_and_gradient(name: str, batch: Ragged) -> tuple[torch.Tensor, torch.Tensor]:
    current_T = batch.current_T.clone().requires_grad_()
    losses_T, _ = OBJECTIVES[name](current_T, batch.anchor_T, batch.tokens)
    return losses_T.detach(), torch.autograd.grad(losses_T.sum(), current_T)[0]


def _numbers(metrics: Metrics) -> dict[str, float]:
    return summarize(read(metrics))
