import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from broker.schema import Trajectory, TrajectoryId, VersionSpan, WeightVersion
from learner.packing import from_trajectory, pack, plan, sequence_cost
from tests.learner.tiny import sequences

lengths_of = st.lists(st.integers(1, 400), max_size=60)


@given(lengths_of, st.integers(1, 5), st.integers(1, 300))
def test_plan_keeps_every_promise(lengths: list[int], world_size: int, budget: int) -> None:
    ranks = plan(lengths, world_size, budget)
    batches = [batch for rank in ranks for batch in rank]
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    assert len(ranks) == world_size
    assert len({len(rank) for rank in ranks}) == 1
    assert all(len(batch) <= 1 or sum(lengths[i] for i in batch) <= budget for batch in batches)
    costs = [sum(sequence_cost(lengths[i]) for batch in rank for i in batch) for rank in ranks]
    assert max(costs) - min(costs) <= max(map(sequence_cost, lengths), default=0) + 1e-6
    assert plan(lengths, world_size, budget) == ranks


@given(lengths_of, st.integers(20, 500))
def test_micro_batches_are_few(lengths: list[int], budget: int) -> None:
    """First-fit decreasing leaves one micro-batch half empty at most; longer sequences stand alone."""
    batches = [batch for batch in plan(lengths, 1, budget)[0] if batch]
    over = sum(length > budget for length in lengths)
    tokens = sum(length for length in lengths if length <= budget)
    assert len(batches) <= over + 1 + 2 * tokens // budget


def test_every_token_travels_with_its_values() -> None:
    given_sequences = sequences([5, 12, 3, 30, 8, 8, 1])
    chosen = [i for batch in plan([5, 12, 3, 30, 8, 8, 1], 2, 20)[1] for i in batch]
    offset, rows = 0, pack(given_sequences, 1, 2, 20)
    joined = {
        name: torch.cat([getattr(batch, name) for batch in rows])
        for name in (
            "token_ids_T",
            "position_ids_T",
            "loss_mask_T",
            "behavior_logprobs_T",
            "lags_T",
            "advantages_T",
        )
    }
    assert sum(batch.num_sequences for batch in rows) == len(chosen) > 0
    for index in chosen:
        sequence = given_sequences[index]
        end = offset + len(sequence.token_ids)
        response = slice(offset + sequence.prompt_length, end)
        mask = sequence.loss_mask != 0
        assert joined["token_ids_T"][offset:end].tolist() == sequence.token_ids.tolist()
        assert joined["position_ids_T"][offset:end].tolist() == list(range(end - offset))
        assert joined["loss_mask_T"][response].tolist() == sequence.loss_mask.tolist()
        assert not joined["loss_mask_T"][offset : response.start].any()
        expected = np.where(mask, sequence.behavior_logprobs, 0)
        np.testing.assert_array_equal(joined["behavior_logprobs_T"][response].numpy(), expected)
        assert joined["lags_T"][response].tolist() == np.where(mask, sequence.lags, 0).tolist()
        np.testing.assert_array_equal(joined["advantages_T"][response].numpy(), np.where(mask, sequence.advantages, 0))
        offset = end
    assert [batch.cu_seqlens[-1].item() for batch in rows] == [batch.num_tokens for batch in rows]


def test_empty_micro_batch_has_every_field() -> None:
    (batch,) = pack([], 0, 1, 100)
    assert (batch.num_sequences, batch.num_tokens, batch.cu_seqlens.tolist()) == (0, 0, [0])
    assert batch.token_ids_T.dtype == batch.position_ids_T.dtype == batch.lags_T.dtype == torch.int64
    assert batch.loss_mask_T.dtype == batch.advantages_T.dtype == torch.float32


def trajectory() -> Trajectory:
    spans = (VersionSpan(0, 2, WeightVersion(1, 3)), VersionSpan(2, 4, WeightVersion(1, 6)))
    return Trajectory(
        tid=TrajectoryId("0000-00000001", 0, 0),
        prompt_tokens=np.array([1, 2, 3], np.int32),
        response_tokens=np.array([4, 5, 6, 7], np.int32),
        behavior_logprobs=np.array([-1, -2, -3, -4], np.float32),
        loss_mask=np.array([1, 1, 0, 1], np.uint8),
        spans=spans,
        reward=1.0,
        rewards={},
        finish_reason="stop",
        worker="w",
    )


def test_tokens_over_the_bound_are_context_only() -> None:
    packable = from_trajectory(trajectory(), advantages=0.5, step=7, max_lag=3)
    assert packable.token_ids.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert packable.loss_mask.tolist() == [0, 0, 0, 1]
    (batch,) = pack([packable], 0, 1, 100)
    assert batch.lags_T.tolist() == [0, 0, 0, 0, 0, 0, 1]
    assert batch.behavior_logprobs_T.tolist() == [0, 0, 0, 0, 0, 0, -4]
    within = from_trajectory(trajectory(), advantages=0.5, step=7, max_lag=4)
    assert within.loss_mask.tolist() == [1, 1, 0, 1]
    assert trajectory().loss_mask.tolist() == [1, 1, 0, 1]
