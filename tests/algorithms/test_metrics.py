# mypy: disable-error-code="call-arg"
import pytest
import torch

from headway.algorithms import metrics
from headway.algorithms.metrics import (
    effective_sample_size,
    merge,
    policy_gap,
    read,
    share,
    summarize,
    summarize_by_lag,
    survival,
)
from headway.algorithms.tokens import Tokens
from tests.algorithms import oracles
from tests.algorithms.ragged import Ragged, every_case, make

LENGTH_BUCKETS = {"64": 64, "256": 256, "1024": 1024, "4096": 4096, "more": 10**9}
LAG_BUCKETS = {"0": 0, "1": 1, "3": 3, "7": 7, "15": 15, "more": 10**9}


@every_case
def test_policy_gap_is_the_equation(case: str) -> None:
    batch = make(case)
    numbers = summarize(_floats(policy_gap(batch.current_T, batch.tokens)))
    ratios = oracles.token_ratios(batch.double())
    trained = [ratios[t] for _, row in batch.trained() for t in row]
    count = max(len(trained), 1)
    expected = {
        "ratio_mean": sum(float(r) for r in trained) / count,
        "kl_behavior": sum(float(r - 1 - torch.log(r)) for r in trained) / count,
        "ratio_max": max((float(r) for r in trained), default=0.0),
        "ratio_max_deviation": max((abs(float(r) - 1) for r in trained), default=0.0),
        "ess": sum(map(float, trained)) ** 2 / (count * sum(float(r) ** 2 for r in trained)) if trained else 0.0,
    }
    assert numbers == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_parts_merge_to_the_whole() -> None:
    batch, split = make("ragged"), 9
    whole = policy_gap(batch.current_T, batch.tokens)
    parts = [
        policy_gap(batch.current_T[part], Tokens(*(values_T[part] for values_T in batch.tokens[:4]), batch.cu_seqlens))
        for part in (slice(split), slice(split, None))
    ]
    assert merge(map(_floats, parts)) == pytest.approx(_floats(whole), rel=1e-6)


@every_case
def test_figures_by_lag_are_those_of_the_tokens_of_that_lag_alone(case: str) -> None:
    batch = make(case)
    lags_T = torch.tensor([0, 1, 5, 6, 30, 2000])[batch.lags_T]
    tokens = batch.tokens._replace(lags_T=lags_T)
    is_counted_T = batch.current_T > batch.anchor_T
    found = summarize_by_lag(
        _floats(policy_gap(batch.current_T, tokens) | share("clip_fraction", is_counted_T, tokens))
    )
    ends = dict(zip((0, 1, 5, 6, 30, 2000), (0, 1, 6, 6, 32, 1000), strict=True))
    trained = {ends[int(lags_T[t])] for _, row in batch.trained() for t in row}
    assert set(found) == trained <= set(metrics.LAG_BUCKETS)
    for end, figures in found.items():
        of_lag_T = torch.tensor([ends[int(lag)] == end for lag in lags_T])
        alone = tokens._replace(loss_mask_T=batch.mask_T * of_lag_T)
        expected = summarize(_floats(policy_gap(batch.current_T, alone) | share("clip_fraction", is_counted_T, alone)))
        assert figures == pytest.approx({name: expected[name] for name in figures}, rel=1e-5)
        assert figures.keys() == {"ratio_mean", "ess", "clip_fraction"}


def test_effective_sample_size_of_known_weights() -> None:
    assert effective_sample_size(4.0, 4.0, 4) == 1
    assert effective_sample_size(1.0, 1.0, 4) == 0.25
    assert effective_sample_size(0.0, 0.0, 0) == 0


def _bucket(value: int, buckets: dict[str, int]) -> str:
    return next(label for label, bound in buckets.items() if value <= bound)


def _expected_survival(b: Ragged, weights_T: torch.Tensor) -> dict[str, float]:
    pairs: dict[str, list[bool]] = {}
    for _, row in b.trained():
        if not row:
            continue
        length, lag = _bucket(len(row), LENGTH_BUCKETS), _bucket(max(int(b.lags_T[t]) for t in row), LAG_BUCKETS)
        kept = [bool(weights_T[t] != 0) for t in row]
        pairs.setdefault(f"kept_sequences_length_{length}", []).append(any(kept))
        pairs.setdefault(f"kept_sequences_lag_{lag}", []).append(any(kept))
        pairs.setdefault(f"kept_length_{length}", []).extend(kept)
        for t, is_kept in zip(row, kept, strict=True):
            pairs.setdefault(f"kept_lag_{_bucket(int(b.lags_T[t]), LAG_BUCKETS)}", []).append(is_kept)
    return {name: sum(kept) / len(kept) for name, kept in pairs.items()}


