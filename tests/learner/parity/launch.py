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
"""The number of characters that are kept of a failed rank's output."""


def launch(jobs: Sequence[Job]) -> Iterator[tuple[Job, str]]:
    """Yield each job with its error, or ''. All need equally many processes; after a failure the rest starts anew."""
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
    """Yield the launcher and the file of its ranks' output. When the caller leaves early, the ranks end."""
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
    """Return the traceback of the rank that failed first, because the others fail of its end, or of one that hung."""
    tracebacks = sorted(job.directory.glob("rank_*.error"), key=lambda path: path.stat().st_mtime)
    return (tracebacks[0] if tracebacks else stderr).read_text(errors="replace").strip()[-WORDS:] or "no rank said why"


def _end(process: subprocess.Popen[bytes]) -> None:
    """Give a process that has done its jobs time to leave, then stop it; torchrun passes a signal on to its ranks."""
    for stop in (process.terminate, process.kill):
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            stop()
    process.wait()
