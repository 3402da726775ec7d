# mypy: disable-error-code="misc"
"""All functions of the mathematics keep two promises: masked places never matter, and float64 in is float64 out."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from headway.algorithms.advantages import ADVANTAGES
from headway.algorithms.aggregation import AGGREGATIONS, pair_mean
from headway.algorithms.correction_masks import BATCH_STATISTICS
from headway.algorithms.corrections import CORRECTIONS, PAIR_CORRECTIONS
from headway.algorithms.distillation import reverse_kl_distillation, sft, teacher_advantages, top_k_distillation
from headway.algorithms.metrics import masked_mean, policy_gap, share, survival
from headway.algorithms.objectives import OBJECTIVES
from headway.algorithms.preferences import PREFERENCES, bradley_terry, kto, reference_point_sums
from headway.algorithms.proximal import PROXIMAL
from headway.algorithms.ratios import (
    KL_ESTIMATORS,
    geometric_sequence_ratio,
    gspo_token_ratio,
    log_difference,
    sequence_ratio,
    token_log_ratio,
    token_ratio,
)
from headway.algorithms.returns import (
    at_last_trained,
    at_turn_ends,
    clipped_value_loss,
    gae,
    kl_shaped,
    kl_shaped_tokens,
    length_normalized,
    overlong_penalty,
    returns_to_go,
    turn_of_token,
    whiten,
    whitening_sums,
)
from headway.algorithms.tokens import Tokens, lengths, segment_mean
from tests.algorithms.ragged import make
from tests.algorithms.test_corrections import ACTIVE, ACTIVE_SEED


@dataclass(frozen=True)
class Given:
    """The values with which a function may be called; all floats have one dtype."""

    current_T: torch.Tensor
    anchor_T: torch.Tensor
    numbers_T: torch.Tensor
    """Values, rewards, estimates: any sign."""
    tokens: Tokens
    rewards_S: torch.Tensor
    group_S: torch.Tensor

    @property
    def mask(self) -> torch.Tensor:
        return self.tokens.loss_mask_T

    @property
    def cu_seqlens(self) -> torch.Tensor:
        return self.tokens.cu_seqlens


def given() -> Given:
    """Float64, with masked places in most of its six sequences."""
    batch = make("ragged", ACTIVE_SEED).double()
    generator = torch.Generator().manual_seed(5)
    cu_seqlens = torch.cat([batch.cu_seqlens, batch.cu_seqlens[-1:]])  # the last one is empty, to make pairs
    advantages_T = torch.randn(batch.mask_T.numel(), generator=generator, dtype=torch.float64)
    return Given(
        batch.current_T,
        batch.anchor_T,
        torch.randn(batch.mask_T.numel(), generator=generator, dtype=torch.float64),
        Tokens(batch.anchor_T - 0.1, advantages_T, batch.mask_T, batch.lags_T, cu_seqlens),
        torch.randn(6, generator=generator, dtype=torch.float64),
        torch.tensor([0, 0, 1, 1, 1, 1]),
    )


Call = Callable[[Given], Any]
OF_POLICIES = (token_log_ratio, token_ratio, log_difference)
OF_SEQUENCES = (sequence_ratio, geometric_sequence_ratio, gspo_token_ratio)
COUNTS = {"tokens": 7.0, "sequences": 3.0}

CALLS: dict[str, Call] = {
    **{
        f"objective {name}": lambda g, f=function: f(g.current_T, g.anchor_T, g.tokens)
        for name, function in OBJECTIVES.items()
    },
    "objective dppo kl": lambda g: OBJECTIVES["dppo"](
        g.current_T, g.anchor_T, g.tokens, divergence="kl", threshold=0.01
    ),
    "objective ppo_clip dual": lambda g: OBJECTIVES["ppo_clip"](g.current_T, g.anchor_T, g.tokens, dual_clip=1.1),
    **{
        f"correction {name}": lambda g, f=function, o=ACTIVE[name]: f(g.current_T, g.tokens, **o)
        for name, function in CORRECTIONS.items()
    },
    **{
        f"correction age_weight {kind}": lambda g, k=kind: CORRECTIONS["age_weight"](g.current_T, g.tokens, kind=k)
        for kind in ("power", "exponential", "linear")
    },
    **{
        f"correction {name}": lambda g, f=function: f(g.current_T, g.tokens, cap=1.1)
        for name, function in PAIR_CORRECTIONS.items()
    },
    "correction m2po alone": lambda g: CORRECTIONS["m2po"](g.current_T, g.tokens, budget=0.01),
    **{f"of batch {name}": lambda g, f=one.sums: f(g.current_T, g.tokens) for name, one in BATCH_STATISTICS.items()},
    **{f"proximal {name}": lambda g, f=function: f(g.current_T, g.tokens) for name, function in PROXIMAL.items()},
    **{
        f"kl {name}": lambda g, f=function: f(g.current_T, g.anchor_T, g.mask)
        for name, function in KL_ESTIMATORS.items()
    },
    **{
        f"aggregation {name}": lambda g, f=function, o=options: f(g.mask, g.cu_seqlens, **COUNTS, **o)
        for name, function in AGGREGATIONS.items()
        for options in [{"length": 16} if name == "fixed_denominator" else {}]
    },
    "aggregation pair_mean": lambda g: pair_mean(g.rewards_S[:3], g.rewards_S[3:], pairs=5.0),
    **{f"advantage {name}": lambda g, f=function: f(g.rewards_S, g.group_S) for name, function in ADVANTAGES.items()},
    **{f"ratio {f.__name__}": lambda g, f=f: f(g.current_T, g.anchor_T, g.mask) for f in OF_POLICIES},
    **{f"ratio {f.__name__}": lambda g, f=f: f(g.current_T, g.anchor_T, g.mask, g.cu_seqlens) for f in OF_SEQUENCES},
    "returns gae": lambda g: gae(g.numbers_T, g.anchor_T, g.mask, g.cu_seqlens, gamma=0.9),
    "returns to go": lambda g: returns_to_go(g.numbers_T, g.mask, g.cu_seqlens, gamma=0.9),
    "returns whiten": lambda g: whiten(g.numbers_T, g.mask, *whitening_sums(g.numbers_T, g.mask)),
    "returns at_turn_ends": lambda g: at_turn_ends(_of_turns(g), g.mask, g.cu_seqlens),
    "rewards overlong_penalty": lambda g: g.rewards_S + overlong_penalty(lengths(g.cu_seqlens), limit=11, buffer=7),
    "rewards length_normalized": lambda g: length_normalized(g.rewards_S, lengths(g.cu_seqlens), unit=3),
    "rewards kl_shaped": lambda g: kl_shaped(g.rewards_S, g.numbers_T, g.mask, g.cu_seqlens, coefficient=0.1),
    "rewards kl_shaped_tokens": lambda g: kl_shaped_tokens(
        g.rewards_S, g.numbers_T, g.mask, g.cu_seqlens, coefficient=0.1
    ),
    "rewards at_last_trained": lambda g: at_last_trained(g.numbers_T, g.mask, g.cu_seqlens),
    "segments mean": lambda g: segment_mean(g.numbers_T, g.mask, g.cu_seqlens),
    "metrics masked_mean": lambda g: masked_mean("x", g.numbers_T, g.mask),
    "metrics policy_gap": lambda g: policy_gap(g.current_T, g.tokens),
    "metrics share": lambda g: share("x", g.numbers_T > 0, g.tokens),
    "metrics survival": lambda g: survival(g.numbers_T, g.tokens),
    "supervised sft": lambda g: sft(g.current_T, g.mask),
    **{
        f"supervised {name}": lambda g, f=function: f(g.current_T, g.anchor_T, g.mask, g.cu_seqlens)
        for name, function in PREFERENCES.items()
        if name != "length_desensitized_dpo"
    },
    "supervised length_desensitized_dpo": lambda g: PREFERENCES["length_desensitized_dpo"](
        g.current_T, g.anchor_T, g.mask, g.cu_seqlens, alpha=0.3
    ),
    "supervised kto": lambda g: kto(g.current_T, g.anchor_T, g.mask, g.cu_seqlens, g.rewards_S > 0, 0.1),
    "supervised reference_point": lambda g: reference_point_sums(g.current_T, g.anchor_T, g.mask, g.cu_seqlens),
    "supervised bradley_terry": lambda g: bradley_terry(g.rewards_S, margin=0.3, centering=0.01),
    "supervised value": lambda g: clipped_value_loss(g.numbers_T, g.anchor_T, g.current_T, g.mask),
    "supervised teacher_advantages": lambda g: teacher_advantages(g.current_T, g.anchor_T, g.tokens, coefficient=0.7),
    "supervised reverse_kl": lambda g: reverse_kl_distillation(g.current_T, g.anchor_T, g.tokens),
    **{
        f"supervised top_k {kind}": lambda g, kind=kind: top_k_distillation(
            torch.stack([g.current_T - 1, g.current_T - 2], -1),
            torch.stack([g.anchor_T - 1, g.anchor_T - 3], -1),
            g.mask,
            divergence=kind,
        )
        for kind in ("forward_kl", "reverse_kl", "jsd")
    },
}
every_call = pytest.mark.parametrize("name", CALLS)
GARBAGE = (torch.nan, torch.inf, -torch.inf)


def _of_turns(g: Given) -> list[torch.Tensor]:
    turn_T, bounds = turn_of_token(g.mask, g.cu_seqlens), g.cu_seqlens.tolist()
    turns = [int(max(turn_T[start:end].tolist(), default=-1)) + 1 for start, end in pairwise(bounds)]
    return [g.rewards_S[s] * torch.arange(1, n + 1, dtype=torch.float64) for s, n in enumerate(turns)]


def outputs(result: Any, at: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors of a result, metrics included."""
    if isinstance(result, torch.Tensor):
        yield at, result
    elif isinstance(result, dict):
        for name, part in result.items():
            yield from outputs(part, f"{at}.{name}")
    else:
        for number, part in enumerate(result):
            yield from outputs(part, f"{at}[{number}]")


