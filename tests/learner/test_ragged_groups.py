"""Groups that were trimmed, down to a single sample, go through a whole update."""

from statistics import mean, stdev

import numpy as np
import pytest
import torch

from headway.learner.algorithm_config import AggregationConfig, AlgorithmConfig
from headway.learner.backends import open_backend
from tests.learner.batches import group
from tests.learner.tiny import OPTIMIZER, model_config
from tests.learner.updaters import open_updater

GROUPS = [group(0), group(1, samples=(0, 2)), group(2, samples=(1,)), group(3)]


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_an_update_on_trimmed_groups(aggregation: str) -> None:
    torch.manual_seed(0)
    backend = open_backend("fsdp", model_config("qwen3"), OPTIMIZER, seed=3)
    config = AlgorithmConfig(aggregation=AggregationConfig(kind=aggregation))  # type: ignore[arg-type]
    updater = open_updater(config, backend)
    judged = updater.compute_advantages(GROUPS, step=1)
    expected = []
    for one in GROUPS:
        rewards = [trajectory.reward for trajectory in one.trajectories]
        spread = stdev(rewards) if len(rewards) > 1 else 0.0
        expected += [(reward - mean(rewards)) / (spread + 1e-4) for reward in rewards]
    assert [sequence.advantages[0] for sequence in judged.sequences] == pytest.approx(expected)
    assert expected[5] == 0.0  # alone, it has nothing to be compared with
    update = updater.update(updater.pack(judged.sequences), step=1)
    assert np.isfinite(update.loss)
    assert 0 < update.grad_norm < np.inf
