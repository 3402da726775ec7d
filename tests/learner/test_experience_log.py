"""The log on disk returns exactly the batches that were trained, or nothing."""

import logging
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import headway.learner.experience.log as log_module
from headway.broker.schema import SCHEMA_VERSION, Group
from headway.broker.wire import codec
from headway.learner.experience.log import ExperienceLog
from headway.learner.experience.log_files import HEADER_BYTES, GroupFrames, segments_in, tids_of
from tests.learner.batches import batch, change, group, place_of
from tests.learner.full_disk import no_file_larger_than

PLENTY = 1 << 20
ROOT = Path(__file__).parents[2]


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
    before = contents(tmp_path)
    log.record(1, batch(1))
    assert contents(tmp_path) == before
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
    """Flip a bit behind so many hundredths."""
    at = len(content) * int(how) // 100
    return content[:at] + bytes([content[at] ^ 16]) + content[at + 1 :]


def contents(directory: Path) -> dict[str, bytes]:
    """Return what all files hold, by name."""
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def older(directory: Path) -> None:
    """Give a log the form of older versions, one file a step."""
    for segment in segments_in(directory):
        for step, place in segment.places.items():
            content = place.path.read_bytes()[place.start : place.start + place.length]
            (directory / f"step_{step}.zst").write_bytes(content)
        segment.path.unlink()


@pytest.mark.parametrize("how", ["1", "25", "50", "75", "99"])
def test_a_damaged_batch_counts_as_not_held_and_so_do_later_ones(
    how: str, log: ExperienceLog, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = change(tmp_path, 1, lambda content: damaged(content, how))
    with caplog.at_level(logging.WARNING):
        assert log.held_until(0) == 1
    assert f"{file}: the batch of step 1 is damaged" in caplog.text
    assert ExperienceLog(tmp_path).read(1) is None
    check_same(log.read(2), batch(2))
    log.record(1, batch(1))  # the step is trained again
    check_same(log.read(1), batch(1))


def test_a_file_of_another_step_is_no_batch(log: ExperienceLog, tmp_path: Path) -> None:
    older(tmp_path)
    (tmp_path / "step_2.zst").replace(tmp_path / "step_1.zst")
    assert ExperienceLog(tmp_path).held_until(0) == 1


@pytest.mark.parametrize("how", ["empty", "cut", "without checksum", "longer"])
def test_a_file_of_one_step_that_is_not_whole_counts_as_not_held(how: str, log: ExperienceLog, tmp_path: Path) -> None:
    older(tmp_path)
    file = tmp_path / "step_1.zst"
    whole = file.read_bytes()
    file.write_bytes({"empty": b"", "cut": whole[:-40], "without checksum": whole[:-4], "longer": whole * 2}[how])
    opened = ExperienceLog(tmp_path, PLENTY)
    assert opened.held_until(0) == 1
    check_same(opened.read(2), batch(2))


def test_a_log_of_one_file_a_step_goes_on_in_segments(log: ExperienceLog, tmp_path: Path) -> None:
    older(tmp_path)
    opened = ExperienceLog(tmp_path, PLENTY)
    for step in (3, 4):
        opened.record(step, batch(step))
    assert sorted(contents(tmp_path)) == ["step_0.zst", "step_1.zst", "step_2.zst", "steps_3.log"]
    again = ExperienceLog(tmp_path, PLENTY)
    assert again.held_until(0) == 5
    for step in range(5):
        check_same(again.read(step), batch(step))
    again.record(1, batch(7))  # another branch
    assert again.steps == ExperienceLog(tmp_path).steps == [0, 1]
    assert sorted(contents(tmp_path)) == ["step_0.zst", "steps_1.log"]


def test_many_steps_lie_in_one_file_up_to_its_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_module, "SEGMENT_BYTES", 5000)
    log = ExperienceLog(tmp_path, PLENTY)
    for step in range(40):
        log.record(step, batch(step))
    files = {int(name[6:-4]): len(content) for name, content in contents(tmp_path).items()}
    assert 3 < len(files) < 14
    *full, _ = (files[first] for first in sorted(files))
    assert all(5000 <= size < 10_000 for size in full)
    again = ExperienceLog(tmp_path, PLENTY)
    assert again.held_until(0) == 40
    first = sorted(files)[2]
    again.drop_from(first + 1)  # within a file
    assert again.steps == ExperienceLog(tmp_path).steps == list(range(first + 1))
    assert sorted(int(name[6:-4]) for name in contents(tmp_path)) == sorted(files)[:3]
    again.record(first + 1, batch(99))
    check_same(ExperienceLog(tmp_path).read(first + 1), batch(99))


