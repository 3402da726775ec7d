"""Every published composition trains real steps; so do KL in the reward, a moving reference, a critic."""

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from headway.algorithms.presets import PRESETS
from headway.broker.schema import Group
from headway.learner.algorithm_config import AlgorithmConfig, KlConfig
from headway.learner.backends import open_backend
from headway.learner.backends.base import Backend
from headway.learner.batching.clusters import PrefixSharing
from headway.learner.batching.packing import concatenate, from_trajectory
from headway.learner.config import OptimizerConfig
from headway.learner.objective.composition import needs_reference
from headway.learner.objective.loss import Objective
from headway.learner.objective.update import Updater
from tests.learner.batches import group
from tests.learner.tiny import OPTIMIZER, VOCABULARY, model_config
from tests.learner.updaters import open_critic, open_updater

MODEL = model_config("qwen3")
STEPS = 3
CANDIDATES = 3
"""The number of a teacher's candidates in each place."""


def configured(preset: str, **others: object) -> AlgorithmConfig:
    return msgspec.convert({**PRESETS[preset].algorithm, **others}, AlgorithmConfig)


def build(
    config: AlgorithmConfig,
    *,
    kind: str = "fsdp",
    has_reference: bool = False,
    prefix_sharing: PrefixSharing = "never",
    seed: int = 3,
    optimizer: OptimizerConfig = OPTIMIZER,
) -> tuple[Updater, Backend]:
    torch.set_num_threads(1)
    backend = open_backend(kind, MODEL, optimizer, seed=seed)
    updater = open_updater(
        config,
        backend,
        open_backend(kind, MODEL, optimizer, seed=seed + 1) if has_reference else None,
        open_critic(MODEL, kind=kind, seed=seed, optimizer=optimizer) if config.advantage.kind == "gae" else None,
        objective=Objective(config, is_one_update=True, max_new_tokens=16),
        learner={"prefix_sharing": prefix_sharing},
        optimizer=optimizer,
        max_new_tokens=16,
        max_lag=4,
    )
    return updater, backend


def sampled(backend: Backend, numbers: Sequence[int], noise: float = 0.02) -> list[Group]:
    """Return groups that weights near the backend's have sampled."""
    groups = []
    for one in (group(number) for number in numbers):
        trajectories = []
        for trajectory in one.trajectories:
            (packable,) = from_trajectory(trajectory, advantages=0.0, step=0, max_lag=4)
            (logprobs_T,) = backend.logprobs([concatenate([packable])], 1.0)
            near = logprobs_T[packable.prompt_length :].numpy()
            rng = np.random.default_rng(len(near))
            names = rng.permuted(np.tile(np.arange(VOCABULARY, dtype=np.int32), (len(near), 1)), axis=1)
            shaken = near + noise * np.random.default_rng(len(near)).normal(size=len(near))
            trajectories.append(
                msgspec.structs.replace(
                    trajectory,
                    behavior_logprobs=np.minimum(shaken, 0).astype(np.float32),
                    teacher_logprobs=np.float32(0.8) * near,
                    candidate_tokens=names[:, :CANDIDATES],
                    candidate_logprobs=-np.sort(rng.uniform(1.2, 4, (len(near), CANDIDATES))).astype(np.float32),
                )
            )
        groups.append(msgspec.structs.replace(one, trajectories=tuple(trajectories)))
    return groups


def weights(backend: Backend) -> torch.Tensor:
    return torch.cat([tensor.detach().flatten().clone() for _, tensor in backend.named_tensors()])


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_trains(preset: str) -> None:
    config = configured(preset)
    updater, backend = build(config, has_reference=needs_reference(config))
    before = weights(backend)
    for step in range(STEPS):
        judged = updater.compute_advantages(sampled(backend, range(3 * step, 3 * step + 3)), step)
        update = updater.update(updater.pack(judged.sequences), step)
        assert np.isfinite(update.loss)
        assert 0 < update.grad_norm < np.inf
        assert all(np.isfinite(value) for value in update.algorithm.values())
        after = weights(backend)
        assert not torch.equal(before, after)
        before = after


@pytest.mark.parametrize("preset", ["grpo", "ppo"])
def test_kl_in_the_reward_is_taken_from_each_response(preset: str) -> None:
    kl = {"kind": "k1", "coefficient": 0.5, "place": "reward"}
    plain, backend = build(configured(preset))
    with_kl, _ = build(configured(preset, kl=kl), has_reference=True)
    groups = sampled(backend, range(3))
    without, judged = plain.compute_advantages(groups, 0), with_kl.compute_advantages(groups, 0)
    if preset == "ppo":  # the critic's rewards are of tokens
        losses = [updater.update(updater.pack(judged.sequences), 0).loss for updater in (plain, with_kl)]
        assert losses[0] != losses[1]
        return
    assert [one.advantages[0] for one in judged.sequences] != [one.advantages[0] for one in without.sequences]
    rewards = []
    for trajectory, sequence in zip((t for g in groups for t in g.trajectories), judged.sequences, strict=True):
        assert with_kl._reference is not None
        (reference_T,) = with_kl._reference.logprobs([concatenate([sequence])], 1.0)
        gap = trajectory.behavior_logprobs - reference_T[sequence.prompt_length :].numpy()
        rewards.append(trajectory.reward - 0.5 * float((gap * sequence.loss_mask).sum()))
    expected = [(r - np.mean(g)) / (np.std(g, ddof=1) + 1e-4) for g in np.reshape(rewards, (3, 3)) for r in g]
    assert [one.advantages[0] for one in judged.sequences] == pytest.approx(expected, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize(("preset", "coefficient"), [("grpo", 0.1), ("online_dpo", 0.0)])
def test_a_moving_reference_follows_and_is_part_of_the_checkpoint(
    preset: str, coefficient: float, tmp_path: Path
) -> None:
    config = configured(preset, kl=msgspec.to_builtins(KlConfig(coefficient=coefficient, ema_decay=0.75)))
    updater, backend = build(config, has_reference=True)
    assert updater._reference is not None
    start = weights(updater._reference)
    updater.update(updater.pack(updater.compute_advantages(sampled(backend, range(3)), 0).sequences), 0)
    moved = weights(updater._reference)
    torch.testing.assert_close(moved, 0.75 * start + 0.25 * weights(backend))
    assert list(updater.extra_models) == ["reference"]
    updater._reference.save(tmp_path / "reference")
    resumed, _ = build(config, has_reference=True)
    resumed.load(tmp_path)
    assert resumed._reference is not None
    assert torch.equal(weights(resumed._reference), moved)


def test_a_reference_that_stays_is_in_no_checkpoint() -> None:
    updater, _ = build(configured("grpo", kl={"coefficient": 0.1}), has_reference=True)
    assert updater.extra_models == {}


def test_shaped_rewards_are_compared_and_raw_ones_reported() -> None:
    shaped, backend = build(configured("grpo", reward={"overlong_buffer": 12}))
    plain, _ = build(configured("grpo"))
    groups = sampled(backend, range(3))
    assert shaped.compute_advantages(groups, 0).rewards == plain.compute_advantages(groups, 0).rewards
    advantages = [
        [one.advantages[0] for one in updater.compute_advantages(groups, 0).sequences] for updater in (shaped, plain)
    ]
    assert advantages[0] != advantages[1]
