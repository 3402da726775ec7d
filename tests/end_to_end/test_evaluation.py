"""Workers evaluate beside training, at set steps and with one version each, even if a worker dies meanwhile."""

import json
import re
import signal
import time
from pathlib import Path

import pytest

from headway.deploy.run import record
from headway.deploy.run.events import EvaluationEvent
from headway.learner.checkpoint import read_best
from tests.broker.audit import Audit, Auditor

from .recipes import write_recipe
from .records import check_trained, lines, summary
from .terminals import DEADLINE_S, Terminal, Terminals
from .watching import watching

pytestmark = pytest.mark.slow

RUN, STEPS, EVERY, PROMPTS = "evaluated", 9, 3, 24
SLOWLY = '''"""The share of sevens and nines, found slowly, so that evaluations last for a while."""

import time


def compute_score(data_source, solution_str, ground_truth, extra_info):
    time.sleep(0.05)
    return sum(solution_str.count(digit) for digit in "79") / 16
'''


def test_a_worker_that_dies_evaluating_only_delays_it(terminals: Terminals, url: str) -> None:
    recipe, run = recipe_of(terminals, keep=100), terminals.root / "learner" / "runs" / RUN
    victim, other = [terminals.open(name, "worker", "--broker", url, "--run", RUN) for name in ("victim", "other")]
    auditor = Auditor(url, RUN)
    with watching(url, RUN, terminals) as watch:
        learner = terminals.open("learner", "learner", recipe, "--broker", url, "--run", RUN)
        watch.until("both work", lambda status: sum(worker.submitted > 0 for worker in status.workers) == 2)
        killed_at = until_all_are_leased(auditor, terminals)
        victim.send(signal.SIGKILL)
        status = watch.until("the run is over", lambda status: status.state == "finished")
    learner.succeeds()
    other.succeeds()

    check_trained(run, steps=STEPS, trajectories_per_step=16, max_lag=2)
    admitted = status.queues.admitted
    assert sum(status.tallies.dispatched_by_prompt_length.values()) == admitted
    assert admitted - status.queues.open >= STEPS * 4
    assert max(status.tallies.dispatched_by_lag) <= 2
    assert auditor.look().evaluations == {}
    auditor.close()

    found = {line["step"]: line for line in lines(run / "evaluations.jsonl")}
    assert found.keys() >= {0, killed_at, STEPS}
    assert found.keys() | without_result(learner) == set(range(0, STEPS + 1, EVERY))
    assert "is skipped" not in learner.said
    assert found[killed_at]["known_at_step"] > killed_at
    assert summary(run)["eval_after"] == found[STEPS]["pass_rate"]
    for step in (killed_at, STEPS):
        assert measured_alone(terminals, recipe, run / "checkpoints" / "1" / f"step_{step}") == {
            name: found[step][name]
            for name in (
                "pass_rate",
                "pass_at_k",
                "reward",
                "reward_mean",
                "response_tokens_mean",
                "prompts",
                "samples",
            )
        }


def test_the_best_checkpoint_is_kept_over_a_killed_learner(terminals: Terminals, url: str) -> None:
    recipe = recipe_of(terminals, keep=1, best={})
    checkpoints = terminals.root / "learner" / "runs" / RUN / "checkpoints"
    workers = terminals.open("other", "workers", "--count", "2", "--broker", url, "--run", RUN)
    arguments = ("learner", recipe, "--broker", url, "--run", RUN)
    with watching(url, RUN, terminals) as watch:
        first = terminals.open("learner", *arguments)
        watch.until_durable(checkpoints / "1" / f"step_{EVERY}")
        watch.until_step(EVERY + 1)
        first.send(signal.SIGKILL)
        assert first.wait() == -signal.SIGKILL
        second = terminals.open("learner", *arguments, "--resume")
        watch.until("the run is over", lambda status: status.state == "finished")
    second.succeeds()
    workers.succeeds()

    run = checkpoints.parent
    check_trained(run, steps=STEPS, trajectories_per_step=16, max_lag=2)
    rates = {event.step: event.pass_rate for event in record.lineage(evaluations_of(run)) if event.step}
    # The one of step 3 may have been under way when the learner was killed; steps that are replayed are not evaluated.
    assert set(rates) | {EVERY} | without_result(second) == set(range(EVERY, STEPS + 1, EVERY))
    best = read_best(checkpoints)
    assert best is not None
    assert (best.step, best.value) == (max(rates, key=lambda step: rates[step]), max(rates.values()))
    assert summary(run)["best_step"] == best.step
    assert {path.name for path in checkpoints.glob("*/step_*")} == {f"step_{best.step}", f"step_{STEPS}"}
    assert measured_alone(terminals, recipe, checkpoints / "best")["pass_rate"] == best.value


def without_result(learner: Terminal) -> set[int]:
    """Return the steps whose weights no living worker ever held: on a busy machine broadcasts fail, and a worker then
    pulls the newest version. The learner says so of each."""
    said = re.findall(r"the evaluation of step (\d+) gives no result: 0 of \d+ samples were done", learner.said)
    return {int(step) for step in said}


def evaluations_of(run: Path) -> list[EvaluationEvent]:
    return record.read_lines(run / record.EVALUATIONS, EvaluationEvent)


def recipe_of(terminals: Terminals, **checkpoint: object) -> Path:
    for name in ("learner", "victim", "other", "alone"):
        (terminals.directory(name) / "slowly.py").write_text(SLOWLY)
    return write_recipe(
        terminals.directory("learner"),
        run={"name": RUN},
        rewards=[{"kind": "slowly:compute_score"}],
        learner={"steps": STEPS, "groups_per_step": 4, "group_size": 4},
        checkpoint={"every_steps": EVERY, **checkpoint},
        broker={"lease_ttl_s": 1.5},
        evaluation={
            "prompts": PROMPTS,
            "every_steps": EVERY,
            "where": "workers",
            "temperature": 0.0,
            "pass_reward": 0.1,
        },
    )


def until_all_are_leased(auditor: Auditor, terminals: Terminals) -> int:
    """Wait until two workers share the rest of an evaluation, and return its step."""
    deadline = time.monotonic() + DEADLINE_S
    while (step := shared_step(auditor.look())) is None:
        terminals.check()
        assert time.monotonic() < deadline, "no evaluation was ever shared"
        time.sleep(0.005)
    return step


def shared_step(audit: Audit) -> int | None:
    for version, evaluation in audit.evaluations.items():
        holders = {evaluation.fields[f"token:{i}"] for i, until in evaluation.left.items() if until}
        if int(version.split(".")[1]) > 0 and len(holders) >= 2 and all(evaluation.left.values()):
            return int(version.split(".")[1])
    return None


def measured_alone(terminals: Terminals, recipe: Path, checkpoint: Path) -> dict[str, float]:
    """Return the result of `headway eval` on a checkpoint."""
    alone = terminals.open(
        f"alone-{checkpoint.name}", "eval", recipe, "--checkpoint", checkpoint, "--json", **sees(terminals)
    )
    alone.succeeds()
    result: dict[str, float] = json.loads(alone.said.splitlines()[-1])
    return result


def sees(terminals: Terminals) -> dict[str, str]:
    return {"PYTHONPATH": f"{terminals.root / 'alone'}:{Path(__file__).parents[2]}"}