@pytest.mark.parametrize("left", [1, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 9, -4, -1])
def test_a_torn_last_record_is_cut_off_by_who_appends(left: int, log: ExperienceLog, tmp_path: Path) -> None:
    """Whatever a crash left of it; before that a reader passes it over, and changes nothing."""
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    start = place_of(tmp_path, 2).start - HEADER_BYTES
    path.write_bytes(whole[:start] + whole[start:][:left])
    torn = path.read_bytes()
    opened = ExperienceLog(tmp_path, PLENTY)
    assert (opened.steps, opened.held_until(0), path.read_bytes()) == ([0, 1], 2, torn)
    opened.record(2, batch(2))
    assert path.read_bytes() == whole


@pytest.mark.parametrize("at", [0, 4, 12, 20])
def test_a_damaged_header_costs_its_own_step_alone(at: int, log: ExperienceLog, tmp_path: Path) -> None:
    start = place_of(tmp_path, 1).start - HEADER_BYTES
    (path,) = tmp_path.iterdir()
    content = path.read_bytes()
    path.write_bytes(content[: start + at] + bytes([content[start + at] ^ 1]) + content[start + at + 1 :])
    opened = ExperienceLog(tmp_path, PLENTY)
    assert (opened.steps, opened.held_until(0)) == ([0, 2], 1)
    check_same(opened.read(2), batch(2))
    opened.record(3, batch(3))
    check_same(ExperienceLog(tmp_path).read(2), batch(2))


@pytest.mark.slow
def test_a_learner_that_is_killed_while_it_logs_leaves_every_step_before(tmp_path: Path) -> None:
    """A process that was killed at any point of its writes is followed by one that goes on."""
    for _ in range(4):
        child = subprocess.Popen(
            [sys.executable, "-c", ENDLESS, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True
        )
        assert child.stdout is not None
        told = [int(line) for line, _ in zip(child.stdout, range(5), strict=False)]
        child.kill()
        child.wait()
        told += map(int, child.stdout.read().split("\n")[:-1])
        child.stdout.close()
        opened = ExperienceLog(tmp_path, PLENTY)
        assert opened.held_until(0) > max(told)
    for step in opened.steps:
        check_same(opened.read(step), batch(step % 50))


ENDLESS = """
import sys
from pathlib import Path
from headway.learner.experience.log import ExperienceLog
from tests.learner.batches import batch
log = ExperienceLog(Path(sys.argv[1]), 1 << 30)
step = len(log.steps)
while True:
    log.record(step, batch(step % 50))
    print(step, flush=True)
    step += 1
"""


def test_batches_of_another_version_of_headway_are_not_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The log promises no batch that it cannot read."""
    opened = ExperienceLog(tmp_path, PLENTY)
    opened.record(0, batch(0))
    with monkeypatch.context() as before:
        before.setattr(codec, "SCHEMA_VERSION", SCHEMA_VERSION - 1)
        opened.record(1, batch(1))
    assert ExperienceLog(tmp_path, PLENTY).held_until(0) == 1
    assert f"schema {SCHEMA_VERSION - 1}, this is schema {SCHEMA_VERSION}" in caplog.text


def test_the_oldest_go_when_it_is_full(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ExperienceLog(tmp_path, PLENTY).record(0, batch(0))
    size = (tmp_path / "steps_0.log").stat().st_size
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
    assert f"step 3 could not be written into {tmp_path}" in caplog.text
    log.record(5, batch(5))
    assert log.steps == [0, 1, 2, 5]
    assert log.held_until(0) == 3
    assert [path.name for path in tmp_path.iterdir()] == ["steps_0.log"]


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
    log.drop_from(1)
    (path,) = tmp_path.iterdir()
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
