"""A run can go back to these places, by its checkpoints and its log."""

from pathlib import Path

import pytest

from headway.learner.checkpoint import CheckpointStore
from headway.learner.experience.log import ExperienceLog, Rewind, RewindError, check_rewind, find_rewind_checkpoint
from tests.learner.batches import batch, damage


@pytest.fixture
def checkpoints(tmp_path: Path) -> CheckpointStore:
    """Return checkpoints at steps 2, 4 and 6; incarnation 2 went back to 2 once, so that there was another step 4."""
    for incarnation, step in ((1, 2), (1, 4), (1, 5), (2, 2), (2, 4), (3, 6)):
        directory = tmp_path / "checkpoints" / f"{incarnation}" / f"step_{step}"
        directory.mkdir(parents=True)
        (directory / "learner.json").write_text(f'{{"incarnation": {incarnation}, "step": {step}}}')
        (directory / "files.json").write_text("{}")
    return CheckpointStore(tmp_path / "checkpoints", keep=9)


@pytest.fixture
def log(tmp_path: Path) -> ExperienceLog:
    """Return a log of all six steps."""
    opened = ExperienceLog(tmp_path / "experience", 1 << 20)
    for step in range(6):
        opened.record(step, batch(step))
    return opened


def test_it_goes_back_to_a_checkpoint_of_its_own_branch(checkpoints: CheckpointStore) -> None:
    assert find_rewind_checkpoint(checkpoints, Rewind(step=4)).state.incarnation == 2
    with pytest.raises(RewindError, match="no checkpoint at step 5 to rewind to: 2, 4, 6"):
        find_rewind_checkpoint(checkpoints, Rewind(step=5))


@pytest.mark.parametrize("step", [2, 4, 6])
def test_a_whole_log_lets_it_go_anywhere(step: int, checkpoints: CheckpointStore, log: ExperienceLog) -> None:
    check_rewind(checkpoints, log, Rewind(step=step))


def test_a_hole_in_the_log_is_refused_with_what_can_be_done(
    checkpoints: CheckpointStore, log: ExperienceLog, tmp_path: Path
) -> None:
    damage(tmp_path / "experience", 3)
    reason = "holds steps 2 to 2 only, .* Add --regenerate .* from which nothing is missing: 4, 6"
    with pytest.raises(RewindError, match=reason):
        check_rewind(checkpoints, log, Rewind(step=2))
    check_rewind(checkpoints, log, Rewind(step=2, regenerate=True))
    check_rewind(checkpoints, log, Rewind(step=4))


def test_where_the_log_has_nothing_at_all_everything_is_generated_anew(
    checkpoints: CheckpointStore, tmp_path: Path
) -> None:
    check_rewind(checkpoints, ExperienceLog(tmp_path / "experience"), Rewind(step=2))
