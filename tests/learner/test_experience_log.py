"""The log on disk returns exactly the batches that were trained, or nothing."""

import logging
import shutil
from pathlib import Path

import pytest

from broker.schema import SCHEMA_VERSION, Group
from broker.wire import frames
from learner.experience.frames import GroupFrames
from learner.experience.log import ExperienceLog
from learner.experience.logged_batch import tids_of
from tests.learner.batches import batch, group
from tests.learner.full_disk import no_file_larger_than

PLENTY = 1 << 20


@pytest.fixture
def log(tmp_path: Path) -> ExperienceLog:
    """Return a log of three steps."""
    opened = ExperienceLog(tmp_path, PLENTY)
    for step in range(3):
        opened.record(step, batch(step))
    return opened


def check_same(found: list[Group] | None, expected: list[Group]) -> None:
    """Assert that the groups are equal to the last bit: their frames hold every number of them."""
    assert found is not None
    assert [GroupFrames.of(one) for one in found] == [GroupFrames.of(one) for one in expected]


def test_batches_come_back_in_order_and_to_the_last_bit(log: ExperienceLog, tmp_path: Path) -> None:
    again = ExperienceLog(tmp_path, PLENTY)
    assert again.steps == log.steps == [0, 1, 2]
    for step in range(3):
        check_same(again.read(step), batch(step))
        assert again.tids(step) == tids_of(batch(step))
    assert again.read(3) is None
    assert again.tids(3) == ()
    assert (again.held_until(0), again.held_until(2), again.held_until(5)) == (3, 3, 5)


def test_the_same_batch_again_changes_nothing_and_another_one_abandons_the_rest(
    log: ExperienceLog, tmp_path: Path
) -> None:
    before = {path.name: path.stat().st_ino for path in tmp_path.iterdir()}
    log.record(1, batch(1))
    assert {path.name: path.stat().st_ino for path in tmp_path.iterdir()} == before
    other = [group(2), group(3, samples=(0, 2), round_=1)]
    log.record(1, other)
    assert log.steps == [0, 1]
    check_same(log.read(1), other)
    log.drop_from(0)
    assert not list(tmp_path.iterdir())


def test_the_same_trajectories_with_another_content_are_another_batch(log: ExperienceLog) -> None:
    other = [group(2, step=1), *batch(1)[1:]]
    assert tids_of(other) == tids_of(batch(1))
    log.record(1, other)
    assert log.steps == [0, 1]
    check_same(log.read(1), other)


def damaged(content: bytes, how: str) -> bytes:
    match how:
        case "empty":
            return b""
        case "cut":
            return content[:-40]
        case "without checksum":
            return content[:-4]
        case "longer":
            return content + content
        case _:
            at = len(content) * int(how) // 100
            return content[:at] + bytes([content[at] ^ 16]) + content[at + 1 :]


@pytest.mark.parametrize("how", ["empty", "cut", "without checksum", "1", "25", "50", "75", "99"])
def test_a_damaged_file_counts_as_not_held_and_so_do_later_ones(
    how: str, log: ExperienceLog, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "step_1.zst"
    file.write_bytes(damaged(file.read_bytes(), how))
    with caplog.at_level(logging.WARNING):
        assert log.held_until(0) == 1
    assert f"{file} is damaged" in caplog.text
    assert ExperienceLog(tmp_path).read(1) is None
    check_same(log.read(2), batch(2))
    log.record(1, batch(1))  # the step is trained again
    check_same(log.read(1), batch(1))


def test_a_file_of_another_step_is_no_batch(log: ExperienceLog, tmp_path: Path) -> None:
    (tmp_path / "step_2.zst").replace(tmp_path / "step_1.zst")
    assert ExperienceLog(tmp_path).held_until(0) == 1


def test_batches_of_another_version_of_headway_are_not_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The log promises no batch that it cannot read."""
    opened = ExperienceLog(tmp_path, PLENTY)
    opened.record(0, batch(0))
    with monkeypatch.context() as before:
        before.setattr(frames, "SCHEMA_VERSION", SCHEMA_VERSION - 1)
        opened.record(1, batch(1))
    assert ExperienceLog(tmp_path, PLENTY).held_until(0) == 1
    assert f"schema {SCHEMA_VERSION - 1}, this is schema {SCHEMA_VERSION}" in caplog.text


def test_the_oldest_go_when_it_is_full(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ExperienceLog(tmp_path, PLENTY).record(0, batch(0))
    size = (tmp_path / "step_0.zst").stat().st_size
    needed_from = 0
    log = ExperienceLog(tmp_path, 3 * size + size // 2, lambda: needed_from)
    with caplog.at_level(logging.WARNING):
        needed_from = 2
        for step in range(1, 5):
            log.record(step, batch(step))
        assert log.steps == [2, 3, 4]
        assert not caplog.records
        for step in range(5, 8):
            log.record(step, batch(step))
    assert log.steps == [5, 6, 7]
    assert ["forgets step 2" in record.message for record in caplog.records] == [True]


def test_a_full_disk_costs_that_step_only(log: ExperienceLog, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), no_file_larger_than(100):
        log.record(3, batch(3))
        log.record(4, batch(4))
    assert len(caplog.records) == 1
    assert "step_3.zst could not be written" in caplog.text
    log.record(5, batch(5))
    assert log.steps == [0, 1, 2, 5]
    assert log.held_until(0) == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step_{step}.zst" for step in (0, 1, 2, 5)]


def test_a_run_that_was_removed_is_said_to_be_gone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "run").mkdir()
    log = ExperienceLog(tmp_path / "run" / "experience", PLENTY)
    log.record(0, batch(0))
    shutil.rmtree(tmp_path / "run")
    log.record(1, batch(1))
    assert f"{tmp_path / 'run' / 'experience'} is gone" in caplog.text
    assert "Make room" not in caplog.text
    assert not (tmp_path / "run").exists()


def test_switched_off_it_keeps_nothing_of_an_abandoned_branch(log: ExperienceLog, tmp_path: Path) -> None:
    off = ExperienceLog(tmp_path, 0)
    off.record(1, batch(7))
    assert off.steps == [0]


def test_no_flipped_bit_is_more_than_damage(log: ExperienceLog, tmp_path: Path) -> None:
    path = tmp_path / "step_0.zst"
    whole = path.read_bytes()
    for bit in range(0, 8 * len(whole), 3):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(bytes(flipped))
        opened = ExperienceLog(tmp_path, PLENTY)
        opened.tids(0)
        found = opened.read(0)
        assert found is None or tids_of(found) == tids_of(batch(0))


def test_what_is_no_batch_is_left_alone_and_what_a_crash_left_goes(tmp_path: Path) -> None:
    (tmp_path / "step_x.zst").touch()
    (tmp_path / ".step_7.zst.staged").touch()
    assert ExperienceLog(tmp_path, PLENTY).steps == []
    assert [path.name for path in tmp_path.iterdir()] == ["step_x.zst"]
