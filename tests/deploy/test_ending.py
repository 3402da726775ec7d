"""Processes end cleanly: each test has a command act in a certain way and leave certain threads or processes behind."""

import subprocess
from pathlib import Path

import pytest

from .test_cli import run_main

COMMAND = """
def command(**_):
{body}
cli.cli.commands['doctor'].callback = command
"""


def ends(body: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run the command `body` in a process of its own, and return the ended process."""
    indented = "\n".join(f"    {line}" for line in body.splitlines())
    return run_main(COMMAND.format(body=indented) + "cli.main()", "doctor", cwd=cwd)


@pytest.mark.slow
def test_a_thread_that_comes_back_from_a_library_late_does_no_harm(tmp_path: Path) -> None:
    body = """\
import itertools, threading, time, torch
torch.set_num_threads(1)
ones = torch.ones(700, 700)
threading.Thread(target=lambda: any(torch.mm(ones, ones) is None for _ in itertools.count()), daemon=True).start()
time.sleep(0.2)
return 7"""
    answer = ends(body, tmp_path)
    assert (answer.returncode, answer.stderr) == (7, "")


@pytest.mark.slow
def test_a_thread_of_a_group_that_lets_go_of_a_tensor_late_does_no_harm(tmp_path: Path) -> None:
    """The threads are gloo's: its many operations are still under way when the process ends."""
    body = """\
import torch, torch.distributed as dist
dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)
for _ in range(2000):
    dist.all_reduce(torch.ones(1), async_op=True)"""
    for _ in range(3):
        answer = ends(body, tmp_path)
        assert (answer.returncode, answer.stderr) == (0, "")


def test_all_that_is_due_at_exit_is_done_first(tmp_path: Path) -> None:
    body = """\
import atexit, concurrent.futures, tempfile, threading, time
print('said')
atexit.register(print, 'asked for')
pool = concurrent.futures.ThreadPoolExecutor(1)
pool.submit(lambda: (time.sleep(0.2), print('submitted')))
threading.Thread(target=lambda: (time.sleep(0.4), print('begun'))).start()
cli.kept = tempfile.TemporaryDirectory(dir='.')
raise cli.HeadwayError('no luck today.')"""
    answer = ends(body, tmp_path)
    assert answer.stdout.splitlines() == ["said", "submitted", "begun", "asked for"]
    assert (answer.returncode, answer.stderr) == (1, "Error: no luck today.\n")
    assert list(tmp_path.iterdir()) == []


def test_words_that_could_not_be_written_are_an_error(tmp_path: Path) -> None:
    answer = ends("import sys; sys.stdout = open('/dev/full', 'w'); print('lost')", tmp_path)
    assert answer.returncode == 120
    assert "No space left on device" in answer.stderr
