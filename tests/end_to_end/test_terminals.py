"""The terminals of these tests keep their promise: no process that a test has started outlives the tests' process."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

DEADLINE_S = 240.0
OPENS = """
import sys, time
from pathlib import Path
from tests.end_to_end.terminals import Terminals
broker = Terminals(Path(sys.argv[1]), {}).open("broker", "broker", "--port", "0")
while "HEADWAY_BROKER" not in broker.said:
    assert broker.exit_code() is None, broker.said
    time.sleep(0.05)
print(broker.pid, flush=True)
time.sleep(600)
"""


def test_what_a_test_has_started_ends_when_its_process_is_killed(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", OPENS, str(tmp_path)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]) as tests:
        assert tests.stdout is not None
        broker = psutil.Process(int(tests.stdout.readline()))
        started = [broker, *broker.children(recursive=True)]
        assert len(started) > 1  # the server is among them
        tests.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + DEADLINE_S
    while left := [one for one in started if _runs(one)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
