"""A run's files stay readable where the disk is full, the directory is gone, or a line is torn."""

import errno
import os
import shutil
import sys
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from headway.broker.errors import BUG_EXIT, HeadwayError
from headway.broker.schema.step_metrics import StepMetrics
from headway.deploy.cli import main
from headway.deploy.launch.base import Command
from headway.deploy.launch.local_launcher import Child
from headway.deploy.launch.local_run import LocalRun
from headway.deploy.launch.supervisor import RoleFailedError, Supervisor
from headway.deploy.observe.sinks.jsonl import JsonlSink
from headway.deploy.recipe.resolve import load_recipe
from headway.deploy.run.record import (
    METRICS,
    SUMMARY,
    TRAINED,
    TrainedLine,
    read_lines,
    read_summary,
    summarize,
)
from headway.deploy.run.run_directory import CONFIG, INCARNATION, prepare, write_incarnation
from headway.deploy.run.stage_output import is_complete, mark_complete
from headway.deploy.terminal import Terminal
from tests.full_disk import small_disk

from .runs import open_record, step_event

DISK_BYTES = 24 << 10
TIDS = [f"0000-{number:08d}:0:0" for number in range(100)]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", DISK_BYTES) as directory:
        yield directory


def fill(path: Path) -> None:
    """Fill the disk until it takes no more bytes."""
    with path.open("ab", buffering=0) as file:
        try:
            while True:
                file.write(b"x" * 512)
        except OSError:
            return


def write_until_full(record: JsonlSink) -> int:
    """Return the number of steps that were written before the error."""
    written = count()
    with pytest.raises(HeadwayError, match=r"jsonl.*Make room"):  # noqa: PT012 - which step fails is the disk's affair
        while True:
            record.write(step_event(next(written), TIDS))
    return next(written) - 1


def test_a_file_is_durable_under_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[tuple[str, bool]] = []

    def note(descriptor: int) -> None:
        synced.append((os.readlink(f"/proc/self/fd/{descriptor}"), (tmp_path / INCARNATION).exists()))

    monkeypatch.setattr(os, "fsync", note)
    write_incarnation(tmp_path, 3)
    assert [is_there for _, is_there in synced] == [False, True]
    assert synced[-1][0] == str(tmp_path), "a name is the folder's"


