"""The options of SGLang that a configuration in the broker may set: sizes and switches.

Other options name modules, files or addresses (`custom_weight_loader`, `model_path`, `forward_hooks`, ...), and SGLang
would import or read what they name. A worker takes those from its own command line only.
"""

from collections.abc import Mapping

_NAMES = """
chunked_prefill_size context_length cuda_graph_bs_decode cuda_graph_max_bs_decode disable_cuda_graph
disable_custom_all_reduce disable_overlap_schedule disable_prefill_cuda_graph disable_radix_cache enable_memory_saver
max_lora_chunk_size max_prefill_tokens max_running_requests max_total_tokens mem_fraction_static
num_continuous_decode_steps page_size random_seed schedule_conservativeness stream_interval tp_size
"""
SIZES_AND_SWITCHES = frozenset(_NAMES.split())
"""Options whose values are numbers, booleans or lists of numbers."""

WORDS: Mapping[str, set[str] | None] = {
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


def is_harmless(name: str, value: object) -> bool:
    """Whether this option, at any allowed value, makes SGLang import, read and run nothing."""
    if name in SIZES_AND_SWITCHES:
        numbers = value if isinstance(value, list) else [value]
        return all(number is None or isinstance(number, bool | int | float) for number in numbers)
    words = WORDS.get(name, set())
    if not isinstance(value, str):
        return value is None and name in WORDS
    return value in words if words is not None else value.replace("_", "").replace("-", "").isalnum()
