"""Runs one command of a sandbox, in a process of its own beside the worker: it watches the limits, and leaves nothing.

`python -I -S launcher.py` reads one line of JSON from its standard input, and writes one JSON text to its standard
output. When its standard input ends, because the worker is done with it or dead, it ends what it started. It never
runs code of a model itself, and imports nothing of the project: a start takes some ten milliseconds.
"""

import base64
import contextlib
import ctypes
import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

POLL_SECONDS = 0.05
PIECE_BYTES = 1 << 16
PR_SET_CHILD_SUBREAPER = 36
EXIT_OUTCOMES = {96: "refused", 97: "memory", 98: "processes", 99: "disk"}  # bootstrap.py gives them
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

Asked = dict[str, Any]


class LaunchedChild:
    """The process that was started, whatever started it."""

    def __init__(self, process: Any, wait: Callable[[], tuple[int, str]]) -> None:
        """`wait` blocks until it ends, and returns its exit code, or minus its signal, with a reason."""
        # Copies, since sandlock closes its own when it waits.
        self.stdin, self.stdout, self.stderr = (
            os.fdopen(os.dup(stream.fileno()), stream.mode, buffering=0)
            for stream in (process.stdin, process.stdout, process.stderr)
        )
        process.stdin.close()
        self.pid = process.pid
        self.ended_fd, self._ending_fd = os.pipe()
        self.code, self.reason = 0, ""
        self._wait = wait
        self.waiter = threading.Thread(target=self._note_end, daemon=True)
        self.waiter.start()

    def _note_end(self) -> None:
        try:
            self.code, self.reason = self._wait()
        except Exception as error:  # noqa: BLE001 - of sandlock
            self.code, self.reason = -signal.SIGKILL, str(error)
        finally:
            os.close(self._ending_fd)


def start_command(asked: Asked) -> LaunchedChild:
    """Start a command that confines what it runs, such as bwrap."""
    process = subprocess.Popen(
        asked["argv"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=asked["environment"],
        cwd="/",
        start_new_session=True,
    )
    return LaunchedChild(process, lambda: (process.wait(), ""))


def start_sandlock(asked: Asked, scratch: str) -> LaunchedChild:
    """Start a command under sandlock, whose supervisor is a thread of this process."""
    sys.path.insert(0, asked["sandlock_path"])
    import sandlock

    confined = sandlock.Sandbox(fs_writable=[scratch], cwd=scratch, **asked["sandlock"])
    piped = sandlock.StdioMode.PIPED
    process = confined.popen(asked["argv"], stdin=piped, stdout=piped, stderr=piped)

    def wait() -> tuple[int, str]:
        result = process.wait()
        if result.reason == sandlock.ExitReason.EXITED:
            return result.exit_code, ""
        return -(result.signal if result.signal > 0 else signal.SIGKILL), result.error or ""

    return LaunchedChild(process, wait)


def descendants() -> Iterator[int]:
    """Yield the processes below this one. Those whose parent has died are its children, since it is their reaper."""
    parents: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError, IndexError), open(f"/proc/{name}/stat", "rb") as file:
                parents.setdefault(int(file.read().rpartition(b")")[2].split()[1]), []).append(int(name))
    found = [os.getpid()]
    while found:
        children = parents.get(found.pop(), [])
        found += children
        yield from children


def usage() -> tuple[int, int]:
    """Return how many tasks and how many bytes of memory of their own the processes below this one have."""
    tasks = memory = 0
    for pid in descendants():
        with contextlib.suppress(OSError, ValueError, IndexError):
            with open(f"/proc/{pid}/stat", "rb") as file:
                state, *fields = file.read().rpartition(b")")[2].split()
            with open(f"/proc/{pid}/statm", "rb") as file:
                resident, shared = [int(value) for value in file.read().split()[1:3]]
            tasks += 0 if state in b"ZX" else int(fields[16])
            memory += (resident - shared) * PAGE_BYTES
    return tasks, memory


def disk_usage(directory: str, enough: int) -> int:
    """Return how many bytes a directory holds, or some number above `enough`; each entry has a block at least."""
    total = 0
    for root, directories, files in os.walk(directory):
        for name in directories + files:
            with contextlib.suppress(OSError):
                total += max(4096, os.lstat(os.path.join(root, name)).st_blocks * 512)
        if total > enough:
            break
    return total


def kill_all(started_pid: int | None = None) -> None:
    """Kill all processes below this one, those too that they start meanwhile. A thread reaps the one that was started;
    the others are reaped here."""
    while pids := list(descendants()):
        for pid in pids:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
            if pid != started_pid:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
        time.sleep(0.002)


