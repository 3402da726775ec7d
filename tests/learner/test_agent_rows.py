"""An agent's rollout is one sequence of the loss, in however many rows it is computed, and each sampled token counts
once."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings

from headway.algorithms.aggregation import AGGREGATIONS
from headway.algorithms.presets import PRESETS
from headway.broker.errors import ConfigError, HeadwayError
from headway.broker.schema import Trajectory, TrajectoryId
from headway.broker.wire.codec import decode_trajectory, encode_trajectory
from headway.learner.algorithm_config import AlgorithmConfig
from headway.learner.backends.fsdp.policy import Policy
from headway.learner.batching.batch import PackedBatch
from headway.learner.batching.clusters import pack_units
from headway.learner.batching.packing import concatenate, from_trajectory, rollouts_of
from headway.learner.batching.router_replay import Routing
from headway.learner.models.pretrained import load_model
from headway.learner.objective.lag_metrics import figures_by_lag, lags_of_rollouts
from headway.learner.objective.loss import Objective, denominators
from headway.learner.objective.update import Updater
from tests.learner import agent_episodes
from tests.learner.agent_episodes import MAX_LAG, PROMPT, STEP, Loss, Rollout, Script, group_of
from tests.learner.tiny import model_config, sequences
from tests.learner.updaters import open_updater

MODEL = model_config("qwen3")
ALONE: Any = SimpleNamespace(rank=0, world_size=1, replica=0, replicas=1, is_lead=True)
GAMMA = 0.5
LOSSES: dict[str, tuple[dict[str, Any], Loss]] = {
    "grpo": ({"aggregation": {"kind": "sequence_mean"}}, agent_episodes.grpo),
    "token_mean": ({}, agent_episodes.token_mean),
    "dr_grpo": (
        {"advantage": {"kind": "group_mean"}, "aggregation": {"kind": "fixed_denominator"}},
        agent_episodes.dr_grpo,
    ),
    "gspo": (
        {
            "objective": {"kind": "gspo", "options": {"clip_low": 0.3, "clip_high": 0.3}},
            "aggregation": {"kind": "sequence_mean"},
        },
        agent_episodes.gspo,
    ),
    "sequence_truncated_is": (
        {
            "objective": {"kind": "policy_gradient"},
            "corrections": [{"kind": "sequence_truncated_is"}],
            "aggregation": {"kind": "sequence_mean"},
        },
        agent_episodes.weighted,
    ),
}


few = settings(deadline=None, max_examples=8, derandomize=True, phases=(Phase.explicit, Phase.generate))
"""Each example trains a model several times; to shrink one takes minutes."""


def config_of(**algorithm: Any) -> AlgorithmConfig:
    return msgspec.convert(algorithm, AlgorithmConfig)


def updater_of(config: AlgorithmConfig, backend: Any = ALONE, critic: Any = None, **learner: Any) -> Updater:
    objective = Objective(config, is_one_update=True, max_new_tokens=16)
    usual = {"micro_batch_tokens": 1000, "prefix_sharing": "never"}
    return open_updater(
        config, backend, None, critic, objective=objective, learner=usual | learner, max_new_tokens=16, max_lag=MAX_LAG
    )


def judged(config: AlgorithmConfig, groups: Sequence[Sequence[Rollout]], **learner: Any) -> list[list[PackedBatch]]:
    updater = updater_of(config, **learner)
    made = [group_of(number, group) for number, group in enumerate(groups)]
    return list(updater.pack(updater.compute_advantages(made, STEP).sequences))


def trained(
    policy: Policy, config: AlgorithmConfig, batches: Sequence[PackedBatch]
) -> tuple[float, torch.Tensor, list[torch.Tensor]]:
    """Return the loss of a batch, its gradient [P], and the logprobs of its trained tokens."""
    policy.zero_grad()
    loss = Objective(config, is_one_update=True, max_new_tokens=16).token_loss(batches)
    found = [policy(batch, 1.0) for batch in batches]
    total = torch.stack([loss(index, found_T)[0] for index, found_T in enumerate(found)]).sum()
    total.backward()
    return total.item(), gradient(policy), [found_T.detach() for found_T in found]


def gradient(model: torch.nn.Module) -> torch.Tensor:
    """[P] by name."""
    grads = {name: p.grad if p.grad is not None else torch.zeros_like(p) for name, p in model.named_parameters()}
    return torch.cat([grads[name].double().flatten() for name in sorted(grads)])


@pytest.fixture(scope="module")
def models() -> tuple[Policy, Any]:
    """The learner's model, and an ordinary one in float64 with the same weights."""
    torch.set_num_threads(1)
    policy = Policy(load_model(MODEL, 1), on_cpu=True, half_precision=False)
    return policy, load_model(MODEL, 1).double()


