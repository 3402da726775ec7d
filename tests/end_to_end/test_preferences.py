"""Supervised training, then preference optimization, on pairs of a file with a kill, and on pairs of live samples.

Distillation follows, in which the resulting model teaches the one from which it started.
"""

import json
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headway.learner.data.records.loading import arithmetic_pairs

from .terminals import DEADLINE_S, Terminal, Terminals

pytestmark = pytest.mark.slow

PAIRS = "stages.dpo.options.data={path: pairs.jsonl}"
STEPS = 60
ONLINE_STEPS = 12
TAUGHT_STEPS = 60
"""The student is level with its teacher from 40 steps on; at 20 it is still on its way."""
SAMPLES = 32 * 8
"""The number of samples of a step of online-dpo.yaml."""


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory, machine: dict[str, str]) -> Iterator[Path]:
    """Yield the directory of a run whose warm-up is done; it takes nearly all of the time."""
    opened = Terminals(tmp_path_factory.mktemp("warm"), machine)
    directory = opened.directory("warm")
    _write_pairs(directory / "pairs.jsonl")
    opened.open("warm", "run", "dpo.yaml", PAIRS, "--until", "sft").succeeds()
    yield directory
    opened.close()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, machine: dict[str, str], warm: Path) -> Iterator[Path]:
    """Yield the directory of that run once its pairs are trained, too."""
    opened = Terminals(tmp_path_factory.mktemp("whole"), machine)
    directory = opened.directory("whole")
    shutil.copytree(warm, directory, dirs_exist_ok=True)
    opened.open("whole", "run", "dpo.yaml", PAIRS, "--from", "dpo").succeeds()
    yield directory
    opened.close()


def test_preferences_raise_the_pass_rate_and_a_killed_stage_leaves_the_same_model(
    terminals: Terminals, warm: Path, whole: Path
) -> None:
    killed, tuned = terminals.directory("killed"), _tuned(whole)
    shutil.copytree(warm, killed, dirs_exist_ok=True)
    rates = [_pass_rate(path) for path in (_model(warm) / "sft.json", tuned / "stage.json")]
    assert rates[1] >= rates[0] + 0.3, rates

    first = terminals.open("killed", "run", "dpo.yaml", PAIRS, "--resume")
    again = killed / "runs" / "dpo" / "stages" / "2-dpo"
    record = again.with_name("2-dpo.metrics.jsonl")
    _until_lines(first, record, 25)
    first.send(signal.SIGKILL)
    first.wait()
    assert not again.exists()
    terminals.open("killed", "run", "dpo.yaml", PAIRS, "--resume").succeeds()
    model = "model.safetensors"
    assert (again / model).read_bytes() == (tuned / model).read_bytes()
    steps = [json.loads(line) for line in record.read_text().splitlines()]
    assert [line["steps"] for line in steps] == list(range(1, STEPS + 1))
    assert steps == [json.loads(line) for line in tuned.with_name(record.name).read_text().splitlines()]
    assert steps[-1]["metrics"]["held_out/reward_accuracy"] > 0.9


def test_the_best_and_the_worst_sample_of_each_group_raise_the_pass_rate(terminals: Terminals, warm: Path) -> None:
    """The run has the shipped recipe's rl stage, from the same warm-up."""
    options = (f"model.path={_model(warm)}", "stages=[{kind: rl}]", f"learner.steps={ONLINE_STEPS}")
    terminals.open("online", "run", "online-dpo.yaml", *options).succeeds()
    run = terminals.directory("online") / "runs" / "online-dpo"
    summary = json.loads((run / "summary.json").read_text())
    # Three standard errors of the difference at 512 prompts: the end of so short a run swings, with the samples' age.
    assert summary["eval_after"] >= summary["eval_before"] + 0.1, summary
    assert (summary["trained_twice"], summary["max_lag_seen"] <= 2) == (0, True)
    steps, trained = _lines(run / "metrics.jsonl"), _lines(run / "trained.jsonl")
    assert len(steps) == len(trained) == ONLINE_STEPS
    for step, line in zip(steps, trained, strict=True):
        pairs = step["algorithm"]["pairs"]
        assert 0 < pairs == step["groups"] - step["algorithm"]["groups_without_pair"]
        assert len(line["tids"]) == step["trajectories"] == 2 * pairs == SAMPLES - step["untrained_trajectories"]
    assert max(step["lag_max"] for step in steps) > 0, "some samples are of older weights"
    assert {"1"} <= set().union(*(step["by_lag"] for step in steps))