class Watch:
    """One run: hands on its input, keeps its output, and ends it at its limits."""

    def __init__(self, child: LaunchedChild, asked: Asked, scratch: str) -> None:
        """The clock starts here."""
        self.child, self.asked, self.scratch = child, asked, scratch
        self.started = time.monotonic()
        self.payload = memoryview(base64.b64decode(asked["payload"]))
        self.kept = {"stdout": bytearray(), "stderr": bytearray()}
        self.selector = selectors.DefaultSelector()
        for stream, name in ((child.stdout, "stdout"), (child.stderr, "stderr")):
            os.set_blocking(stream.fileno(), False)
            self.selector.register(stream, selectors.EVENT_READ, name)
        os.set_blocking(child.stdin.fileno(), False)
        self.selector.register(child.stdin, selectors.EVENT_WRITE, "stdin")
        self.selector.register(child.ended_fd, selectors.EVENT_READ, "end")
        self.selector.register(0, selectors.EVENT_READ, "worker")

    def outcome(self) -> str:
        """Wait for the end of the run; return the limit that ended it, or ""."""
        next_look = self.started
        while True:
            now = time.monotonic()
            if now - self.started >= self.asked["seconds"]:
                return "timeout"
            if now >= next_look:
                if over := self._over():
                    return over
                next_look = now + POLL_SECONDS
            for key, _ in self.selector.select(POLL_SECONDS):
                if (ended := self._step(key.data)) is not None:
                    return ended

    def _step(self, what: str) -> str | None:
        if what == "end":
            return ""
        if what == "worker":  # it writes nothing after its line
            return "killed"
        if what == "stdin":
            self._feed()
        elif self._read(what):
            return "output"
        return None

    def _feed(self) -> None:
        try:
            self.payload = self.payload[os.write(self.child.stdin.fileno(), self.payload[:PIECE_BYTES]) :]
        except BlockingIOError:
            return
        except OSError:  # it reads no more
            self.payload = self.payload[:0]
        if not self.payload:
            self.selector.unregister(self.child.stdin)
            self.child.stdin.close()

    def _read(self, name: str) -> bool:
        """Keep what a stream has; return whether that is more than it may."""
        stream, kept = getattr(self.child, name), self.kept[name]
        try:
            piece = os.read(stream.fileno(), PIECE_BYTES)
        except BlockingIOError:
            return False
        if not piece:
            self.selector.unregister(stream)
        kept += piece
        is_over: bool = len(kept) > self.asked["output_bytes"]
        del kept[self.asked["output_bytes"] :]
        return is_over

    def _over(self) -> str:
        if self.asked["watch"]:
            tasks, memory = usage()
            if tasks > self.asked["tasks"]:
                return "processes"
            if memory > self.asked["memory_bytes"]:
                return "memory"
        is_full = self.scratch and disk_usage(self.scratch, self.asked["scratch_bytes"]) > self.asked["scratch_bytes"]
        return "disk" if is_full else ""

    def drain(self) -> bool:
        """Keep what is left in the pipes, after the end; return whether it was more than it may."""
        is_over = False
        for name in self.kept:
            stream = getattr(self.child, name)
            while not is_over and stream in self.selector.get_map():
                before = len(self.kept[name])
                is_over = self._read(name)
                if len(self.kept[name]) == before:
                    break
        return is_over


def main() -> None:
    """Run what the standard input asks for."""
    asked = json.loads(sys.stdin.buffer.readline())
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    scratch = tempfile.mkdtemp(prefix="headway-sandbox-") if asked["sandlock"] else ""
    try:
        answer = launch(asked, scratch)
    except Exception as error:  # noqa: BLE001 - whoever waits gets an answer
        answer = {"outcome": "killed", "output": "", "error": f"The sandbox failed: {error!r}", "seconds": 0.0}
    finally:
        kill_all()
        if scratch:
            shutil.rmtree(scratch, ignore_errors=True)
        if asked["cleanup"]:
            subprocess.run(
                asked["cleanup"], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                env=asked["environment"], check=False,
            )  # fmt: skip
    sys.stdout.write(json.dumps(answer))
    sys.stdout.flush()
    os._exit(0)  # without waiting for threads of sandlock


def launch(asked: Asked, scratch: str) -> dict[str, Any]:
    """Run it to its end, or its limit; return what became of it. Its processes have ended."""
    try:
        child = start_sandlock(asked, scratch) if asked["sandlock"] else start_command(asked)
    except Exception as error:  # noqa: BLE001 - of sandlock, or of the system
        return {"outcome": "refused", "output": "", "error": f"The sandbox did not start: {error}", "seconds": 0.0}
    watch = Watch(child, asked, scratch)
    outcome = watch.outcome()
    seconds = time.monotonic() - watch.started
    kill_all(child.pid)
    child.waiter.join()
    if watch.drain() and not outcome:
        outcome = "output"
    texts = {name: bytes(kept).decode(errors="replace") for name, kept in watch.kept.items()}
    if not outcome:
        outcome = "ok" if child.code == 0 else EXIT_OUTCOMES.get(child.code, "raised" if child.code > 0 else "killed")
    why = texts["stderr"] or child.reason
    return {"outcome": outcome, "output": texts["stdout"], "error": why, "seconds": seconds}


if __name__ == "__main__":
    main()
