"""SGLang's processes, which end with the worker from their first moment on, and make no file outside of the directory
of its sockets.

They ask the kernel to end them together with the process that started them, but only once they have imported
everything. If the worker is killed before, the scheduler fails to report and sends SIGQUIT to the process that is now
its parent, which may be the machine's first, and the detokenizer stays for ever.
"""

import ctypes
import importlib
import os
import signal
import tempfile
from importlib.util import find_spec
from typing import Any

PR_SET_PDEATHSIG = 1
LOADS = "sglang.srt.managers.load_snapshot"
"""SGLang's module by which a scheduler tells its load to those who balance it, in a file of shared memory that it never
removes. A worker asks for no load."""


class Tied:
    """A function of SGLang's that runs in a new process. Python's unpickling of it there ties the process, before it
    imports SGLang."""

    def __init__(self, module: str, name: str, directory: str = "") -> None:
        """`directory`: that of files which outlive the process; empty: where SGLang makes them."""
        self._path = module, name
        self._directory = directory

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        module, name = self._path
        if self._directory and find_spec(LOADS):
            own = os.path.join(self._directory, "loads")
            setattr(importlib.import_module(LOADS), "shm_path_for", lambda _: own)  # noqa: B010 - theirs
        return getattr(importlib.import_module(module), name)(*arguments, **named)

    def __reduce__(self) -> Any:
        """SGLang is started while its sockets' directory is that of temporary files (`own_sockets`)."""
        return tied, (*self._path, os.getpid(), tempfile.gettempdir())


TIED = {
    "run_scheduler_process_func": Tied("sglang.srt.managers.scheduler", "run_scheduler_process"),
    "run_detokenizer_process_func": Tied("sglang.srt.managers.detokenizer_manager", "run_detokenizer_process"),
}
"""The attributes of `sglang.Engine` that run in processes of their own."""


def tied(module: str, name: str, parent: int, directory: str) -> Tied:
    """Return the function, in a process that ends with its parent from now on; at once if that has ended already."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
    return Tied(module, name, directory)