def test_a_student_becomes_as_good_as_its_teacher_by_the_teachers_logprobs_of_its_own_answers(
    terminals: Terminals, warm: Path, whole: Path
) -> None:
    """The run has the shipped recipe's rl stage, in which no reward is trained; the tuned model is the teacher."""
    options = (f"model.path={_model(warm)}", "stages=[{kind: rl}]", f"teacher.path={_tuned(whole)}")
    terminals.open("taught", "run", "distill.yaml", *options, f"learner.steps={TAUGHT_STEPS}").succeeds()
    run = terminals.directory("taught") / "runs" / "distill"
    summary = json.loads((run / "summary.json").read_text())
    assert summary["eval_after"] >= summary["eval_before"] + 0.2, summary
    assert summary["eval_after"] >= _pass_rate(_tuned(whole) / "stage.json") - 0.08, summary
    assert (summary["trained_twice"], summary["max_lag_seen"] <= 2) == (0, True)
    steps = _lines(run / "metrics.jsonl")
    divergences = [step["algorithm"]["reverse_kl"] for step in steps]
    assert len(divergences) == TAUGHT_STEPS
    assert max(divergences[-4:]) < divergences[0] / 2, divergences
    # It names candidates, too: the same run trains on with samples that have them.
    names = ("algorithm.distillation={coefficient: 1, place: loss, top_k: 4}", f"learner.steps={TAUGHT_STEPS + 4}")
    anew = ("--resume", "--rewind-to", str(TAUGHT_STEPS), "--regenerate")
    terminals.open("taught", "run", "distill.yaml", *anew, *options, *names).succeeds()
    steps = _lines(run / "metrics.jsonl")
    named = [step["algorithm"] for step in steps[TAUGHT_STEPS:]]
    assert len(named) == 4
    assert all(0 < one["top_k_reverse_kl"] < 1 and one["top_k_teacher_rest"] < 0.2 for one in named), named
    for step in steps:
        of_tokens = sum(lag["tokens"] * lag["reverse_kl"] for lag in step["by_lag"].values())
        assert of_tokens == pytest.approx(step["trained_tokens"] * step["algorithm"]["reverse_kl"], rel=1e-3, abs=1e-3)


def _tuned(directory: Path) -> Path:
    """Return the model that was trained on the pairs."""
    return directory / "runs" / "dpo" / "stages" / "2-dpo"


def _pass_rate(path: Path) -> float:
    """Return the pass rate in a stage's mark."""
    return float(json.loads(path.read_text())["pass_rate"])


def _model(directory: Path) -> Path:
    """Return the warm-up's model."""
    return directory / "runs" / "dpo" / "sft"


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _write_pairs(path: Path) -> None:
    """Write right and careless chains, of no held-out prompt, in TRL's format."""
    pairs = arithmetic_pairs({"records": 4096}, seed=1, where="pairs")
    rows = [{"prompt": pair.prompt, "chosen": pair.chosen, "rejected": pair.rejected} for pair in pairs]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def _until_lines(terminal: Terminal, path: Path, count: int) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not path.exists() or len(path.read_text().splitlines()) < count:
        assert terminal.exit_code() is None, terminal.tail()
        assert time.monotonic() < deadline, terminal.tail()
        time.sleep(0.05)
