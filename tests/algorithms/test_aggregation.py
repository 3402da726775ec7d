import pytest
import torch

from algorithms.aggregation import sequence_mean, token_mean, trained_sequences
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


def _with_losses(case: str) -> tuple[Ragged, torch.Tensor]:
    batch = make(case)
    return batch, torch.randn(batch.mask_T.numel(), generator=torch.Generator().manual_seed(5))
