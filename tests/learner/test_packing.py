import json
import math
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.algorithms.presets import PRESETS
from headway.broker.schema import Trajectory, TrajectoryId, Turn, VersionSpan, WeightVersion
from headway.learner.algorithm_config import AlgorithmConfig
from headway.learner.batching.cost import DEFAULT_COST, CostModel
from headway.learner.batching.packing import Plan, from_trajectory, pack, plan
from headway.learner.models.shape import shape_of
from headway.learner.objective.loss import Objective
from tests.learner.tiny import sequences

lengths_of = st.lists(st.integers(1, 400), max_size=60)
costs_of = st.builds(CostModel, per_token=st.floats(0.1, 10), per_pair=st.floats(0, 1))


def micro_batch_costs(planned: Plan, lengths: list[int], cost: CostModel) -> np.ndarray:
    """Return the costs as [replica, micro-batch]."""
    return np.array([[cost.of_sequences([lengths[i] for i in batch]).sum() for batch in share] for share in planned])


def long_tailed(count: int, longest: int) -> list[int]:
    lengths = np.random.default_rng(0).lognormal(math.log(1500), 1.0, count)
    return lengths.clip(1, longest).astype(int).tolist()


@settings(deadline=None)
@given(lengths_of, st.integers(1, 5), st.integers(1, 300), costs_of)
def test_plan_keeps_every_promise(lengths: list[int], replicas: int, budget: int, cost: CostModel) -> None:
    shares = plan(lengths, replicas, budget, cost)
    batches = [batch for share in shares for batch in share]
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    assert len(shares) == replicas
    assert len({len(share) for share in shares}) == 1
    assert all(len(batch) <= 1 or sum(lengths[i] for i in batch) <= budget for batch in batches)
    assert all(batch == sorted(batch) for batch in batches)
    assert plan(lengths, replicas, budget, cost) == shares
    costs = micro_batch_costs(shares, lengths, cost)
    assert (costs[:, :-1].min(axis=0) >= costs[:, 1:].max(axis=0) * (1 - 1e-9)).all(), "alike ones come together"


@settings(deadline=None)
@given(lengths_of, st.integers(1, 5), costs_of)
def test_replicas_differ_by_one_sequence_where_the_budget_leaves_room(
    lengths: list[int], replicas: int, cost: CostModel
) -> None:
    costs = micro_batch_costs(plan(lengths, replicas, 60 * 400, cost), lengths, cost)
    assert costs.shape[1] == 1
    assert np.ptp(costs) <= max(cost.of_sequences(lengths), default=0) * (1 + 1e-9)


@settings(deadline=None)
@given(lengths_of, st.integers(1, 5), st.integers(1, 500))
def test_micro_batches_are_few(lengths: list[int], replicas: int, budget: int) -> None:
    """Best-fit decreasing leaves at most one micro-batch half empty; longer sequences stand alone."""
    count = len(plan(lengths, replicas, budget)[0])
    over = sum(length > budget for length in lengths)
    tokens = sum(length for length in lengths if length <= budget)
    assert count <= max(1, math.ceil((over + 1 + 2 * tokens // budget) / replicas))


def test_best_fit_finds_a_place_where_even_micro_batches_leave_none() -> None:
    """Three even micro-batches of 10 would get 7, 6 and 5 first, and have no room for the rest."""
    lengths = [7, 6, 5, 5, 4, 3]
    assert len(plan(lengths, 1, 10)[0]) == 3
    assert len(plan(lengths, 3, 10)[0]) == 1


@pytest.mark.parametrize(("count", "replicas"), [(256, 8), (1000, 8), (1000, 64)])
def test_replicas_wait_little_for_each_other(count: int, replicas: int) -> None:
    """The wait is nearly the least possible, with as few micro-batches as the tokens fill."""
    lengths, budget = long_tailed(count, 8192), 16384
    costs = micro_batch_costs(plan(lengths, replicas, budget), lengths, DEFAULT_COST)
    assert costs.shape[1] == math.ceil(math.ceil(sum(lengths) / budget) / replicas)
    assert costs.max(axis=0).sum() <= 1.01 * costs.sum() / replicas


def test_a_long_sequence_gets_company_as_costly_as_itself() -> None:
    """One sequence of 8,000 delays seven replicas, which do as much meanwhile: the second round is short."""
    lengths = [8000] + [100] * 1000
    cost = CostModel(per_token=1.0, per_pair=1 / 8000)
    costs = micro_batch_costs(plan(lengths, 8, 10000, cost), lengths, cost)
    assert costs.shape[1] == 2
    assert costs[:, 0].max() == 16000
    assert costs.max(axis=0).sum() < 1.1 * (16000 + (1000 * 101.25 - 7 * 10125) / 8)


def test_cost_counts_what_transformers_would_compute() -> None:
    """The cost is the forward FLOPs of the modules: 2 per weight and token, and two products of all causal pairs."""
    from transformers import Qwen3MoeConfig

    config = Qwen3MoeConfig(
        vocab_size=100,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        moe_intermediate_size=24,
        num_experts=8,
        num_experts_per_tok=3,
        tie_word_embeddings=True,
    )
    attention = 32 * 64 + 2 * 32 * 32 + 64 * 32
    layer = attention + 3 * (3 * 32 * 24) + 8 * 32
    cost = CostModel.of_model(shape_of(config))
    assert cost.per_token == 2 * (2 * layer + 100 * 32)
    assert cost.per_pair == 2 * (2 * 2 * 64) / 2


def test_measured_costs_are_those_that_were_measured() -> None:
    rng = np.random.default_rng(0)
    true = CostModel(per_token=2e-6, per_pair=3e-10, per_micro_batch=4e-3)
    lengths = [rng.integers(10, 8000, rng.integers(1, 9)).tolist() for _ in range(30)]
    seconds = [true.of_micro_batch(one) for one in lengths]
    fitted = CostModel.measured(lengths, seconds)
    assert fitted.per_token == pytest.approx(true.per_token)
    assert fitted.per_pair == pytest.approx(true.per_pair)
    assert fitted.per_micro_batch == pytest.approx(true.per_micro_batch)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 400), st.floats(0, 10)), min_size=1, max_size=8))