def expected(
    model: Any, loss: Loss, groups: Sequence[Sequence[Rollout]], advantages: Sequence[dict[int, float]]
) -> tuple[float, torch.Tensor]:
    """Return loss and gradient, computed turn by turn."""
    model.zero_grad()
    rollouts: list[agent_episodes.Sampled] = []
    for rollout, of_turns in zip([one for group in groups for one in group], advantages, strict=True):
        rollouts.append([])
        for number, turn in enumerate(rollout.turns):
            if turn.is_trained:
                logprobs = agent_episodes.turn_logprobs(model, turn)
                pairs = zip(logprobs, turn.behavior, strict=True)
                rollouts[-1] += [(new, old, of_turns[number]) for new, old in pairs]
    total = loss(rollouts)
    if total.requires_grad:
        total.backward()
    return total.item(), gradient(model)


def assert_close(found: torch.Tensor, wanted: torch.Tensor, tolerance: float) -> None:
    assert (found - wanted).norm() <= tolerance * max(1.0, float(wanted.norm()))


@pytest.mark.parametrize("name", LOSSES)
@few
@given(groups=agent_episodes.batches)
def test_loss_and_gradient_are_those_of_single_turns_in_any_packing(
    models: tuple[Policy, Any], name: str, groups: list[list[Rollout]]
) -> None:
    options, loss = LOSSES[name]
    by_rollout = agent_episodes.group_advantages(groups, by_std=name != "dr_grpo")
    advantages = [dict.fromkeys(range(6), one) for one in by_rollout]
    compare(models, config_of(**options), loss, groups, advantages)


@few
@given(groups=agent_episodes.batches)
def test_turns_answer_for_their_returns_along_the_tree(models: tuple[Policy, Any], groups: list[list[Rollout]]) -> None:
    config = config_of(credit={"kind": "turn", "gamma": GAMMA})
    compare(models, config, agent_episodes.token_mean, groups, agent_episodes.turn_advantages(groups, GAMMA))


def compare(
    models: tuple[Policy, Any],
    config: AlgorithmConfig,
    loss: Loss,
    groups: list[list[Rollout]],
    advantages: Sequence[dict[int, float]],
) -> None:
    policy, ordinary = models
    wanted, wanted_P = expected(ordinary, loss, groups, advantages)
    found = {}
    for sharing, budget in (("never", 1000), ("never", 1), ("always", 1000), ("always", 1)):
        (batches,) = judged(config, groups, prefix_sharing=sharing, micro_batch_tokens=budget)
        value, grad_P, _ = trained(policy, config, batches)
        assert value == pytest.approx(wanted, rel=5e-6, abs=5e-6)
        assert_close(grad_P, wanted_P, 1e-5)
        found[sharing, budget] = value, grad_P
        if budget == 1:
            assert len(batches) == sum(map(len, groups))
    for value, grad_P in found.values():
        assert value == pytest.approx(found["never", 1000][0], rel=1e-6, abs=1e-6)
        assert_close(grad_P, found["never", 1000][1], 1e-6)


