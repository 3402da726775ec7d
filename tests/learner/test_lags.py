"""Figures by lag sum up to the figures over all lags, within one step and over several."""

from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from headway.broker.schema.step_metrics import LagFigures
from headway.deploy.run.figures import by_lag
from headway.learner.batching.packing import PackableSequence
from headway.learner.objective.lag_metrics import bucket_of, figures_by_lag, lag_of_sequence, tokens_by_lag
from tests.deploy.runs import step_metrics

OF_TOKENS = {0: {"ratio_mean": 1.0, "ess": 1.0, "clip_fraction": 0.5}, 6: {"ratio_mean": float("inf"), "ess": 0.0}}


def sequence(lags: list[int], mask: list[int]) -> PackableSequence:
    length = len(lags)
    return PackableSequence(
        token_ids=np.zeros(length + 1, np.int32),
        prompt_length=1,
        loss_mask=np.array(mask, np.uint8),
        behavior_logprobs=np.zeros(length, np.float32),
        lags=np.array(lags, np.int64),
        advantages=np.zeros(length, np.float32),
    )


STEP = [sequence([0, 0], [1, 1]), sequence([5, 2], [1, 1]), sequence([0, 6], [1, 0]), sequence([2, 2], [0, 0])]
REWARDS = [1.0, 0.25, 0.0, 0.5]


def test_a_sequence_is_of_the_lag_of_its_oldest_trained_token_and_a_token_of_its_own() -> None:
    found = figures_by_lag(STEP, REWARDS, OF_TOKENS)
    assert [lag_of_sequence(one) for one in STEP] == [0, 5, 0, 0]
    assert tokens_by_lag(STEP) == {0: 3, 2: 1, 5: 1}
    assert found == {
        0: LagFigures(trajectories=3, tokens=3, reward_mean=0.5, ratio_mean=1.0, ess=1.0, clip_fraction=0.5),
        2: LagFigures(trajectories=0, tokens=1),
        6: LagFigures(trajectories=1, tokens=1, reward_mean=0.25, ess=0.0),
    }
    mean = sum(one.trajectories * (one.reward_mean or 0) for one in found.values()) / len(STEP)
    assert mean == pytest.approx(sum(REWARDS) / len(REWARDS))


@pytest.mark.parametrize(("lag", "end"), [(0, 0), (4, 4), (5, 6), (6, 6), (7, 8), (513, 1000), (5000, 1000)])
def test_a_bucket_has_the_name_of_its_largest_lag(lag: int, end: int) -> None:
    assert bucket_of(lag) == end


def test_several_steps_have_the_figures_of_all_their_trajectories_and_tokens() -> None:
    weights = [np.array([1.0, 2.0, 0.5]), np.array([3.0])]
    steps = [replace(step_metrics(step), by_lag={1: figures(weights_T)}) for step, weights_T in enumerate(weights)]
    found = by_lag([*steps, replace(step_metrics(2), by_lag={})])
    assert found.keys() == {1}
    assert plain(found[1]) == pytest.approx(plain(figures(np.concatenate(weights))))


def figures(weights_T: np.ndarray[Any, Any]) -> LagFigures:
    """Return figures of tokens with these ratios, and of as many trajectories with these rewards and shares."""
    mean = float(weights_T.mean())
    return LagFigures(
        trajectories=len(weights_T),
        tokens=len(weights_T),
        reward_mean=mean,
        ratio_mean=mean,
        ess=float(weights_T.sum() ** 2 / (len(weights_T) * (weights_T**2).sum())),
        clip_fraction=mean,
    )


def plain(figures: LagFigures) -> dict[str, float | None]:
    return {name: getattr(figures, name) for name in figures.__struct_fields__}
