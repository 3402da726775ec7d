"""`headway run` warms a model up and trains it, through a killed worker, Ctrl-C and --resume; then all over again."""

import json
import os
import signal
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

import psutil
import pytest

from headway.broker.schema.status import RunStatus
from headway.deploy.recipe.resolve import load_recipe
from tests.processes import children_left

from .recipes import DENSE, write_recipe
from .records import Line, check_trained, lineage, lines, summary
from .terminals import Terminal, Terminals, paused
from .watching import attached

STEPS, GROUPS, SAMPLES = 24, 16, 8
CHAINS = {"min_operations": 1, "max_operations": 1}
CARELESS = {"error_rate": 0.4, "skip_rate": 0.5}


@pytest.fixture(scope="module")
def terminals(tmp_path_factory: pytest.TempPathFactory, machine: dict[str, str]) -> Iterator[Terminals]:
    """Yield one set of terminals for all tests of this file, which look at the same run as it goes on."""
    opened = Terminals(tmp_path_factory.mktemp("run"), machine)
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def recipe(terminals: Terminals) -> Path:
    """Write a recipe with one operation, which a dense layer learns in seconds, and then learns to be careless."""
    random = DENSE["random"]
    sizes = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 128, "num_hidden_layers": 1}
    config = {**random["config"], **sizes, "initializer_range": 0.05}
    phase = {"kind": "arithmetic", "batch_size": 64}
    return write_recipe(
        terminals.directory("run"),
        model={"random": {**random, "config": config}},
        prompts={"options": CHAINS},
        rewards=[{"kind": "arithmetic"}],
        sft={
            "phases": [
                {**phase, "options": CHAINS, "learning_rate": 1e-2, "max_steps": 150},
                {**phase, "options": {**CHAINS, **CARELESS}, "learning_rate": 2e-3, "max_steps": 40},
            ]
        },
        learner={"steps": STEPS, "groups_per_step": GROUPS, "group_size": SAMPLES, "micro_batch_tokens": 4096},
        optimizer={"learning_rate": 2e-3},
        engine={"max_concurrent": 32},
        checkpoint={"every_steps": 10},
        evaluation={"prompts": 64},
    )


@pytest.fixture(scope="module")
def run(terminals: Terminals) -> Path:
    return terminals.root / "run" / "runs" / "tiny"


@pytest.fixture(scope="module")
def interrupted(terminals: Terminals, recipe: Path, run: Path) -> Line:
    """Return summary.json of a run that lost a worker and was then stopped by Ctrl-C."""
    headway = terminals.open("run", "run", recipe)
    with attached(terminals, headway, run) as watch:
        victim = watch.until_step(1).workers[0].pid
        with paused(learner_below(headway)):
            os.kill(victim, signal.SIGKILL)
            watch.until("another worker is in its place", lambda status: is_replaced(status, victim))
        watch.until_step(3)
        headway.send(signal.SIGINT)
        assert headway.wait() == 128 + signal.SIGINT, headway.tail()
    return summary(run)


@pytest.fixture(scope="module")
def resumed(interrupted: Line, terminals: Terminals, recipe: Path, run: Path) -> Path:
    """Return the directory of the same run at its end."""
    terminals.open("run", "run", recipe, "--resume").succeeds()
    return run


def test_ctrl_c_drains_and_a_checkpoint_has_every_step(interrupted: Line, run: Path) -> None:
    steps = interrupted["steps"]
    assert 0 < steps < STEPS
    assert interrupted["worker_restarts"] == 1
    assert (run / "checkpoints" / "1" / f"step_{steps}" / "learner.json").exists()
    assert children_left() == []


def test_the_same_name_again_is_refused(interrupted: Line, terminals: Terminals, recipe: Path) -> None:
    again = terminals.open("again", "run", recipe, f"run.directory={terminals.root / 'run' / 'runs'}")
    assert again.wait() == 1
    assert "already holds a run. Go on with it (--resume), start it anew and lose what it holds" in again.said
    assert "(--overwrite), or choose another name (run.name=...)." in again.said
    assert "Traceback" not in again.said