@few
@given(groups=agent_episodes.batches)
def test_logprobs_of_packed_rows_are_those_of_each_row_alone(
    models: tuple[Policy, Any], groups: list[list[Rollout]]
) -> None:
    policy, _ = models
    rollouts = [from_told(one) for group in groups for one in group]
    for sharing in ("always", "never"):
        for packed in pack(rollouts, sharing):
            one_by_one = [policy(concatenate([row]), 1.0).detach() for unit in packed.units for row in rollouts[unit]]
            found_T = policy(packed.batch, 1.0).detach()
            torch.testing.assert_close(found_T, torch.cat(one_by_one), rtol=1e-6, atol=1e-6)


def pack(rollouts: Sequence[Any], sharing: Any, budget: int = 1000) -> list[Any]:
    return pack_units(rollouts, replica=0, replicas=1, micro_batch_tokens=budget, prefix_sharing=sharing)


def from_told(rollout: Rollout, **others: Any) -> list[Any]:
    trajectory = decode_trajectory(encode_trajectory(rollout.trajectory(TrajectoryId("0-1", 0, 0))))
    return from_trajectory(trajectory, **{"advantages": 1.0, "step": STEP, "max_lag": MAX_LAG, **others})


def five_turns(*, is_cut: bool) -> Rollout:
    """Return an episode of five turns of three tokens: in one row, or in five with the same tokens before each."""
    script = Script()
    for number in range(5):
        before, read = script.whole(number - 1), [number + 4] if number else []
        after, keeps, read = (-1, 1, [*before[1:], *read]) if is_cut else (number - 1, len(before), read)
        script.add(after, keeps, read, [number + 8, number + 9, 3])
    return Rollout(script.turns, 1.0)


@pytest.mark.parametrize("kind", AGGREGATIONS)
def test_a_rollout_in_five_rows_weighs_what_it_weighs_in_one(kind: str) -> None:
    config = config_of(aggregation={"kind": kind})
    other, weights = five_turns(is_cut=False), list[tuple[float, float]]()
    for is_cut in (False, True):
        rollouts = [from_told(one) for one in (five_turns(is_cut=is_cut), other)]
        assert [len(rows) for rows in rollouts] == [5 if is_cut else 1, 1]
        batch = concatenate([row for rows in rollouts for row in rows])
        whole = denominators([batch])
        assert list(whole) == [30, 2, 1]
        options = {"length": 16} if kind == "fixed_denominator" else {}
        shares_T = AGGREGATIONS[kind](
            batch.loss_mask_T, batch.rollouts, tokens=whole.tokens, sequences=whole.sequences, **options
        )
        end = sum(len(row.token_ids) for row in rollouts[0])
        weights.append((float(shares_T[:end].sum()), float(shares_T[end:].sum())))
        loss, _ = Objective(config, is_one_update=True, max_new_tokens=16).token_loss([batch])(
            0, torch.full((batch.num_tokens,), -2.5)
        )
        assert float(loss) == pytest.approx(-sum(weights[-1]))
    assert weights[0] == pytest.approx(weights[1])
    assert weights[0][0] == pytest.approx(weights[0][1])


def test_rows_of_a_rollout_stay_together_in_micro_batches_and_updates() -> None:
    groups = [[five_turns(is_cut=True), five_turns(is_cut=False)], [five_turns(is_cut=True)] * 3]
    parts = judged(config_of(), groups, micro_batch_tokens=30, updates_per_step=2)
    batches = [batch for part in parts for batch in part]
    assert [sum(batch.num_rollouts for batch in part) for part in parts] == [2, 3]
    assert sum(batch.num_rollouts for batch in batches) == 5
    assert sorted(batch.num_sequences for batch in batches) == [1, 5, 5, 5, 5]
    for batch in batches:
        assert set(batch.rollouts.tolist()) <= set(batch.cu_seqlens.tolist())


def test_a_rollout_over_the_budget_computes_shared_tokens_once() -> None:
    """Among others that share nothing, so that to share tokens makes the step hardly quicker."""
    others = [[one] for one in sequences([39] * 12)]
    rollouts = [from_told(five_turns(is_cut=True)), *others]
    separate, shared, roomy = (
        next(row.batch for row in pack(rollouts, sharing, budget) if 0 in row.units)
        for sharing, budget in (("never", 40), ("auto", 40), ("auto", 1000))
    )
    assert separate.num_positions == separate.num_tokens > 40
    assert shared.num_positions < 40
    assert roomy.num_positions == roomy.num_tokens


