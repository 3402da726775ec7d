import pytest
import torch

from headway.algorithms.aggregation import (
    AGGREGATIONS,
    fixed_denominator,
    pair_mean,
    sequence_mean,
    sequence_sum,
    token_mean,
    trained_sequences,
)
from tests.algorithms.ragged import Ragged, every_case, make


@every_case
def test_token_mean(case: str) -> None:
    batch, losses_T = _with_losses(case)
    trained = [t for _, row in batch.trained() for t in row]
    expected = sum(float(losses_T[t]) for t in trained) / max(len(trained), 1)
    shares_T = token_mean(batch.mask_T, batch.cu_seqlens, tokens=len(trained), sequences=0)
    assert float((losses_T * shares_T).sum()) == pytest.approx(expected, abs=1e-6)


@every_case
def test_sequence_mean(case: str) -> None:
    batch, losses_T = _with_losses(case)
    means = [sum(float(losses_T[t]) for t in row) / len(row) for _, row in batch.trained() if row]
    sequences = float(trained_sequences(batch.mask_T, batch.cu_seqlens))
    assert sequences == len(means)
    shares_T = sequence_mean(batch.mask_T, batch.cu_seqlens, tokens=0, sequences=sequences)
    expected = sum(means) / max(len(means), 1)
    assert float((losses_T * shares_T).sum()) == pytest.approx(expected, abs=1e-6)


@every_case
def test_sequence_sum(case: str) -> None:
    batch, losses_T = _with_losses(case)
    sums = [sum(float(losses_T[t]) for t in row) for _, row in batch.trained() if row]
    shares_T = sequence_sum(batch.mask_T, batch.cu_seqlens, tokens=0, sequences=len(sums))
    assert float((losses_T * shares_T).sum()) == pytest.approx(sum(sums) / max(len(sums), 1), abs=1e-6)


@every_case
@pytest.mark.parametrize("length", [1, 4096])
def test_fixed_denominator(case: str, length: int) -> None:
    batch, losses_T = _with_losses(case)
    sums = [sum(float(losses_T[t]) for t in row) for _, row in batch.trained() if row]
    shares_T = fixed_denominator(batch.mask_T, batch.cu_seqlens, tokens=0, sequences=len(sums), length=length)
    expected = sum(sums) / (max(len(sums), 1) * length)
    assert float((losses_T * shares_T).sum()) == pytest.approx(expected, rel=1e-5, abs=1e-7)


def test_the_mean_over_pairs_counts_those_of_other_micro_batches() -> None:
    losses_P, weights_P = torch.tensor([1.0, 4.0, 2.0]), torch.tensor([1.0, 0.5, 0.0])
    assert float(pair_mean(losses_P, weights_P, pairs=6)) == pytest.approx(3 / 6)
    assert float(pair_mean(losses_P[:0], weights_P[:0], pairs=0)) == 0


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_shares_of_a_batch_do_not_depend_on_how_it_was_cut(name: str) -> None:
    batch = make("ragged")
    options = {"length": 100} if name == "fixed_denominator" else {}
    tokens, sequences = float(batch.mask_T.sum()), float(trained_sequences(batch.mask_T, batch.cu_seqlens))
    whole_T = AGGREGATIONS[name](batch.mask_T, batch.cu_seqlens, tokens=tokens, sequences=sequences, **options)
    for _, row in batch.rows():
        alone_T = AGGREGATIONS[name](
            batch.mask_T[row.start : row.stop],
            torch.tensor([0, len(row)]),
            tokens=tokens,
            sequences=sequences,
            **options,
        )
        torch.testing.assert_close(alone_T, whole_T[row.start : row.stop])


def _with_losses(case: str) -> tuple[Ragged, torch.Tensor]:
    batch = make(case)
    return batch, torch.randn(batch.mask_T.numel(), generator=torch.Generator().manual_seed(5))
