"""A run whose environment asks twice, over real processes: its text in between reaches the learner, untrained."""

import pytest

from headway.learner.experience.log import ExperienceLog

from .recipes import write_recipe
from .records import check_trained, lines, summary
from .terminals import Terminals

pytestmark = pytest.mark.slow

STEPS = 3


def test_a_model_is_asked_again_where_its_answer_is_wrong(terminals: Terminals) -> None:
    home = terminals.directory("run")
    recipe = write_recipe(
        home,
        rewards=[{"kind": "arithmetic"}],
        environment={"kind": "second_try", "options": {"hint": "{prompt}", "discount": 0.5}},
        learner={"steps": STEPS, "groups_per_step": 4, "group_size": 8},
        sampling={"max_new_tokens": 48},
        engine={"max_concurrent": 8, "max_model_len": 64},
        evaluation={"prompts": 8},
        workers={"count": 1, "segment_tokens": 4},
    )
    terminals.open("run", "run", recipe).succeeds()
    run = terminals.root / "run" / "runs" / "tiny"
    check_trained(run, steps=STEPS, trajectories_per_step=32, max_lag=2)
    assert {"eval_before", "eval_after"} <= summary(run).keys()
    log, metrics = ExperienceLog(run / "experience"), lines(run / "metrics.jsonl")
    for line in metrics:
        groups = log.read(line["step"]) or []
        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        asked_again = [trajectory for trajectory in trajectories if trajectory.turns]
        assert len(asked_again) > len(trajectories) / 2, "random weights are wrong, and seldom out of room"
        for group in groups:
            for trajectory in group.trajectories:
                said = trajectory.response_tokens[trajectory.loss_mask == 0].tolist()
                assert said == (group.prompt.token_ids if trajectory.turns else [])
                assert trajectory.rewards.keys() >= {"arithmetic", "environment/first_try", "environment/second_try"}
        assert line["trained_tokens"] == sum(int(trajectory.loss_mask.sum()) for trajectory in trajectories)
