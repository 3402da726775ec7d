"""Truncated responses are compared with the others of their group, and are in no loss (`algorithm.mask_truncated`).

A backend gets the other responses alone, so that none of them knows of it; `test_update.py` has small batches on both.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import mean, stdev

import numpy as np
import pytest
import torch
from msgspec import structs

from headway.algorithms.presets import PRESETS
from headway.broker.schema import Group, Trajectory
from headway.learner.algorithm_config import AlgorithmConfig
from headway.learner.backends import open_backend
from headway.learner.batching.clusters import PrefixSharing
from headway.learner.objective.composition import needs_critic, needs_reference
from headway.learner.objective.loss import Objective
from headway.learner.objective.update import ScoredBatch, Updater
from tests.learner.preset_oracles import MAX_NEW_TOKENS, Token, loss_of
from tests.learner.test_later_updates import Seen, watch
from tests.learner.test_pairs import rewarded, samples
from tests.learner.test_presets import configured, sampled
from tests.learner.tiny import OPTIMIZER, model_config
from tests.learner.updaters import open_critic, open_updater

MODEL = model_config("qwen3")
CUT = {(0, 1), (1, 0), (1, 1), (1, 2), (3, 2)}
"""(group, sample) of the truncated responses of four groups of three: all of one group are."""


def updater_of(
    config: AlgorithmConfig,
    *,
    prefix_sharing: PrefixSharing = "never",
    updates_per_step: int = 1,
) -> Updater:
    torch.set_num_threads(1)
    return open_updater(
        config,
        open_backend("fsdp", MODEL, OPTIMIZER, seed=3),
        open_backend("fsdp", MODEL, OPTIMIZER, seed=4) if needs_reference(config) else None,
        open_critic(MODEL, seed=5) if needs_critic(config) else None,
        objective=Objective(config, max_new_tokens=MAX_NEW_TOKENS),
        learner={"prefix_sharing": prefix_sharing, "updates_per_step": updates_per_step},
        max_new_tokens=MAX_NEW_TOKENS,
        max_lag=4,
    )


def masking(preset: str, **others: object) -> AlgorithmConfig:
    return configured(preset, mask_truncated=True, **others)


def truncated(groups: Sequence[Group], cut: Collection[tuple[int, int]]) -> list[Group]:
    """Return the groups, of which these samples were cut at their longest length."""
    return [
        structs.replace(
            group,
            trajectories=tuple(
                structs.replace(one, finish_reason="length" if (number, place) in cut else "stop")
                for place, one in enumerate(group.trajectories)
            ),
        )
        for number, group in enumerate(groups)
    ]


def as_context(batch: ScoredBatch) -> ScoredBatch:
    """Return the batch as TRL masks it: the tokens of truncated responses are computed, and have mask 0."""
    masked = [
        replace(sequence, loss_mask=sequence.loss_mask * np.uint8(trajectory.finish_reason == "stop"))
        for sequence, trajectory in zip(batch.sequences, batch.trajectories, strict=True)
    ]
    return replace(batch, sequences=tuple(masked))


def expected_loss(
    preset: str, groups: Sequence[Group], updates: Sequence[Sequence[Seen]]
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the published loss in float64, and the [T] places of its gradient, one for each micro-batch.

    Advantages are those of whole groups; the loss is that of the responses that ended by themselves.
    """
    places, found = [], {}
    for seen in (seen for update in updates for seen in update):
        places.append(seen.current_T.double().requires_grad_())
        for start, end in pairwise(seen.batch.cu_seqlens.tolist()):
            found[tuple(seen.batch.token_ids_T[start:end].tolist())] = places[-1][start:end]
    responses = []
    for group in groups:
        rewards = [trajectory.reward for trajectory in group.trajectories]
        scale = 1.0 if preset == "dr_grpo" else stdev(rewards) + 1e-4
        for one in group.trajectories:
            if one.finish_reason == "stop":
                advantage = (one.reward - mean(rewards)) / scale
                responses.append(tokens_of(one, found[(*one.prompt_tokens, *one.response_tokens)], advantage))
    return loss_of(preset, responses), places


def tokens_of(trajectory: Trajectory, current_L: torch.Tensor, advantage: float) -> list[Token]:
    current_R = current_L[len(trajectory.prompt_tokens) :]
    return [
        Token(current_R[t], float(current_R[t].detach()), float(trajectory.behavior_logprobs[t]), advantage, 0)
        for t in trajectory.loss_mask.nonzero()[0]
    ]


