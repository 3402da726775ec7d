import torch

from headway.algorithms.tokens import segment_mean, segment_sum, sequence_of_token, spread
from tests.algorithms.oracles import at_tokens
from tests.algorithms.ragged import assert_same, every_case, make, stack


@every_case
def test_sums_and_means_over_sequences(case: str) -> None:
    batch = make(case, seed=1).double()
    values_T = torch.randn(batch.mask_T.numel(), dtype=torch.float64)
    sums = stack([sum((values_T[t] for t in row), torch.zeros(())) for _, row in batch.rows()]).double()
    torch.testing.assert_close(segment_sum(values_T, batch.cu_seqlens), sums)
    means = [sum((values_T[t] for t in row), torch.zeros(())) / max(len(row), 1) for _, row in batch.trained()]
    torch.testing.assert_close(segment_mean(values_T, batch.mask_T, batch.cu_seqlens), stack(means).double())


@every_case
def test_spread_gives_each_token_its_sequence(case: str) -> None:
    batch = make(case)
    expected = at_tokens(batch.advantages_S, batch)
    assert torch.equal(spread(batch.advantages_S, batch.cu_seqlens), expected.to(torch.float32))
    assert sequence_of_token(batch.cu_seqlens).tolist() == [s for s, row in batch.rows() for _ in row]


def test_spread_sums_gradients_back() -> None:
    batch = make("ragged")
    assert_same(
        batch,
        lambda b: spread(segment_sum(b.current_T * b.mask_T, b.cu_seqlens), b.cu_seqlens) / 1e30,
        lambda b: at_tokens(segment_sum(b.current_T * b.mask_T, b.cu_seqlens), b) / 1e30,
    )


def test_a_sequence_without_tokens_sums_to_zero() -> None:
    cu_seqlens = torch.tensor([0, 2, 2, 3], dtype=torch.int32)
    assert segment_sum(torch.ones(3), cu_seqlens).tolist() == [2, 0, 1]
    assert segment_mean(torch.ones(3), torch.ones(3), cu_seqlens).tolist() == [1, 0, 1]
