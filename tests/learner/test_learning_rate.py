"""The learning rate of a step rises, and then stays or falls, in reinforcement learning as in supervised stages."""

import math
from collections.abc import Sequence
from typing import get_args

import pytest
import torch
from msgspec.structs import replace

from headway.learner.algorithm_config import AlgorithmConfig
from headway.learner.backends import open_backend
from headway.learner.backends.base import TokenLoss
from headway.learner.batching.batch import PackedBatch
from headway.learner.config import Schedule, learning_rate
from headway.learner.objective.update import Updater
from tests.learner.batches import group
from tests.learner.tiny import OPTIMIZER, model_config
from tests.learner.updaters import open_updater

SCHEDULES: Sequence[Schedule] = get_args(Schedule)


@pytest.mark.parametrize(("schedule", "last"), [("constant", 1.0), ("linear", 0.125), ("cosine", 0.0380602)])
def test_it_rises_and_falls(schedule: Schedule, last: float) -> None:
    rates = [learning_rate(step, 10, peak=1.0, warmup_steps=2, schedule=schedule) for step in range(10)]
    assert rates[:3] == [0.5, 1.0, 1.0]
    assert rates[-1] == pytest.approx(last)
    assert rates[2:] == sorted(rates[2:], reverse=True)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_it_is_never_negative_and_does_not_rise_again(schedule: Schedule) -> None:
    """A replay may train steps behind the last one of its settings."""
    rates = [learning_rate(step, 10, peak=1.0, warmup_steps=0, schedule=schedule) for step in range(30)]
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] == pytest.approx(float(schedule == "constant"))


@pytest.mark.parametrize("warmup_steps", [0, 3, 7, 300])
def test_a_constant_one_is_what_it_was_before_there_were_schedules_to_the_bit(warmup_steps: int) -> None:
    for step in range(100):
        before = 3e-4 * (min(1.0, (step + 1) / warmup_steps) if warmup_steps else 1.0)
        rate = learning_rate(step, 100, peak=3e-4, warmup_steps=warmup_steps, schedule="constant")
        assert rate == before


def updater_of(schedule: Schedule, rates: list[float]) -> Updater:
    """Return an updater that notes the rate of each of its optimizer updates."""
    torch.set_num_threads(1)
    backend = open_backend("fsdp", model_config("qwen3"), OPTIMIZER, seed=3)
    step = backend.step

    def noted(
        batches: Sequence[PackedBatch], loss: TokenLoss, temperature: float, learning_rate: float
    ) -> tuple[float, float, list[dict[str, float]]]:
        rates.append(learning_rate)
        return step(batches, loss, temperature, learning_rate)

    backend.step = noted  # type: ignore[method-assign]
    optimizer = replace(OPTIMIZER, learning_rate=0.01, warmup_steps=2, schedule=schedule)
    learner = {"steps": 6, "updates_per_step": 2}
    return open_updater(AlgorithmConfig(), backend, learner=learner, optimizer=optimizer, max_new_tokens=16)


@pytest.mark.parametrize(
    ("schedule", "factor"),
    [("constant", 1.0), ("linear", (6 - 4) / (6 - 2)), ("cosine", (1 + math.cos(math.pi * 2 / 4)) / 2)],
)
def test_all_updates_of_a_step_have_its_rate_which_is_reported(schedule: Schedule, factor: float) -> None:
    rates: list[float] = []
    updater = updater_of(schedule, rates)
    judged = updater.compute_advantages([group(0), group(1)], 4)  # no step before it was trained in this process
    update = updater.update(updater.pack(judged.sequences), 4)
    assert rates == [update.learning_rate] * 2
    assert update.learning_rate == pytest.approx(0.01 * factor)