def test_rollouts_of_one_row_have_no_bounds_of_their_own() -> None:
    batch = concatenate(from_told(five_turns(is_cut=False)) * 2)
    assert batch.cu_rollouts is None
    assert batch.rollouts is batch.cu_seqlens


@settings(deadline=None, max_examples=50)
@given(rollout=agent_episodes.agents())
def test_a_row_holds_each_sampled_token_once_with_its_own_values(rollout: Rollout) -> None:
    told = rollout.trajectory(TrajectoryId("0-1", 0, 0))
    advantages = np.arange(len(told.response_tokens), dtype=np.float32)
    found, wanted = [], []
    for row in from_told(rollout, advantages=advantages):
        for place in np.flatnonzero(row.loss_mask):
            tokens = row.token_ids.tolist()
            at = row.prompt_length + int(place)
            found.append((*tokens[: at + 1], row.behavior_logprobs[place], row.lags[place], row.advantages[place]))
    for turn, position in zip(rollout.turns, told.turns, strict=True):
        for place in range(len(turn.sampled) if turn.is_trained else 0):
            tokens = turn.context + turn.sampled[: place + 1]
            wanted.append((*tokens, turn.behavior[place], turn.lag, position.start + place))
    assert sorted(found) == sorted(wanted)


def test_lags_and_rewards_are_counted_by_rollout() -> None:
    turns = [turn.__dict__ | {"lag": number % 3} for number, turn in enumerate(five_turns(is_cut=True).turns)]
    rows = from_told(Rollout([agent_episodes.Told(**turn) for turn in turns], 1.0))
    sequences = [*rows, *from_told(five_turns(is_cut=False))]
    assert lags_of_rollouts(sequences) == [2, 0]
    figures = figures_by_lag(sequences, [1.0, 0.0], {})
    assert {lag: (one.trajectories, one.tokens) for lag, one in figures.items()} == {0: (1, 21), 1: (0, 6), 2: (1, 3)}


def test_a_pair_of_branching_rollouts_is_one_pair() -> None:
    config = msgspec.convert({**PRESETS["online_dpo"].algorithm}, AlgorithmConfig)
    better, worse = five_turns(is_cut=True), Rollout(five_turns(is_cut=False).turns, 0.0)
    groups = [[worse, better], [five_turns(is_cut=True), Rollout(five_turns(is_cut=True).turns, -1.0)]]
    losses = []
    for given_groups in (groups, [[worse, five_turns(is_cut=False)], [worse, five_turns(is_cut=False)]]):
        updater = updater_of(config)
        scored = updater.compute_advantages([group_of(n, group) for n, group in enumerate(given_groups)], STEP)
        assert len(rollouts_of(scored.sequences)) == len(scored.trajectories) == 4
        ((batch,),) = updater.pack(scored.sequences)
        assert denominators([batch]).pairs == 2
        logprobs_T = torch.where(batch.loss_mask_T > 0, -0.1 * batch.token_ids_T, 0.0)
        reference_T = torch.full_like(logprobs_T, -2.0)
        lasting = Objective(config).token_loss([batch], reference_logprobs=[reference_T])
        losses.append(float(lasting(0, logprobs_T)[0]))
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_a_penalty_in_the_reward_counts_the_tokens_of_all_rows() -> None:
    config = config_of(advantage={"kind": "group_mean"}, kl={"kind": "k1", "coefficient": 0.1, "place": "reward"})
    reference = SimpleNamespace(logprobs=lambda batches, _: [-0.1 * batch.token_ids_T for batch in batches])
    objective = Objective(config, is_one_update=True, max_new_tokens=16)
    found = []
    for is_cut in (False, True):
        updater = open_updater(config, ALONE, reference, objective=objective)
        short = Rollout(five_turns(is_cut=is_cut).turns[:2], 1.0)
        scored = updater.compute_advantages([group_of(0, [five_turns(is_cut=is_cut), short])], STEP)
        found.append([float(rows[0].advantages[0]) for rows in rollouts_of(scored.sequences)])
    later = [token for turn in five_turns(is_cut=False).turns[2:] for token in turn.sampled]
    apart = sum(-2.5 + 0.1 * token for token in later)
    assert found[0] == found[1] == pytest.approx([-0.05 * apart, 0.05 * apart])


