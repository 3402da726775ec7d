"""The environment that vLLM reads when it is imported or starts its processes. This module imports neither vLLM nor
torch: it is set before they are imported."""

import os
import tempfile

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
    """Set the environment. The user's own settings stay. `spawns`: whether vLLM spawns its processes; `forking` decides
    it otherwise."""
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
