"""`make test-quick` runs the files that `quick.txt` names."""

from pathlib import Path

TESTS = Path(__file__).parent
ROOMS = {"algorithms", "broker", "deploy", "learner", "rollout_workers", "weightsync"}


def test_every_room_has_files_among_the_quick_tests() -> None:
    named = [Path(line) for line in (TESTS / "quick.txt").read_text().splitlines()]
    assert named == sorted(set(named))
    assert all((TESTS.parent / path).is_file() for path in named)
    assert {path.parts[1] for path in named} >= ROOMS
