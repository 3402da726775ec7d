"""Processes of benchmarks, none of which outlives its command: they would keep a GPU's memory.

python -m benchmarks.processes PACKAGE.MODULE:FUNCTION SPEC RESULT      one rank of `isolated`
"""

import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TextIO

import psutil

ROOT = Path(__file__).parents[1]
"""The project."""
GRACE_S = 10.0
"""Seconds between the request to end and the end."""
LOOK_S = 0.1
WATCH_S = 1.0
"""Seconds between looks at the processes that a command has started."""
KEPT_LINES = 25
"""The number of last lines of an error that are kept."""


class Group:
    """A command in a process group of its own, and the processes that it starts, until `end`.

    Ranks of torchrun lead groups of their own. Output and words on standard error go to files, or to standard error.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        directory: Path | None = None,
        *,
        output: TextIO | None = None,
        words: TextIO | None = None,
    ) -> None:
        self._process = subprocess.Popen(
            command, stdout=output or sys.stderr, stderr=words, env=environment, cwd=directory, process_group=0
        )
        self._children: list[psutil.Process] = []

    def poll(self, wait_s: float = 0.0) -> int | None:
        """Return the exit code of the command, or None if it has not ended within so many seconds.

        Whichever processes it has now are those that `end` ends besides.
        """
        with suppress(psutil.NoSuchProcess):
            self._children = psutil.Process(self._process.pid).children(recursive=True) or self._children
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(wait_s)
        return None

    def end(self) -> None:
        """End all of them, gently at first."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)
            deadline = time.monotonic() + GRACE_S
            while time.monotonic() < deadline:
                self._process.poll()
                os.killpg(self._process.pid, 0)  # raises once none of the group is left
                time.sleep(LOOK_S)
            os.killpg(self._process.pid, signal.SIGKILL)
        for child in self._children:
            with suppress(psutil.NoSuchProcess):
                child.kill()
        psutil.wait_procs(self._children, GRACE_S)


def finish_group(
    command: Sequence[str], timeout_s: float, environment: Mapping[str, str], directory: Path | None = None
) -> None:
    """Run the command in a process group of its own, its output on stderr, and end the group with it.

    Raises CalledProcessError or TimeoutExpired.
    """
    deadline = time.monotonic() + timeout_s
    group = Group(command, environment, directory)  # standard output has only one JSON object
    try:
        while (code := group.poll(min(WATCH_S, max(0.0, deadline - time.monotonic())))) is None:
            if time.monotonic() >= deadline:
                raise subprocess.TimeoutExpired(command, timeout_s)
    finally:
        group.end()
    if code:
        raise subprocess.CalledProcessError(code, command)


def headway(arguments: Sequence[str], timeout_s: float) -> None:
    """Run `headway` with these arguments, its output on stderr. Raises CalledProcessError or TimeoutExpired."""
    finish_group((sys.executable, "-m", "headway", *arguments), timeout_s, {**os.environ, "PYTHONUNBUFFERED": "1"})


def isolated(function: str, spec: object, processes: int, timeout_s: float) -> dict[str, Any]:
    """Call `function(spec)` on every rank, under torchrun if there are several.

    Returns {"result": rank 0's value} or {"error": its last words}; never raises an error of the function.
    """
    with TemporaryDirectory(prefix="headway-case-") as directory:
        given, result = Path(directory, "spec.json"), Path(directory, "result.json")
        given.write_text(json.dumps(spec))
        torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), "-m"]
        command = [sys.executable, "-m", *(torchrun if processes > 1 else []), __name__, function]
        threads = str(max(1, (os.cpu_count() or 1) // processes))
        environment = {"OMP_NUM_THREADS": threads, "TQDM_DISABLE": "1"} | os.environ
        said = "it returned nothing"
        try:
            finish_group([*command, str(given), str(result)], timeout_s, environment, ROOT)
        except subprocess.CalledProcessError as error:
            said = f"exit status {error.returncode}"
        except subprocess.TimeoutExpired:
            said = f"it was stopped after {timeout_s:.0f} s"
        if result.exists():
            return {"result": json.loads(result.read_text())}
        error_file = result.with_suffix(".error")
        return {"error": error_file.read_text() if error_file.exists() else said}


def last_words(outcome: Mapping[str, Any]) -> str:
    """Return the last line of an isolated call's error; '' where there is none."""
    said = [text for text in outcome.get("error", "").splitlines() if text.strip()]
    return said[-1][:300] if said else ""


@contextmanager
def repeated(look: Callable[[], None], every_s: float) -> Iterator[None]:
    """Call `look` every so many seconds, in a thread, until the end of the block. The last call has returned when the
    block is left. What `look` raises ends the looking, not the block."""
    is_over = threading.Event()

    def follow() -> None:
        while not is_over.wait(every_s):
            look()

    thread = threading.Thread(target=follow, name="repeated")
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def main() -> None:
    """Run one rank. The first one that fails writes its error; the others only fail because of it."""
    name, given, result = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    module, _, function = name.partition(":")
    try:
        returned = getattr(importlib.import_module(module), function)(json.loads(given.read_text()))
        if int(os.environ.get("RANK", 0)) == 0:
            partial = result.with_suffix(".partial")
            partial.write_text(json.dumps(returned))
            partial.rename(result)
    except Exception:
        with suppress(FileExistsError), result.with_suffix(".error").open("x") as file:
            file.write("\n".join(traceback.format_exc().splitlines()[-KEPT_LINES:]))
        raise


if __name__ == "__main__":
    main()
