"""Jobs under torchrun, several in one start, as processes take longer to start than most jobs."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from .cases import Job, write_jobs
from .outcome import reports

POLL_S = 0.1
STOP_S = 20
WORDS = 3000
"""Characters that are kept of what a failed rank says."""


def launch(jobs: Sequence[Job]) -> Iterator[tuple[Job, str]]:
    """Every job, all of as many processes, with what went wrong in it, or ''; after a failure the others start anew."""
    waiting = list(jobs)
    for job in waiting:
        job.directory.mkdir(parents=True)
    while waiting:
        with _torchrun(waiting) as (process, errors):
            while waiting:
                has_ended = process.poll() is not None
                while waiting and reports(waiting[0]):
                    yield waiting.pop(0), ""
                if has_ended:
                    break
                time.sleep(POLL_S)
            words = _reason(waiting[0], errors) if waiting else ""
        if waiting:
            yield waiting.pop(0), words


@contextmanager
def _torchrun(jobs: Sequence[Job]) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """The launcher and the file of what its ranks say. Left early, it ends its ranks."""
    count = jobs[0].case.processes
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    with tempfile.TemporaryDirectory(prefix="headway-parity-") as directory:
        path, errors = Path(directory) / "jobs.json", Path(directory) / "stderr"
        write_jobs(jobs, path)
        with errors.open("wb") as stderr:
            process = subprocess.Popen(
                [*launcher, "-m", f"{__package__}.rank", str(path)],
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )
            try:
                yield process, errors
            finally:
                _end(process)


def _reason(job: Job, stderr: Path) -> str:
    """The traceback of the rank that failed first, as others fail of its end; of a rank that hung, where it stood."""
    tracebacks = sorted(job.directory.glob("rank_*.error"), key=lambda path: path.stat().st_mtime)
    return (tracebacks[0] if tracebacks else stderr).read_text(errors="replace").strip()[-WORDS:] or "no rank said why"


def _end(process: subprocess.Popen[bytes]) -> None:
    """What has done its jobs gets time to leave; torchrun passes a signal on to its ranks."""
    for stop in (process.terminate, process.kill):
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            stop()
    process.wait()
