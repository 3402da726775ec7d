"""The abilities of SGLang as an engine. This module does not import SGLang."""

from broker.installation import TorchFacts, version_of
from rollout_workers.engines.abilities import EngineAbilities, KnownEngine

from .options import is_harmless


def _examine(torch: TorchFacts) -> tuple[bool, str]:
    version = version_of("sglang")
    if version is None:
        return False, "not installed"
    return bool(torch.gpus), f"sglang {version}" if torch.gpus else f"sglang {version}, and no GPU"


SGLANG = KnownEngine(
    opener="rollout_workers.engines.sglang.start:open_sglang",
    abilities=EngineAbilities(
        gpu_options=("tp_size",),
        sleep_option="enable_memory_saver",
        memory_option="mem_fraction_static",
        memory_share=0.88,
        takes_adapters=True,
        # SGLang computes experts with adapters by Triton's kernels, on GPUs alone: no test shows what it holds of them.
        takes_expert_adapters=False,
        takes_full_adapters=False,
        holds_adapters=True,
        takes_stored=is_harmless,
    ),
    package=("sglang", "SGLang"),
    remedy="It needs a GPU and an environment without vLLM, as both pin torch: pip install 'headway[sglang]' there, and"
    " start its workers there (headway workers). Its tests run on a CPU: make test-sglang.",
    examine=_examine,
)
