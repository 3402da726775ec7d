"""vLLM's processes: their environment, and the fork server that has imported vLLM while the worker did.

    worker ── preload ──────► fork server: imports vLLM ──┐
       │ imports vLLM, reads the model's configuration      ├──► vLLM's process starts at once
       └─ AsyncLLM ── asks for a process ───────────────────┘

Otherwise vLLM is imported in the worker, and only then once more in a new process; the first time on a machine also by
a third one, which looks at the model's class.

The invariant: no process is forked from one that has opened CUDA, which does not survive a fork. In its place, and
where the server fails for any reason, processes are spawned, as vLLM itself would do it.

This module imports neither vLLM nor torch: the environment is set before they are imported.
"""

import ctypes
import logging
import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing import forkserver, popen_forkserver, popen_spawn_posix
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any

METHOD, SPAWN = "VLLM_WORKER_MULTIPROC_METHOD", "spawn"
"""The variable by which vLLM is told how to start its processes. A user's own choice stays."""
BIND, NO_BIND = "VLLM_CPU_OMP_THREADS_BIND", "nobind"
"""The variable by which vLLM is told the cores of its threads on a CPU."""
LONGEST_DIRECTORY = 64
"""Characters of a directory for vLLM's sockets: with the name of one, a path may have 107."""
SHORT_DIRECTORY = "/tmp"
"""The directory of vLLM's sockets where TMPDIR is too long. Their names cannot be guessed, and it is vLLM's own choice
where TMPDIR is not set."""


def prepare_environment(threads: int, *, spawns: bool = True) -> None:
    """Set the environment. The user's own settings stay. `spawns`: whether vLLM spawns its processes; `preload`
    decides it otherwise."""
    settings = {
        BIND: NO_BIND,  # the default pins every engine of a machine to core 0
        "OMP_NUM_THREADS": str(threads),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # on a CPU: one process beside this one instead of two
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    if spawns:
        settings[METHOD] = SPAWN
    if len(tempfile.gettempdir()) > LONGEST_DIRECTORY:
        settings["VLLM_RPC_BASE_PATH"] = SHORT_DIRECTORY
    for name, value in settings.items():
        os.environ.setdefault(name, value)


SHARDS_ON_GPUS = "HEADWAY_FORK_VLLM"
"""The variable that is 1 to have the processes that share a model forked on GPUs, too, where no run has shown it."""
DRIVER = "libcuda.so.1"
PRELOADED = "headway.rollout_workers.engines.vllm.fork_preload"
"""The module that the server imports."""
PR_SET_PDEATHSIG = 1
NOT_INITIALIZED = 3
"""CUDA_ERROR_NOT_INITIALIZED, which CUDA's driver answers in a process that has not opened it."""

log = logging.getLogger(__name__)


def preload(threads: int) -> None:
    """Start the process that imports vLLM, with so many threads for arithmetic, unless there is one or the user has
    chosen how processes start. Returns at once.

    To be called by the main thread: the kernel ends the server with the thread that started it.
    """
    prepare_environment(threads, spawns=False)
    if METHOD in os.environ:
        return
    multiprocessing.set_forkserver_preload([PRELOADED])
    try:
        forkserver.ensure_running()
    except OSError as error:  # such as a TMPDIR too long for the server's socket
        os.environ[METHOD] = SPAWN
        log.warning("vLLM is imported in one process after the other, as there is no server to fork from: %r", error)


@contextmanager
def new_processes(arguments: Mapping[str, Any]) -> Iterator[None]:
    """Let vLLM, which is started with these arguments in this block, have its processes forked, and look at the model's
    class in this process."""
    from vllm.model_executor.models import registry
    from vllm.v1.engine import utils

    changes: dict[tuple[Any, str], Any] = {(registry, "_run_in_subprocess"): _run_here}
    # One that is bound to a NUMA node has an executable of its own, which only a spawned process can have.
    if METHOD not in os.environ and not any(name.startswith("numa") for name in arguments):
        changes[utils, "get_mp_context"] = Forking
    usual = {place: getattr(*place) for place in changes if hasattr(*place)}
    if (utils, "get_mp_context") not in usual:
        os.environ.setdefault(METHOD, SPAWN)  # vLLM itself would fork this process, which has threads
    try:
        for place in usual:
            setattr(*place, changes[place])
        yield
    finally:
        for place, value in usual.items():
            setattr(*place, value)


def _run_here(look: Any) -> Any:
    """Look at the class of a model. vLLM has it done by a process that ends at once, as some models open CUDA when they
    are imported; here no process is forked from this one."""
    return look()


class _Process(ForkServerProcess):
    """A process that has the environment of the one that starts it, and ends with its parent: the server, which ends
    with the worker."""

    _can_fork = True
    """False once the server has failed: it would be started anew each time."""

    def start(self) -> None:
        self._environment = {METHOD: SPAWN, **os.environ}
        super().start()

    def run(self) -> None:
        os.environ.clear()
        os.environ.update(self._environment)
        end_with_parent()
        _fork_others()
        super().run()

    @staticmethod
    def _Popen(process: Any) -> Any:  # noqa: N802 - multiprocessing's name
        if _Process._can_fork:
            try:
                return popen_forkserver.Popen(process)
            except Exception as error:  # noqa: BLE001 - whatever it is, a spawned process does as well
                _Process._can_fork = False
                log.warning("vLLM is imported once more, as its process cannot be forked: %r", error)
        return popen_spawn_posix.Popen(process)


class Forking(ForkServerContext):
    """The context in which vLLM is to start its processes."""

    Process = _Process


def _fork_others() -> None:
    """Let vLLM's process, if it has been forked, have those that share its model forked from the same server."""
    executor = sys.modules.get("vllm.v1.executor.multiproc_executor")
    # Cores are given to a process by its environment, which OpenMP reads once; the server has done so.
    is_shown = _driver() is None or os.environ.get(SHARDS_ON_GPUS) == "1"
    if is_shown and hasattr(executor, "get_mp_context") and os.environ.get(BIND) == NO_BIND:
        server: Any = forkserver._forkserver
        server.ensure_running = _do_nothing  # else it would start a server of its own
        setattr(executor, "get_mp_context", Forking)  # noqa: B010 - a module's attribute, for the type checker


def _do_nothing() -> None:
    """Stand in for the start of a server."""


def end_with_parent() -> None:
    """Have the kernel kill this process when its parent ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def has_opened_cuda() -> bool:
    """Whether this process has opened CUDA, through whatever package."""
    driver = _driver()
    return driver is not None and driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) != NOT_INITIALIZED


def _driver() -> Any:
    """Return CUDA's driver, which is not opened thereby; None where there is none."""
    try:
        return ctypes.CDLL(DRIVER)
    except OSError:
        return None