def test_a_full_disk_leaves_whole_lines_and_an_error_that_says_so(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", DISK_BYTES) as disk:
        written = write_until_full(open_record(disk))
        assert len(read_lines(disk / METRICS, StepMetrics)) - written in (0, 1)
        assert (disk / METRICS).read_bytes().endswith(b"\n")
        assert [line.step for line in read_lines(disk / TRAINED, TrainedLine)] == list(range(written))
        assert (disk / TRAINED).read_bytes().endswith(b"\n")
        shutil.copytree(disk, roomy := tmp_path / "roomy")
    open_record(roomy).write(step_event(written, ["a:0:0"]))
    assert [line.step for line in read_lines(roomy / TRAINED, TrainedLine)] == list(range(written + 1))
    assert summarize(roomy)["trained_trajectories"] == written * len(TIDS) + 1


def test_a_summary_that_finds_no_room_leaves_the_one_before(disk: Path) -> None:
    open_record(disk).write(step_event(0))
    before = summarize(disk)
    fill(disk / "filler")
    with pytest.raises(HeadwayError, match=rf"(?s){SUMMARY}.*Make room"):
        summarize(disk, {"notes": "x" * DISK_BYTES})
    assert read_summary(disk) == before
    assert not list(disk.glob("*.part"))


def test_a_recipe_and_an_incarnation_that_find_no_room_leave_those_before(disk: Path) -> None:
    recipe = load_recipe("arithmetic.yaml", [f"run.directory={disk}", "run.name=mine"])
    directory = prepare(recipe, resume=False, overwrite=False)
    write_incarnation(directory, 1)
    before = (directory / CONFIG).read_text()
    fill(disk / "filler")
    long = load_recipe(directory / CONFIG, [f"prompts.path={'x' * DISK_BYTES}"])
    with pytest.raises(HeadwayError, match=r"(?s)config\.yaml.*Make room"):
        prepare(long, resume=True, overwrite=False)
    assert (directory / CONFIG).read_text() == before


def test_a_warm_up_that_finds_no_room_is_not_complete(disk: Path) -> None:
    recipe = load_recipe("arithmetic.yaml")
    fill(disk / "filler")
    with pytest.raises(HeadwayError, match=r"(?s)sft\.json.*Make room"):
        mark_complete(disk, recipe, {"notes": "x" * DISK_BYTES})
    assert not is_complete(disk)


def test_a_directory_that_was_removed_is_said_to_be_gone(tmp_path: Path) -> None:
    record = open_record(tmp_path / "run")
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(HeadwayError) as caught:
        record.write(step_event(0))
    assert f"{tmp_path / 'run'} is gone" in str(caught.value)
    assert "Make room" not in str(caught.value)


def test_lines_that_cannot_be_read_are_named_counted_and_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    record = open_record(tmp_path)
    record.write(step_event(0))
    with (tmp_path / METRICS).open("ab") as file:
        file.write(b'{"incarnation": 1, "ste{"incarnation": 1, "step": 1}\n\xff\xfe\x00\n')
    record.write(step_event(2))
    assert [step.step for step in read_lines(tmp_path / METRICS, StepMetrics)] == [0, 2]
    assert f"{tmp_path / METRICS}:2" in caplog.text
    assert f"{tmp_path / METRICS}:3" in caplog.text
    assert summarize(tmp_path)["unreadable_lines"] == 2


def test_a_file_that_is_a_directory_is_said(tmp_path: Path) -> None:
    (tmp_path / METRICS).mkdir()
    with pytest.raises(HeadwayError, match=METRICS):
        open_record(tmp_path)
    with pytest.raises(HeadwayError, match=METRICS):
        read_lines(tmp_path / METRICS, StepMetrics)


def test_a_summary_that_was_damaged_is_named(tmp_path: Path) -> None:
    (tmp_path / SUMMARY).write_bytes(b'{"steps": 1')
    with pytest.raises(HeadwayError, match=rf"{SUMMARY} is damaged"):
        read_summary(tmp_path)


def test_a_role_whose_log_was_removed_is_said_to_have_lost_its_directory(tmp_path: Path) -> None:
    child = Child(Command(name="learner", argv=(sys.executable, "-c", ""), log=tmp_path / "logs" / "learner.log"))
    shutil.rmtree(tmp_path / "logs")
    child.kill()
    assert child.last_words().startswith(f"{tmp_path / 'logs'} is gone: it was removed")


@pytest.mark.parametrize(
    ("raised", "words"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "x.pt"), "Make room, then go on with --resume: x.pt:"),
        (OSError(errno.EDQUOT, "Disk quota exceeded", "x.pt"), "Make room, then go on with --resume: x.pt:"),
        (RuntimeError("I/O error: No space left on device (os error 28)"), "Make room, then go on with --resume"),
        (PermissionError(errno.EACCES, "Permission denied", "runs/x"), "runs/x: Permission denied. Give this user"),
        (OSError(errno.EROFS, "Read-only file system", "runs/x"), "runs/x: Read-only file system. It is mounted read"),
        (OSError(errno.EMFILE, "Too many open files", "a"), "a: Too many open files. Raise this process's limit"),
        (OSError(errno.EADDRINUSE, "Address already in use"), "Address already in use. Another process has this port"),
        (ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"), "Connection refused. Nothing listens there"),
        (ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"), "Connection reset by peer. The other"),
    ],
)
@pytest.mark.parametrize("is_cause", [False, True])
def test_a_fault_of_the_system_is_told_with_what_helps_and_is_no_bug(
    raised: Exception, words: str, is_cause: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*arguments: object, **options: object) -> int:
        if is_cause:
            raise RuntimeError("of a library") from raised
        raise raised

    monkeypatch.setattr(main.cli, "main", fail)
    assert main.answer(["status"]) == 1
    assert capsys.readouterr().err.startswith(f"Error: {words}")


def test_an_error_that_no_fault_of_the_system_caused_is_a_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object, **options: object) -> int:
        raise KeyError("x") from OSError(errno.ENOENT, "No such file or directory", "x")

    monkeypatch.setattr(main.cli, "main", fail)
    assert main.answer(["status"]) == BUG_EXIT


@pytest.mark.parametrize(
    ("script", "needs_room", "words"),
    [
        ("open('/dev/full', 'w').write('x' * 9000)", True, "OSError: [Errno 28] No space left on device"),
        ("print('Error: a.pt could not be written: Disk quota exceeded.', flush=True); exit(1)", True, "a.pt could"),
        ("open('/nowhere/x')", False, "FileNotFoundError: [Errno 2] No such file or directory: '/nowhere/x'"),
        ("raise ValueError('one\\n  two')", False, "ValueError: one"),
    ],
)
def test_the_error_of_a_run_says_what_helps_first_then_the_command_and_no_traceback(
    script: str, needs_room: bool, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = load_recipe("arithmetic.yaml", ["run.name=mine"])
    local = LocalRun(recipe, "arithmetic.yaml", (), console=Terminal())
    command = Command(name="learner", argv=(sys.executable, "-c", script), log=tmp_path / "learner.log")
    with pytest.raises(RoleFailedError) as caught, local._adding_remedy(tmp_path / "runs" / "mine"):
        Supervisor((), command, say=print).run()
    told = str(caught.value)
    assert words in told
    assert "Traceback" not in told
    assert "File " not in told
    resumes = "run runs/mine/config.yaml --resume"
    assert resumes in told
    assert told.startswith("Make room on the disk of runs/mine") == needs_room
    assert (told.index(resumes) < told.index("learner exited")) == needs_room


def test_who_ends_without_room_for_a_word_is_said_to_have_had_none(disk: Path) -> None:
    if not disk.is_mount():
        pytest.skip("a limit of our own fills no disk")
    script = f"""
file = open({str(disk / "filler")!r}, "ab", buffering=0)
try:
    while True:
        file.write(bytes(512))
except OSError:
    print("Error: " + "x" * 9000)
"""
    child = Child(Command(name="learner", argv=(sys.executable, "-c", script), log=disk / "learner.log"))
    while child.exit_code() is None:
        time.sleep(0.01)
    assert "The disk of its log is full. Make room." in child.last_words()
