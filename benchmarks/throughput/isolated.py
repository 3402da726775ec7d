"""One function in processes of its own, under torchrun if there are several: its failure breaks no other process.

python -m benchmarks.throughput.isolated PACKAGE.MODULE:FUNCTION SPEC RESULT
"""

import importlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import traceback
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[2]
KEPT_LINES = 25
"""The number of last output lines of a failed case that are kept."""


def run(function: str, spec: object, processes: int, timeout_s: float) -> dict[str, Any]:
    """Call `function(spec)` on every rank, and return {"result": rank 0's value} or {"error": its last words}.

    Never raises an error of the function.
    """
    with tempfile.TemporaryDirectory(prefix="headway-case-") as directory:
        given, result = Path(directory, "spec.json"), Path(directory, "result.json")
        given.write_text(json.dumps(spec))
        said = _call([*_launcher(processes), __name__, function, str(given), str(result)], processes, timeout_s)
        if result.exists():
            return {"result": json.loads(result.read_text())}
        error = _error_path(result)
        return {"error": error.read_text() if error.exists() else said}


def _launcher(processes: int) -> list[str]:
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), "-m"]
    return [sys.executable, "-m", *(torchrun if processes > 1 else [])]


def _call(command: list[str], processes: int, timeout_s: float) -> str:
    """Run the command, whose output goes to standard error, and return the end of the output."""
    threads = str(max(1, (os.cpu_count() or 1) // processes))
    environment = {"OMP_NUM_THREADS": threads, "TQDM_DISABLE": "1"} | os.environ
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    said: deque[str] = deque(maxlen=KEPT_LINES)
    reader = threading.Thread(target=_pass_on, args=(process, said), daemon=True)
    reader.start()
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        said.append(f"It was stopped after {timeout_s:.0f} s.")
    finally:
        _end(process)
        reader.join(timeout=5)
    return "".join([*said, f"\nexit status {process.returncode}"])


def _pass_on(process: "subprocess.Popen[str]", said: deque[str]) -> None:
    assert process.stdout is not None
    with process.stdout as lines:
        for line in lines:
            sys.stderr.write(line)
            said.append(line)


def _end(process: "subprocess.Popen[str]") -> None:
    """End the process with all descendants: torchrun puts its ranks into sessions of their own."""
    with suppress(psutil.NoSuchProcess):
        for one in psutil.Process(process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                one.kill()
    process.kill()
    process.wait()


def _error_path(result: Path) -> Path:
    return result.with_suffix(".error")


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
        with suppress(FileExistsError), _error_path(result).open("x") as file:
            file.write("\n".join(traceback.format_exc().splitlines()[-KEPT_LINES:]))
        raise


if __name__ == "__main__":
    main()
