"""A user's own launcher starts a run's commands, and a user pastes them into shells."""

import json
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from .recipes import write_recipe
from .records import check_trained
from .terminals import DEADLINE_S, HEADWAY, Terminals, machine_of

pytestmark = pytest.mark.slow

STEPS = 2
NICE = """
import json
from dataclasses import replace
from headway.deploy.launch.base import Launcher
from headway.deploy.launch.local_launcher import LocalLauncher

class Nice(Launcher):
    def __init__(self, record):
        self._record = record
    def start(self, command):
        with open(self._record, "a") as record:
            print(json.dumps([command.name, command.argv, command.shown_variables()]), file=record)
        return LocalLauncher().start(replace(command, argv=("nice", "-n", "5", *command.argv)))
"""
REWARD = """
import os
import pathlib

def compute_score(data_source, solution_str, ground_truth, extra_info):
    pathlib.Path(__file__).with_name("niceness").write_text(str(os.nice(0)))
    return solution_str.count("7") / 16
"""


def dry_run(home: Path, recipe: Path, machine: dict[str, str]) -> list[dict[str, Any]]:
    """Return the commands that a dry run of this recipe prints."""
    answer = subprocess.run(
        [HEADWAY, "run", recipe, "--dry-run", "--json"],
        cwd=home,
        env={**machine_of(home), **machine},
        stdout=subprocess.PIPE,
        check=True,
    )
    commands: list[dict[str, Any]] = json.loads(answer.stdout)["commands"]
    return commands


def test_a_launcher_of_ones_own_is_given_what_a_dry_run_prints(terminals: Terminals, machine: dict[str, str]) -> None:
    home = terminals.directory("run")
    (home / "tmp").mkdir()
    (home / "my_launcher.py").write_text(NICE)
    (home / "my_rewards.py").write_text(REWARD)
    recipe = write_recipe(
        home,
        rewards=[{"kind": "my_rewards:compute_score"}],
        launcher={"kind": "my_launcher:Nice", "options": {"record": str(home / "started.jsonl")}},
        learner={"steps": STEPS},
        workers={"count": 1},
    )
    shown = dry_run(home, recipe, machine)
    assert not (home / "started.jsonl").exists()
    assert not (home / "runs").exists()
    terminals.open("run", "run", recipe).succeeds()
    check_trained(home / "runs" / "tiny", steps=STEPS, trajectories_per_step=16, max_lag=2)
    started = [json.loads(line) for line in (home / "started.jsonl").read_text().splitlines()]
    once = {name: [argv, environment] for name, argv, environment in started}  # a worker may be started again
    expected = {command["name"]: [command["argv"], command["environment"]] for command in shown}
    for name in ("prepare", "server"):  # `headway run` does this in its own process
        del expected[name]
    assert list(once.items()) == list(expected.items())
    assert (home / "niceness").read_text() == "5"


def test_what_a_dry_run_prints_is_a_run_when_it_is_pasted(terminals: Terminals, machine: dict[str, str]) -> None:
    home = terminals.directory("run")
    (home / "tmp").mkdir()
    (home / "my_rewards.py").write_text(REWARD)
    recipe = write_recipe(
        home, rewards=[{"kind": "my_rewards:compute_score"}], learner={"steps": STEPS}, workers={"count": 1}
    )
    lines = {command["name"]: command["line"] for command in dry_run(home, recipe, machine)}
    assert list(lines) == ["prepare", "server", "learner", "worker-0"]
    environment = {**machine_of(home), **machine}
    subprocess.run(["sh", "-c", lines["prepare"]], env=environment, check=True)
    with pasted(lines["server"], environment) as server:
        assert server.stdout is not None
        assert server.stdout.readline().startswith("Serving unix://")
        with pasted(lines["learner"], environment) as learner, pasted(lines["worker-0"], environment) as worker:
            assert learner.wait(DEADLINE_S) == 0
            assert worker.wait(DEADLINE_S) == 0
    check_trained(home / "runs" / "tiny", steps=STEPS, trajectories_per_step=16, max_lag=2)


@contextmanager
def pasted(line: str, environment: Mapping[str, str]) -> Iterator["subprocess.Popen[str]"]:
    """Yield a shell that runs the line, until the end of the block."""
    log = subprocess.PIPE if " broker " in line else None
    with subprocess.Popen(["sh", "-c", line], env=environment, stdout=log, text=True, start_new_session=True) as shell:
        try:
            yield shell
        finally:
            with suppress(ProcessLookupError):
                os.killpg(shell.pid, signal.SIGTERM)