def spoiled(g: Given, garbage: float) -> Given:
    """Put this value at every masked place of every argument."""
    is_masked_T = g.mask == 0

    def with_garbage(values_T: torch.Tensor) -> torch.Tensor:
        return torch.where(is_masked_T, torch.full_like(values_T, garbage), values_T)

    tokens = g.tokens._replace(
        behavior_logprobs_T=with_garbage(g.tokens.behavior_logprobs_T),
        advantages_T=with_garbage(g.tokens.advantages_T),
        lags_T=torch.where(is_masked_T, -1, g.tokens.lags_T),
    )
    return replace(
        g,
        current_T=with_garbage(g.current_T),
        anchor_T=with_garbage(g.anchor_T),
        numbers_T=with_garbage(g.numbers_T),
        tokens=tokens,
    )


def gradient_of(call: Call, g: Given) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return the call's results, and the gradient of the sum of all results that have one."""
    current_T = g.current_T.clone().requires_grad_()
    results = dict(outputs(call(replace(g, current_T=current_T))))
    total = sum((one.sum() for one in results.values() if one.requires_grad), 0 * torch.ones(()).double())
    if not total.requires_grad:
        return results, torch.zeros_like(current_T)
    (gradient_T,) = torch.autograd.grad(total, current_T, allow_unused=True)
    return results, gradient_T


