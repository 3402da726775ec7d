"""Imported by the fork server alone: it imports what vLLM's process with a model needs, and ends the server rather than
let it fork what would not work."""

import gc
import importlib
import os
from contextlib import suppress

from .fork_server import end_with_parent, has_opened_cuda

OF_EVERY_PROCESS = (
    "vllm.v1.engine.core",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.executor.multiproc_executor",
    "torch._dynamo.convert_frame",
    "torch._inductor.compile_fx",
    "vllm.model_executor.models.llama",
    "vllm.model_executor.models.qwen3",
    "vllm.model_executor.models.qwen3_moe",
    "headway.rollout_workers.engines.vllm.transfer_engine",
)
OF_CUDA = ("vllm.v1.worker.gpu_worker", "vllm.v1.worker.gpu.model_runner", "vllm.v1.attention.backends.flash_attn")
OF_CPUS = ("vllm.v1.worker.cpu_worker",)


def _import_all() -> None:
    """Import the modules. One that this vLLM does not have, or that fails, is left to the process that needs it."""
    from vllm.platforms import current_platform

    own = OF_CUDA if current_platform.is_cuda() else OF_CPUS if current_platform.is_cpu() else ()
    for name in (*OF_EVERY_PROCESS, *own):
        with suppress(Exception):
            importlib.import_module(name)


end_with_parent()
gc.disable()
with suppress(Exception):
    _import_all()
gc.enable()
gc.freeze()  # a forked process that examined these objects would copy their memory
if has_opened_cuda():
    os._exit(1)
