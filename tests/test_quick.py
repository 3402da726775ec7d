"""`make test-quick` runs the files that `quick.txt` names; tests compute with one thread each."""

import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent
ROOMS = {"algorithms", "broker", "deploy", "learner", "rollout_workers", "weightsync"}
SEAMS = {
    "tests/deploy/sinks/test_contract.py",
    "tests/learner/test_prompts.py",
    "tests/learner/test_stage_contract.py",
    "tests/rollout_workers/test_scorer_client.py",
    "tests/rollout_workers/test_engine_embedded.py",
    "tests/rollout_workers/test_episodes.py",
    "tests/rollout_workers/test_scorer_engines.py",
    "tests/weightsync/test_transports.py",
}
"""A fast file of each seam; of a slower one `quick.txt` names a single test."""


def test_every_room_and_seam_has_files_among_the_quick_tests() -> None:
    named = (TESTS / "quick.txt").read_text().splitlines()
    files = {line.partition("::")[0] for line in named}
    assert named == sorted(set(named))
    assert all((TESTS.parent / path).is_file() for path in files)
    assert {Path(path).parts[1] for path in files} >= ROOMS
    assert files >= SEAMS


def test_torch_has_one_thread_in_tests_and_in_what_they_start() -> None:
    asked = [sys.executable, "-c", "import torch; print(torch.get_num_threads())"]
    assert subprocess.run(asked, capture_output=True, text=True, check=True).stdout == "1\n"
