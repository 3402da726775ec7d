"""The seconds to the first step: a run that is refused is told at once, and no caches of earlier runs are found."""

import json
import subprocess
import sys
from pathlib import Path

from benchmarks.first_step import new_caches

ROOT = Path(__file__).parents[1]


def test_a_refused_run_is_told_and_no_other_follows() -> None:
    command = [sys.executable, "-m", "benchmarks.first_step", "--recipe", "arithmetic.yaml", "learner.stepz=1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    (run,) = json.loads(done.stdout.splitlines()[-1])["runs"]
    assert "unknown key learner.stepz" in run["error"]
    assert "unknown key learner.stepz" in done.stderr.splitlines()[-1]


def test_a_command_that_is_given_again_finds_no_caches(tmp_path: Path) -> None:
    first, again = (new_caches(tmp_path / "caches") for _ in range(2))
    assert first.keys() == again.keys()
    assert not {*first.values()} & {*again.values()}
    assert all(Path(one).is_relative_to(tmp_path / "caches") for one in first.values())
    assert [*Path(again["XDG_CACHE_HOME"]).iterdir()] == []
