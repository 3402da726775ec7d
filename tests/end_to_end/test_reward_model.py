"""`headway run` with a reward model starts the scorer, and starts it again when it is killed.

The run trains the weighted, normalized sum of the model's scores and a rule's, or the pairs that the model alone
chooses.
"""

import os
import signal
from pathlib import Path

import pytest

from headway.broker.schema import Trajectory
from headway.learner.experience.log import ExperienceLog
from tests.rollout_workers.reward_models import save_model, score_of

from .recipes import SEVENS, write_recipe
from .records import check_trained, lines
from .terminals import Terminals
from .watching import attached

pytestmark = pytest.mark.slow

STEPS = 4
LOG = Path("logs", "scorer-reward_model-0.log")
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
    trained = [one for step in (0, 1) for group in taken(run, step, count=2) for one in group]
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
    log = (run / LOG).read_text()
    assert "reward_model holds" in log
    assert "finished" in log


def test_a_reward_model_chooses_the_pairs_of_online_dpo_and_its_scorer_may_be_killed(terminals: Terminals) -> None:
    home = terminals.directory("run")
    model = save_model(home / "rm", scores=True)
    recipe = write_recipe(
        home,
        rewards=[{"kind": "reward_model", "path": "rm"}],
        algorithm={"preset": "online_dpo"},
        learner={"steps": STEPS},
        workers={"count": 1},
    )
    headway, run = terminals.open("run", "run", str(recipe)), home / "runs" / "tiny"
    with attached(terminals, headway, run) as watch:
        found = watch.until("it has scored", lambda status: any(queue.answered for queue in status.scoring))
        (scorer,) = found.scorers
        os.kill(scorer.pid, signal.SIGKILL)
        assert found.announced is None or found.announced.step < STEPS - 2, "there are samples left to score"
    headway.succeeds()
    assert (run / LOG).read_text().count("reward_model holds") == 2, "the supervisor has started it again"
    check_trained(run, steps=STEPS, trajectories_per_step=8, max_lag=2)
    for line in lines(run / "trained.jsonl"):
        pairs = []
        for group in taken(run, line["step"], count=4):
            scores = {
                str(one.tid): score_of(model, [*one.prompt_tokens.tolist(), *one.response_tokens.tolist()])
                for one in group
            }
            assert scores == pytest.approx({str(one.tid): one.reward for one in group}, abs=1e-4)
            pairs += [max(scores, key=scores.__getitem__), min(scores, key=scores.__getitem__)]
        assert sorted(line["tids"]) == sorted(pairs)


def taken(run: Path, step: int, *, count: int) -> list[tuple[Trajectory, ...]]:
    """Return the samples of each of the step's groups, as the learner logged them."""
    groups = ExperienceLog(run / "experience").read(step) or ()
    return [tuple(group.trajectories) for group in groups[:count]]
