"""The commands that a dry run prints are a run when a user pastes them into shells."""

import json
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from .recipes import SEVENS, write_recipe
from .records import check_trained
from .terminals import DEADLINE_S, HEADWAY, Terminals, machine_of

pytestmark = pytest.mark.slow

STEPS = 2


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


def test_what_a_dry_run_prints_is_a_run_when_it_is_pasted(terminals: Terminals, machine: dict[str, str]) -> None:
    home = terminals.directory("run")
    (home / "tmp").mkdir()
    (home / "sevens.py").write_text(SEVENS)
    recipe = write_recipe(home, learner={"steps": STEPS}, workers={"count": 1})
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
