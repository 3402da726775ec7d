"""The seconds to the first step: a run that is refused is told at once."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_a_refused_run_is_told_and_no_other_follows() -> None:
    command = [sys.executable, "-m", "benchmarks.first_step", "--recipe", "arithmetic.yaml", "learner.stepz=1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    (run,) = json.loads(done.stdout.splitlines()[-1])["runs"]
    assert "unknown key learner.stepz" in run["error"]
    assert "unknown key learner.stepz" in done.stderr.splitlines()[-1]