@pytest.mark.parametrize("preset", ["grpo", "gspo", "dr_grpo"])
def test_the_loss_is_that_of_the_others_with_the_advantages_of_all(
    preset: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    updater = updater_of(masking(preset))
    groups = truncated(sampled(updater._backend, range(4), noise=0.3), CUT)
    seen = watch(updater._backend, monkeypatch)
    judged = updater.compute_advantages(groups, 0)
    assert samples(judged) == ["0:0", "0:2", "2:0", "2:1", "2:2", "3:0", "3:1"]
    update = updater.update(updater.pack(judged.sequences), 0)
    expected, places = expected_loss(preset, groups, seen)
    assert update.loss == pytest.approx(float(expected.detach()), abs=2e-5)
    gradients = torch.autograd.grad(expected, places)
    for one, gradient_T in zip((one for part in seen for one in part), gradients, strict=True):
        torch.testing.assert_close(one.gradient_T, gradient_T.float(), rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize(
    ("preset", "prefix_sharing"),
    [
        ("grpo", "never"),
        ("grpo", "always"),
        ("m2po", "never"),
        ("sequence_tis", "always"),
        ("ppo", "never"),
        ("distillation", "never"),
    ],
)
def test_to_leave_them_out_is_to_mask_them(preset: str, prefix_sharing: PrefixSharing) -> None:
    found = []
    for config in (masking(preset), configured(preset)):
        updater = updater_of(config, prefix_sharing=prefix_sharing)
        judged = updater.compute_advantages(truncated(sampled(updater._backend, range(4), noise=0.3), CUT), 0)
        update = updater.update(updater.pack(as_context(judged).sequences), 0)
        found.append({"loss": update.loss, "norm": update.grad_norm, **update.algorithm})
    assert found[0] == pytest.approx(found[1], rel=1e-4, abs=1e-6)
    assert found[0]["norm"] > 0


@pytest.mark.parametrize("preset", PRESETS)
def test_a_step_of_which_all_are_truncated_has_no_gradient_and_nothing_that_is_not_finite(preset: str) -> None:
    updater = updater_of(masking(preset), updates_per_step=2)
    everything = {(number, place) for number in range(2) for place in range(3)}
    judged = updater.compute_advantages(truncated(sampled(updater._backend, range(2)), everything), 0)
    update = updater.update(updater.pack(judged.sequences), 0)
    assert judged.sequences == ()
    assert (update.loss, update.grad_norm, update.by_lag) == (0, 0, {})
    assert all(np.isfinite(value) for value in update.algorithm.values())
    assert update.budget_tokens > 0, "metrics divide by it"


def test_a_step_of_which_all_are_truncated_moves_the_weights_as_one_with_equal_rewards_does() -> None:
    moved = []
    ordinary, equal = rewarded(0, [0.5, 0.1, 0.9]), rewarded(1, [0.5, 0.5, 0.5])
    for last in (truncated([ordinary], {(0, 0), (0, 1), (0, 2)}), [equal]):
        updater = updater_of(masking("grpo"))
        for step, groups in enumerate(([ordinary], last)):
            before = {name: tensor.clone() for name, tensor in updater._backend.named_tensors()}
            update = updater.update(updater.pack(updater.compute_advantages(groups, step).sequences), step)
        assert update.grad_norm == 0
        moved.append({name: tensor - before[name] for name, tensor in updater._backend.named_tensors()})
    assert any(change.any() for change in moved[0].values())
    torch.testing.assert_close(moved[0], moved[1], rtol=0, atol=0)


@pytest.mark.parametrize("updates_per_step", [1, 4, 20])
def test_the_updates_of_a_step_share_those_that_are_left(updates_per_step: int) -> None:
    updater = updater_of(masking("grpo"), updates_per_step=updates_per_step)
    judged = updater.compute_advantages(truncated(sampled(updater._backend, range(4)), CUT), 0)
    packed = updater.pack(judged.sequences)
    trained = [sum(batch.num_sequences for batch in part) for part in packed]
    assert (len(trained), sum(trained)) == (min(updates_per_step, 7), 7)
    assert np.isfinite(updater.update(packed, 0).loss)


def test_by_default_they_are_trained() -> None:
    updater = updater_of(configured("grpo"))
    groups = [rewarded(0, [0.5, 0.1, 0.9])]
    judged = [updater.compute_advantages(each, 0) for each in (truncated(groups, {(0, 1)}), groups)]
    assert samples(judged[0]) == samples(judged[1]) == ["0:0", "0:1", "0:2"]
    assert [one.loss_mask.all() for one in judged[0].sequences] == [True] * 3


def test_a_penalty_in_the_reward_is_taken_from_them_too() -> None:
    """Otherwise a truncated response would seem the better one of its group for want of a penalty."""
    kl = {"kind": "k1", "coefficient": 0.5, "place": "reward"}
    advantages = []
    for config in (masking("grpo", kl=kl), configured("grpo", kl=kl)):
        updater = updater_of(config)
        judged = updater.compute_advantages(truncated(sampled(updater._backend, range(4), noise=0.3), CUT), 0)
        kept = zip(judged.sequences, judged.trajectories, strict=True)
        advantages.append([one.advantages[0] for one, trajectory in kept if trajectory.finish_reason == "stop"])
    assert advantages[0] == advantages[1]
    assert len(advantages[0]) == 7


def test_a_pair_with_a_truncated_response_is_not_trained() -> None:
    groups = [rewarded(0, [0.5, 0.1, 0.9]), rewarded(1, [0.5, 0.1, 0.9]), rewarded(2, [0.5, 0.1, 0.9])]
    cut = truncated(groups, {(0, 0), (1, 1), (2, 2)})
    judged = updater_of(masking("online_dpo")).compute_advantages(cut, 0)
    assert samples(judged) == ["0:2", "0:1"], "the middle one is in no pair anyway"
    assert judged.figures == {"pairs": 1, "groups_without_pair": 2}
    assert updater_of(configured("online_dpo")).compute_advantages(cut, 0).figures["pairs"] == 3