def test_a_resumed_run_has_trained_every_step_once(resumed: Path) -> None:
    check_trained(resumed, steps=STEPS, trajectories_per_step=GROUPS * SAMPLES, max_lag=2)
    assert {line["incarnation"] for line in lines(resumed / "trained.jsonl")} == {1, 2}


def test_reward_and_pass_rate_rise(resumed: Path) -> None:
    rewards = [line["reward_mean"] for line in lineage(resumed / "metrics.jsonl")]
    assert fmean(rewards[-3:]) > fmean(rewards[:3]) + 0.15
    found = summary(resumed)
    assert found["reward_first"] == pytest.approx(fmean(rewards[:3]))
    assert found["reward_last"] == pytest.approx(fmean(rewards[-3:]))
    assert found["eval_after"] > found["eval_before"]


def test_a_killed_worker_left_no_directory(resumed: Path, terminals: Terminals) -> None:
    assert not list((terminals.root / "run" / "tmp").glob("headway-work*"))


def test_the_run_left_its_files(resumed: Path, recipe: Path) -> None:
    reloaded = load_recipe(resumed / "config.yaml")
    assert reloaded == load_recipe(recipe)
    assert (resumed / "plots" / "reward_lag.png").read_bytes().startswith(b"\x89PNG")
    assert {path.name for path in (resumed / "logs").iterdir()} == {"learner.log", "worker-0.log", "worker-1.log"}
    assert not (resumed / "broker.json").exists()
    look = json.loads((resumed / "last_look.json").read_text())
    assert (look["incarnation"], look["step"], len(look["workers"])) == (2, STEPS - 1, 2)
    trained, begun = (look["tallies"][f"{what}_by_prompt_length"] for what in ("trained", "dispatched"))
    assert sum(trained.values()) == STEPS * GROUPS
    assert all(begun[length] >= trained[length] for length in trained)
    finished, responses = look["tallies"]["finished_by_response_length"], Counter[str]()
    for line in lineage(resumed / "metrics.jsonl"):
        responses.update(line["response_length_histogram"])
    assert responses.total() == STEPS * GROUPS * SAMPLES
    assert all(finished[length] >= responses[length] for length in responses)


@pytest.mark.parametrize("where", [f"checkpoints/2/step_{STEPS}", "sft"])
def test_what_was_trained_is_a_model_like_any_other(resumed: Path, where: str) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(resumed / where)
    tokenizer = AutoTokenizer.from_pretrained(resumed / where)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers has opinions on how it is called
        inputs = tokenizer("^1+1=", return_tensors="pt")
        answer = model.generate(input_ids=inputs["input_ids"], max_new_tokens=10, do_sample=False)
    assert "#" in tokenizer.decode(answer[0])


def test_overwrite_starts_anew(resumed: Path, terminals: Terminals, recipe: Path) -> None:
    small = ("sft.phases=[]", "learner.steps=1", "evaluation.prompts=0", "workers.count=1")
    headway = terminals.open("run", "run", recipe, *small, "--overwrite", "--json")
    headway.succeeds()
    check_trained(resumed, steps=1, trajectories_per_step=GROUPS * SAMPLES, max_lag=2)
    assert not (resumed / "sft").exists()
    assert [path.name for path in (resumed / "checkpoints").glob("*/*")] == ["step_1"]
    assert json.loads(headway.said[headway.said.index("{\n") :]) == summary(resumed)


def is_replaced(status: RunStatus, victim: int) -> bool:
    return len([info for info in status.workers if info.pid != victim]) == 2


def learner_below(headway: Terminal) -> int:
    """Return the process id of the only child that runs as a learner."""
    [pid] = [child.pid for child in psutil.Process(headway.pid).children() if "learner" in child.cmdline()]
    return pid
