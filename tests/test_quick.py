"""`make test-quick` runs the files that `quick.txt` names."""

from pathlib import Path

TESTS = Path(__file__).parent
ROOMS = {"algorithms", "broker", "deploy", "learner", "rollout_workers", "weightsync"}
SEAMS = {
    "tests/deploy/sinks/test_contract.py",
    "tests/learner/test_prompts.py",
    "tests/learner/test_stage_contract.py",
    "tests/rollout_workers/test_asked_scorers.py",
    "tests/rollout_workers/test_engine_embedded.py",
    "tests/rollout_workers/test_episodes.py",
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
