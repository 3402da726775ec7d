"""Pairs of sampled groups: the choice of the pairs, their trained tokens, and a loss that packing never changes."""

import msgspec
import numpy as np
import pytest
import torch
from msgspec import structs

from headway.broker.schema import Group
from headway.learner.algorithm_config import AlgorithmConfig
from headway.learner.backends import open_backend
from headway.learner.objective.loss import Objective
from headway.learner.objective.update import ScoredBatch, Updater
from tests.learner.batches import group
from tests.learner.test_later_updates import reference
from tests.learner.test_presets import configured, sampled
from tests.learner.tiny import OPTIMIZER, model_config
from tests.learner.updaters import open_updater

MAX_LAG = 2


def updater_of(config: AlgorithmConfig, *, micro_batch_tokens: int = 40, updates_per_step: int = 1) -> Updater:
    torch.set_num_threads(1)
    backend = open_backend("fsdp", model_config("qwen3"), OPTIMIZER, seed=3)
    learner = {"micro_batch_tokens": micro_batch_tokens, "updates_per_step": updates_per_step}
    return open_updater(config, backend, reference(), learner=learner, max_new_tokens=16, max_lag=MAX_LAG)


def rewarded(number: int, rewards: list[float], *, untrained: int | None = None, step: int = 0) -> Group:
    """Return a group with these rewards; no token of the sample `untrained` was sampled."""
    whole = group(number, tuple(range(len(rewards))), step=step)
    trajectories = [
        structs.replace(one, reward=reward, loss_mask=np.full_like(one.loss_mask, place != untrained))
        for place, (one, reward) in enumerate(zip(whole.trajectories, rewards, strict=True))
    ]
    return structs.replace(whole, trajectories=tuple(trajectories))


def judged(groups: list[Group], step: int = 0) -> ScoredBatch:
    return updater_of(configured("online_dpo")).compute_advantages(groups, step)


def samples(batch: ScoredBatch) -> list[str]:
    return [f"{one.tid.group[-1]}:{one.tid.sample}" for one in batch.trajectories]


def test_the_best_and_the_worst_of_each_group_are_trained_and_no_other_sample() -> None:
    groups = [rewarded(0, [0.5, 0.1, 0.9, 0.3]), rewarded(1, [1.0, 1.0, 1.0]), rewarded(2, [0.0, 1.0])]
    batch = judged(groups)
    assert samples(batch) == ["0:2", "0:1", "2:1", "2:0"]
    assert batch.figures == {"pairs": 2, "groups_without_pair": 1}
    assert batch.rewards.mean == pytest.approx(np.mean([0.5, 0.1, 0.9, 0.3, 1, 1, 1, 0, 1]))
    for sequence, trajectory in zip(batch.sequences, batch.trajectories, strict=True):
        assert sequence.token_ids[sequence.prompt_length :].tolist() == trajectory.response_tokens.tolist()
    (rows,) = updater_of(configured("online_dpo")).pack(batch.sequences)
    assert sum(row.num_tokens for row in rows) == sum(len(one.token_ids) for one in batch.sequences)


def test_other_losses_train_every_sample() -> None:
    groups = [rewarded(0, [0.5, 0.1, 0.9]), rewarded(1, [1.0, 1.0, 1.0])]
    batch = updater_of(configured("grpo")).compute_advantages(groups, 0)
    assert samples(batch) == ["0:0", "0:1", "0:2", "1:0", "1:1", "1:2"]
    assert batch.figures == {}


def test_a_response_without_a_trained_token_makes_no_pair() -> None:
    assert judged([rewarded(0, [0.5, 0.1], untrained=1), rewarded(1, [0.5, 0.1])]).figures == {
        "pairs": 1,
        "groups_without_pair": 1,
    }


def test_tokens_over_the_bound_on_lag_are_in_no_pair() -> None:
    groups = [rewarded(0, [0.5, 0.1], step=0), rewarded(1, [0.5, 0.1], step=1)]
    assert samples(judged(groups, step=1 + MAX_LAG)) == ["1:0", "1:1"]


WEIGHED = [{"kind": "pair_truncated_is"}]


@pytest.mark.parametrize(
    ("micro_batch_tokens", "updates_per_step", "corrections"),
    [(4096, 1, []), (1, 3, []), (1, 1, WEIGHED), (4096, 2, WEIGHED)],
)
def test_packing_changes_neither_loss_nor_figures_and_keeps_pairs_whole(
    micro_batch_tokens: int, updates_per_step: int, corrections: list[object]
) -> None:
    config, found = configured("online_dpo", corrections=corrections), []
    for tokens in (64, micro_batch_tokens):
        updater = updater_of(config, micro_batch_tokens=tokens, updates_per_step=updates_per_step)
        batch = updater.compute_advantages(sampled(updater._backend, range(5), noise=0.3), 0)
        packed = updater.pack(batch.sequences)
        assert all(row.num_sequences % 2 == 0 for part in packed for row in part)
        update = updater.update(packed, 0)
        found.append({"loss": update.loss, "norm": update.grad_norm, **update.algorithm, **update.by_lag[0]})
    assert found[0] == pytest.approx(found[1], rel=2e-3, abs=1e-5)
    assert {"reward_margin", "reward_accuracy", "logprob_chosen", "logprob_rejected", "ess"} <= found[0].keys()
    assert ("capped_fraction" in found[0]) == bool(corrections)


def test_a_step_without_a_pair_has_no_gradient() -> None:
    updater = updater_of(configured("online_dpo"), updates_per_step=2)
    batch = updater.compute_advantages([rewarded(0, [1.0, 1.0]), rewarded(1, [0.0, 0.0])], 0)
    update = updater.update(updater.pack(batch.sequences), 0)
    assert (update.loss, update.grad_norm) == (0, 0)
    assert (batch.figures["pairs"], update.by_lag) == (0, {})


def test_the_loss_falls_as_the_pairs_are_learned() -> None:
    config = configured("online_dpo", objective={"kind": "dpo", "anchor": "reference", "options": {"beta": 1.0}})
    updater = updater_of(config)
    batch = updater.compute_advantages([rewarded(number, [0.0, 1.0, 0.5]) for number in range(3)], 0)
    updates = [updater.update(updater.pack(batch.sequences), step) for step in range(8)]
    margins = [update.algorithm["reward_margin"] for update in updates]
    assert margins == sorted(margins)
    assert updates[-1].loss < updates[0].loss


def test_groups_without_a_pair_may_be_replaced() -> None:
    assert Objective(configured("online_dpo", dynamic_sampling=2)).is_of_pairs


def test_losses_without_a_reference_need_no_model() -> None:
    algorithm = {**msgspec.to_builtins(configured("online_dpo")), "objective": {"kind": "simpo", "anchor": "reference"}}
    assert not Objective(msgspec.convert(algorithm, AlgorithmConfig)).needs_reference
    assert Objective(configured("online_ipo")).needs_reference