def branching() -> Rollout:
    script = Script()
    script.add(-1, 3, [], [5, 6])
    script.add(0, 5, [7], [8])
    script.add(0, 4, [9], [10])
    return Rollout(script.turns, 1.0)


def with_teacher(rollout: Rollout) -> Trajectory:
    told = rollout.trajectory(TrajectoryId("0-1", 0, 0))
    logprobs = -np.arange(1, len(told.response_tokens) + 1, dtype=np.float32)
    experts = np.zeros((len(PROMPT) + len(logprobs) - 1, 1, 1), np.uint8)
    return msgspec.structs.replace(told, teacher_logprobs=logprobs, experts=experts)


@pytest.mark.parametrize(
    ("others", "key"),
    [
        ({"has_teacher": True}, "algorithm.distillation.coefficient"),
        ({"has_candidates": True}, "algorithm.distillation.coefficient"),
        ({"routing": Routing(layers=1, experts=2, per_token=1)}, "algorithm.router_replay"),
    ],
)
def test_what_knows_one_row_alone_is_refused_with_branches(others: dict[str, Any], key: str) -> None:
    with pytest.raises(HeadwayError, match=key):
        from_trajectory(with_teacher(branching()), advantages=1.0, step=STEP, max_lag=MAX_LAG, **others)
    rows = from_trajectory(with_teacher(branching()), advantages=1.0, step=STEP, max_lag=MAX_LAG)
    assert [row.teacher_logprobs for row in rows] == [None, None]


def test_an_agent_of_one_row_keeps_its_teacher_and_its_experts() -> None:
    told = with_teacher(five_turns(is_cut=False))
    routing = Routing(layers=1, experts=2, per_token=1)
    (row,) = from_trajectory(told, advantages=1.0, step=STEP, max_lag=MAX_LAG, routing=routing, has_teacher=True)
    assert row.teacher_logprobs is not None
    assert row.experts is not None
    assert row.teacher_logprobs.tolist() == (-np.arange(1.0, 20.0)).tolist()
    assert len(row.experts) == len(row.token_ids) - 1


def test_truncated_rollouts_are_left_out_with_all_their_rows() -> None:
    config = config_of(mask_truncated=True)
    whole = group_of(0, [five_turns(is_cut=True), five_turns(is_cut=False)])
    cut = msgspec.structs.replace(whole.trajectories[0], finish_reason="length")
    scored = updater_of(config).compute_advantages(
        [msgspec.structs.replace(whole, trajectories=(cut, whole.trajectories[1]))], STEP
    )
    assert [one.tid.sample for one in scored.trajectories] == [1]
    assert len(scored.sequences) == 1


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"advantage": {"kind": "global_mean_std"}}, "algorithm.advantage.kind to group_mean_std"),
        ({"reward": {"length_normalized": True}}, "algorithm.reward.length_normalized"),
        ({"dynamic_sampling": 2}, "algorithm.dynamic_sampling"),
        ({"credit": {"kind": "episode", "gamma": 0.5}}, "algorithm.credit.kind=turn, or gamma=1"),
        (
            {"credit": {"kind": "turn", "gamma": 0.5}, "advantage": {"kind": "gae"}},
            "set algorithm.advantage.options.gamma",
        ),
        ({**PRESETS["online_dpo"].algorithm}, "advantage.kind=best_against_worst"),
    ],
)
def test_credit_that_nothing_gives_is_refused(changes: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        Objective(config_of(**{"credit": {"kind": "turn"}, **changes}))
