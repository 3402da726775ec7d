"""The best checkpoint stays, is found again, and is the best of this run's own branch."""

import logging
import math
import shutil
from pathlib import Path

import pytest

from headway.learner.checkpoint import Best, BestCheckpoint, CheckpointStore, LearnerState, read_best, seal

RATE = "evaluation/pass_rate"


class Run:
    """A learner's checkpoints, of which it keeps the newest one and the best."""

    def __init__(self, root: Path, metric: str = RATE, mode: str = "max") -> None:
        self.root = root
        self.best = Best(root, metric, mode)  # type: ignore[arg-type]
        self.store = CheckpointStore(root, keep=1, best=self.best)

    def save(self, step: int, incarnation: int = 1) -> None:
        """Make a checkpoint durable, which removes others."""
        path = self.store.path(incarnation, step)
        path.mkdir(parents=True)
        (path / "config.json").write_text("{}")
        seal(path, LearnerState(incarnation=incarnation, step=step))
        for retired in self.store.retired():
            shutil.rmtree(retired)

    def measure(self, step: int, value: float, metric: str = RATE) -> None:
        """End an evaluation."""
        self.best.note(step, {metric: value})
        self.store.choose_best()

    @property
    def kept(self) -> list[str]:
        return sorted(str(path.relative_to(self.root)) for path in self.root.glob("*/step_*"))

    @property
    def chosen(self) -> tuple[int, int, float] | None:
        """Return the best checkpoint of the record, after a check that the link agrees."""
        best = read_best(self.root)
        if best is None:
            assert not (self.root / "best").is_symlink()
            return None
        state = CheckpointStore(self.root, keep=1).path(best.incarnation, best.step)
        assert (self.root / "best").resolve() == state.resolve()
        assert (self.root / "best" / "config.json").exists()
        return best.incarnation, best.step, best.value


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path / "checkpoints")


def test_the_best_one_stays_beside_the_newest(run: Run) -> None:
    for step, value in ((10, 0.2), (20, 0.6), (30, 0.4), (40, 0.6)):
        run.save(step)
        run.measure(step, value)
    assert run.chosen == (1, 20, 0.6)  # the earliest of equal ones
    assert run.kept == ["1/step_20", "1/step_40"]
    run.save(50)
    run.measure(50, 0.7)
    run.save(60)
    assert run.chosen == (1, 50, 0.7)
    assert run.kept == ["1/step_50", "1/step_60"]


def test_the_smallest_may_be_the_best(tmp_path: Path) -> None:
    run = Run(tmp_path, "evaluation/response_tokens_mean", "min")
    for step, value in ((10, 7.0), (20, 5.0), (30, 6.0)):
        run.save(step)
        run.measure(step, value, run.best._metric)
    assert run.chosen == (1, 20, 5.0)


def test_a_result_may_come_before_its_checkpoint_is_durable(run: Run) -> None:
    run.save(10)
    run.measure(10, 0.3)
    run.measure(20, 0.8)
    assert run.chosen == (1, 10, 0.3)
    run.save(20)
    assert run.chosen == (1, 20, 0.8)
    assert run.kept == ["1/step_20"]


def test_a_checkpoint_stays_until_its_evaluation_is_over(run: Run) -> None:
    awaited = {10, 20}
    run.best.awaited = lambda: awaited
    for step in (10, 20, 30):
        run.save(step)
    assert run.kept == ["1/step_10", "1/step_20", "1/step_30"]
    run.measure(10, 0.9)
    awaited.clear()  # the evaluation of step 20 was skipped
    run.save(40)
    assert (run.chosen, run.kept) == ((1, 10, 0.9), ["1/step_10", "1/step_40"])


def test_it_is_found_after_a_restart(run: Run) -> None:
    run.save(10)
    run.measure(10, 0.9)
    again = Run(run.root)
    again.save(20, incarnation=2)
    again.measure(20, 0.5)
    again.save(30, incarnation=2)
    assert (again.chosen, again.kept) == ((1, 10, 0.9), ["1/step_10", "2/step_30"])


def test_the_checkpoint_from_which_a_run_went_on_is_measured_again(run: Run) -> None:
    """The evaluation belongs to the later incarnation, and the checkpoint to the earlier."""
    run.save(10)
    again = Run(run.root)
    again.measure(10, 0.9)
    assert again.chosen == (1, 10, 0.9)


def test_a_rewind_leaves_behind_what_came_later(run: Run) -> None:
    for step, value in ((10, 0.2), (20, 0.9)):
        run.save(step)
        run.measure(step, value)
    again = Run(run.root)
    again.save(15, incarnation=2)
    assert (again.chosen, again.kept) == (None, ["2/step_15"])
    again.measure(15, 0.1)
    assert again.chosen == (2, 15, 0.1)


def test_another_rule_begins_anew(run: Run) -> None:
    run.save(10)
    run.measure(10, 0.9)
    again = Run(run.root, mode="min")
    again.save(20)
    again.measure(20, 0.95)
    assert again.chosen == (1, 20, 0.95)


def test_what_is_no_number_is_never_the_best(run: Run) -> None:
    run.save(10)
    run.measure(10, math.nan)
    run.best.note(10, {})
    assert run.chosen is None


def test_a_damaged_record_is_said_and_made_anew(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    run.save(10)
    run.measure(10, 0.9)
    (run.root / "best.json").write_bytes(b"{")
    run.save(20)
    run.measure(20, 0.1)
    assert "cannot be read" in caplog.text
    assert run.chosen == (1, 20, 0.1)


def test_a_link_that_a_crash_left_behind_is_mended(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    run.save(10)
    run.measure(10, 0.9)
    (run.root / "best").unlink()
    (run.root / "best").symlink_to("1/step_7")
    with caplog.at_level(logging.INFO):
        Run(run.root).store.choose_best()
    assert run.chosen == (1, 10, 0.9)
    assert read_best(run.root) == BestCheckpoint(metric=RATE, mode="max", value=0.9, incarnation=1, step=10)


def test_without_a_rule_there_is_none(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    assert store.choose_best() == set()
    assert not (tmp_path / "best.json").exists()
