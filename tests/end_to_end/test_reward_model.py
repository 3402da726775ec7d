"""`headway run` with a reward model beside a rule: it starts the scorer, and trains the weighted, normalized sum."""

import pytest

from learner.experience.logged_batch import read_first_groups
from tests.rollout_workers.reward_models import save_model, score_of

from .recipes import SEVENS, write_recipe
from .records import lines
from .terminals import Terminals

pytestmark = pytest.mark.slow

MODEL = {"kind": "reward_model", "path": "rm", "weight": 0.5, "mean": 0.1, "std": 2.0, "clip": 0.3}


def test_a_run_trains_on_a_reward_model_and_a_rule_together(terminals: Terminals) -> None:
    home = terminals.directory("run")
    (home / "sevens.py").write_text(SEVENS)
    model = save_model(home / "rm", scores=True)
    recipe = write_recipe(
        home,
        rewards=[{"kind": "sevens:compute_score"}, MODEL],
        learner={"steps": 2, "groups_per_step": 2},
        workers={"count": 1},
        evaluation={"prompts": 3},
    )
    terminals.open("run", "run", str(recipe)).succeeds()
    run = home / "runs" / "tiny"
    groups = [
        group for step in (0, 1) for group in read_first_groups(run / "experience" / f"step_{step}.zst", "", step, 2)
    ]
    trained = [one for group in groups for one in group.trajectories]
    assert len(trained) == 16
    for one in trained:
        wanted = score_of(model, [*one.prompt_tokens.tolist(), *one.response_tokens.tolist()])
        assert one.rewards["reward_model"] == pytest.approx(wanted, abs=1e-4)
        share = max(-0.3, min(0.3, (one.rewards["reward_model"] - 0.1) / 2))
        assert one.reward == pytest.approx(one.rewards["compute_score"] + 0.5 * share, abs=1e-5)
    assert {one.rewards["reward_model"] > 0.7 for one in trained} == {True, False}, "some are clipped, and some are not"
    before, after = lines(run / "evaluations.jsonl")
    assert before["step"] == 0
    assert after["step"] == 2
    log = (run / "logs" / "scorer-reward_model-0.log").read_text()
    assert "reward_model holds" in log
    assert "finished" in log