def test_no_measured_cost_is_negative_or_worse_than_nothing(measured: list[tuple[int, float]]) -> None:
    lengths, seconds = [[length] for length, _ in measured], [second for _, second in measured]
    fitted = CostModel.measured(lengths, seconds)
    assert min(fitted.per_token, fitted.per_pair, fitted.per_micro_batch) >= 0
    errors = [fitted.of_micro_batch(one) - second for one, second in zip(lengths, seconds, strict=True)]
    assert sum(error**2 for error in errors) <= sum(second**2 for second in seconds) + 1e-9


def test_there_must_be_something_measured() -> None:
    with pytest.raises(ValueError, match="one for each"):
        CostModel.measured([], [])


@pytest.mark.slow
def test_the_benchmark_says_what_it_promises() -> None:
    command = ["benchmarks.packing", "--sequences", "200", "--replicas", "1", "4", "--budgets", "16384"]
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-m", *command], cwd=root, capture_output=True, text=True, check=True)
    cases = json.loads(done.stdout.splitlines()[-1])["cases"]
    assert [(case["lengths"], case["replicas"]) for case in cases] == [
        ("lognormal", 1),
        ("lognormal", 4),
        ("mixture", 1),
        ("mixture", 4),
    ]
    for case in cases:
        assert case["micro_batches"] >= case["fewest"]
        assert 0 <= case["unused"] < 1
        assert min(case["imbalance"], case["waiting"]) >= 1 - 1e-9
        assert case["padded"] > case["sorted"] >= 1


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
    (packable,) = from_trajectory(trajectory(), advantages=0.5, step=7, max_lag=3)
    assert packable.token_ids.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert packable.loss_mask.tolist() == [0, 0, 0, 1]
    (batch,) = pack([packable], 0, 1, 100)
    assert batch.lags_T.tolist() == [0, 0, 0, 0, 0, 0, 1]
    assert batch.behavior_logprobs_T.tolist() == [0, 0, 0, 0, 0, 0, -4]
    (within,) = from_trajectory(trajectory(), advantages=0.5, step=7, max_lag=4)
    assert within.loss_mask.tolist() == [1, 1, 0, 1]
    assert trajectory().loss_mask.tolist() == [1, 1, 0, 1]


def test_what_an_environment_said_gets_no_gradient_and_no_ratio() -> None:
    """This holds for any logprob that a policy gives these tokens, and for any packing."""
    turns = (Turn(0, 2, 0.0), Turn(3, 4, 1.0))
    said = msgspec.structs.replace(trajectory(), behavior_logprobs=np.array([-1, -2, 0, -4], np.float32), turns=turns)
    (packable,) = from_trajectory(said, advantages=0.5, step=7, max_lag=4)
    objective = Objective(msgspec.convert(PRESETS["tis"].algorithm, AlgorithmConfig))
    found = []
    for of_said in (-1.0, -90.0):
        batches = pack([packable, packable], 0, 1, 100)
        (batch,) = batches
        current_T = torch.full((14,), -1.5)
        current_T[[5, 12]] = of_said
        current_T.requires_grad_()
        proximal = [torch.full((14,), -1.2)] if objective.needs_proximal else None
        share, report = objective.token_loss(batches, proximal_logprobs=proximal)(0, current_T)
        share.backward()
        assert current_T.grad is not None
        assert current_T.grad[[5, 12]].tolist() == [0, 0]
        assert current_T.grad[[3, 4, 6, 10, 11, 13]].ne(0).any()
        assert batch.behavior_logprobs_T[[5, 12]].tolist() == [0, 0]
        found.append((float(share.detach()), current_T.grad.tolist(), objective.combine_reports([report])))
    assert found[0] == found[1]
