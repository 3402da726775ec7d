"""The example that `headway new flow` writes passes its tests and trains, in processes of its own."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from headway.algorithms.objectives import TokenObjective
from headway.deploy.cli.main import answer
from headway.deploy.flow.example.my_flow.objective import clipped
from headway.deploy.flow.example.my_flow.prompts import Sums
from headway.deploy.flow.example.my_flow.rewards import right
from headway.deploy.flow.example.my_flow.sink import Csv
from headway.deploy.flow.example.my_flow.stage import ShortestFirst
from headway.deploy.flow.interface import EXAMPLE, example_files
from headway.deploy.observe.sinks.base import MetricSink
from headway.learner.data.prompts.base import PromptSource
from headway.learner.stages.base import Stage
from headway.rollout_workers.rewards.base import RewardFunction

SHORT = ("learner.steps=2", "stages.ShortestFirst.options.steps=4", "learner.groups_per_step=4", "evaluation.prompts=0")


def test_the_types_of_the_example_are_those_of_the_interface() -> None:
    """The type checker makes this test's assertion."""
    source: PromptSource = Sums(path="", seed=0)
    reward: RewardFunction = right
    objective: TokenObjective = clipped
    stage: type[Stage] = ShortestFirst
    sink: MetricSink = Csv()
    assert all((source, reward, objective, stage, sink))


@pytest.mark.slow
def test_a_new_flow_passes_its_tests_and_trains(tmp_path: Path) -> None:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    flow = tmp_path / "flow"

    def start(*command: str, cwd: Path) -> "subprocess.Popen[str]":
        argv = [sys.executable, "-m", *command]
        return subprocess.Popen(
            argv, cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def finish(process: "subprocess.Popen[str]") -> None:
        said, _ = process.communicate(timeout=240)
        assert process.returncode == 0, said

    finish(start("headway", "new", "flow", "flow", cwd=tmp_path))
    tests = start("pytest", "-q", "-p", "no:cacheprovider", "flow", cwd=tmp_path)  # beside the run, to save time
    finish(start("headway", "run", "recipe.yaml", *SHORT, cwd=flow))
    finish(tests)
    rows = list(csv.reader((flow / "runs" / "my-flow" / "steps.csv").read_text().splitlines()))
    assert [row[0] for row in rows] == ["0", "1"]
    assert (flow / "runs" / "my-flow" / "stages" / "1-ShortestFirst" / "config.json").exists()


def test_the_files_are_those_of_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = tmp_path / "below" / "flow"
    assert not answer(["new", "flow", str(directory), "--json"])
    assert json.loads(capsys.readouterr().out) == {"directory": str(directory), "files": list(example_files())}
    written = {str(path.relative_to(directory)): path for path in directory.rglob("*") if path.is_file()}
    assert sorted(written) == sorted(example_files())
    assert all(path.read_bytes() == (EXAMPLE / name).read_bytes() for name, path in written.items())
    assert [path.name for path in directory.parent.iterdir()] == ["flow"]


def test_a_directory_that_exists_is_left_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for taken in (tmp_path / "empty", tmp_path / "file"):
        taken.mkdir() if taken.name == "empty" else taken.write_text("mine")
        assert answer(["new", "flow", str(taken)]) == 1
        assert " ".join(capsys.readouterr().err.split()).endswith("exists already. Name a directory that does not.")
    assert answer(["new", "flow", str(tmp_path / "file" / "flow")]) == 1
    assert "cannot be made: " in capsys.readouterr().err
    assert (tmp_path / "file").read_text() == "mine"
    assert not list((tmp_path / "empty").iterdir())
