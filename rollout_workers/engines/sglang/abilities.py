"""The abilities of SGLang as an engine. This module does not import SGLang."""

from importlib.util import find_spec
from pathlib import Path

from headway.broker.installation import TorchFacts, is_installed, version_of
from headway.rollout_workers.engines.abilities import EngineAbilities, KnownEngine

from .options import is_harmless


def _examine(torch: TorchFacts) -> tuple[bool, str]:
    version = version_of("sglang")
    if version is None:
        return False, "not installed"
    if not torch.gpus:
        return False, f"sglang {version}, and no GPU"
    missing = _missing_kernels()
    return not missing, "; ".join([f"sglang {version}", *missing])


def _missing_kernels() -> list[str]:
    """Return what SGLang's defaults need on a GPU and is not there, each with the option that does without."""
    kernels = find_spec("sgl_kernel")
    if kernels is None:
        return ["no sgl_kernel, without which it does not start"]
    missing = []
    places = kernels.submodule_search_locations or ()
    if not any(file for place in places for file in Path(place).glob("flash_ops*")):
        missing.append("no FA3 in sgl_kernel: set engine.options.attention_backend=triton")
    if not is_installed("flashinfer"):
        missing.append("no flashinfer: set engine.options.sampling_backend=pytorch")
    return missing


SGLANG = KnownEngine(
    opener="headway.rollout_workers.engines.sglang.start:open_sglang",
    abilities=EngineAbilities(
        gpu_options=("tp_size",),
        sleep_option="enable_memory_saver",
        memory_option="mem_fraction_static",
        memory_share=0.88,
        fits_requests=True,
        takes_adapters=True,
        # SGLang computes experts with adapters by Triton's kernels, on GPUs alone: no test shows what it holds of them.
        takes_expert_adapters=False,
        takes_attention_adapters=True,  # it leaves layers alone that no adapter changes
        takes_full_adapters=False,
        holds_adapters=True,
        takes_stored=is_harmless,
    ),
    package=("sglang", "SGLang"),
    remedy="It needs a GPU and an environment without vLLM, as both pin torch: pip install 'headway[sglang]' there, and"
    " start its workers there (headway workers). Its tests run on a CPU: make test-sglang.",
    examine=_examine,
)