@every_case
def test_survival_is_the_share_left_in_each_bucket(case: str) -> None:
    batch = make(case)
    weights_T = torch.rand(batch.mask_T.numel(), generator=torch.Generator().manual_seed(1))
    weights_T[weights_T < 0.6] = 0
    numbers = summarize(_floats(survival(weights_T, batch.tokens)))
    kept = {name: value for name, value in numbers.items() if name.startswith("kept_")}
    assert kept == pytest.approx(_expected_survival(batch, weights_T))
    trained = [float(weights_T[t]) for _, row in batch.trained() for t in row]
    squares = len(trained) * sum(w * w for w in trained)
    assert numbers["final_ess"] == pytest.approx(sum(trained) ** 2 / squares if squares else 0.0)


def test_survival_shows_a_mask_that_prefers_short_and_fresh_responses() -> None:
    lengths = torch.tensor([64, 65, 256, 257, 1024, 1025, 4096, 4097, 0])
    total = int(lengths.sum())
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    lags_T = torch.arange(total) % 20
    generator = torch.Generator().manual_seed(2)
    mask_T = torch.ones(total)
    tokens = Tokens(torch.zeros(total), torch.ones(total), mask_T, lags_T, cu_seqlens)
    batch = Ragged(cu_seqlens, mask_T, torch.zeros(total), torch.zeros(total), torch.ones(9), lags_T)
    position_T = torch.arange(total)
    weights_T = ((torch.rand(total, generator=generator) < 0.9) & (lags_T < 10) & (position_T < 7000)).float()
    numbers = summarize(_floats(survival(weights_T, tokens)))
    kept = {name: value for name, value in numbers.items() if name.startswith("kept_")}
    assert kept == pytest.approx(_expected_survival(batch, weights_T), rel=1e-5)
    assert {f"kept_length_{label}" for label in LENGTH_BUCKETS} < set(kept)
    assert {f"kept_lag_{label}" for label in LAG_BUCKETS} < set(kept)
    assert kept["kept_lag_more"] == 0 < kept["kept_lag_0"]
    assert kept["kept_length_more"] < 0.1 < kept["kept_length_64"]


def test_survival_of_parts_merges_to_the_whole_and_masked_weights_do_not_matter() -> None:
    batch = make("ragged")
    weights_T = (torch.arange(batch.mask_T.numel()) % 3 > 0).float().requires_grad_()
    whole = survival(weights_T, batch.tokens)
    reports = []
    for _, row in batch.rows():
        part = slice(row.start, row.stop)
        alone = Tokens(*(values_T[part] for values_T in batch.tokens[:4]), torch.tensor([0, len(row)]))
        reports.append(_floats(survival(weights_T[part], alone)))
    assert merge(reports) == pytest.approx(_floats(whole))
    assert not any(value.requires_grad for value in whole.values())
    other_T = torch.where(batch.mask_T > 0, weights_T, torch.full_like(weights_T, torch.nan))
    assert _floats(survival(other_T, batch.tokens)) == pytest.approx(_floats(whole))


def test_a_sequence_is_as_old_as_its_oldest_trained_token() -> None:
    lags_T, mask_T = torch.tensor([0, 2, 20]), torch.tensor([1.0, 1.0, 0.0])
    tokens = Tokens(torch.zeros(3), torch.ones(3), mask_T, lags_T, torch.tensor([0, 3]))
    numbers = summarize(_floats(survival(torch.ones(3), tokens)))
    assert {name for name in numbers if name.startswith("kept_sequences_lag")} == {"kept_sequences_lag_3"}


def test_an_empty_bucket_reports_nothing() -> None:
    numbers = summarize(_floats(survival(torch.zeros(3), make("one_token").tokens)))
    assert numbers["kept_length_64"] == 0
    assert "kept_length_256" not in numbers


def _floats(metrics: dict[str, torch.Tensor]) -> dict[str, float]:
    return read(metrics)