@every_call
@pytest.mark.parametrize("garbage", GARBAGE)
def test_what_stands_at_masked_places_never_matters(name: str, garbage: float) -> None:
    clean, gradient_T = gradient_of(CALLS[name], given())
    got, got_gradient_T = gradient_of(CALLS[name], spoiled(given(), garbage))
    is_trained_T = given().mask > 0
    for part, expected in clean.items():
        assert torch.isfinite(got[part]).all(), part
        where = is_trained_T if expected.shape == is_trained_T.shape else torch.ones_like(expected, dtype=torch.bool)
        assert torch.equal(got[part][where], expected[where]), part
    assert torch.equal(got_gradient_T, gradient_T)
    assert (gradient_T[~is_trained_T] == 0).all()


@every_call
def test_float64_in_is_float64_out_to_the_last_bit(name: str) -> None:
    batch = given()
    plain, gradient_T = gradient_of(CALLS[name], batch)
    assert torch.get_default_dtype() == torch.float32
    torch.set_default_dtype(torch.float64)  # a number that became a float32 tensor on the way is another one now
    try:
        exact, exact_gradient_T = gradient_of(CALLS[name], batch)
    finally:
        torch.set_default_dtype(torch.float32)
    for part, value in plain.items():
        assert value.dtype in (torch.float64, torch.int64), part
        assert torch.equal(value, exact[part]), part
    assert torch.equal(gradient_T, exact_gradient_T)


@pytest.mark.parametrize(
    "name", [name for name in CALLS if name.partition(" ")[0] in ("objective", "correction", "proximal")]
)
def test_a_mask_in_float32_takes_nothing_from_logprobs_in_float64(name: str) -> None:
    batch = given()
    expected = next(outputs(CALLS[name](batch)))[1]
    mixed = replace(batch, tokens=batch.tokens._replace(loss_mask_T=batch.mask.float()))
    got = next(outputs(CALLS[name](mixed)))[1]
    assert torch.equal(got.double(), expected)
