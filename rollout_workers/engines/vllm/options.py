"""The options of vLLM that a configuration in the broker may set: sizes and switches.

Other options name modules, classes, files or addresses (`worker_cls`, `load_format`, `tokenizer`, `trust_remote_code`,
...), and vLLM would import or read what they name. A worker takes those from its own command line only.
"""

_NAMES = """
async_scheduling block_size cpu_offload_gb cudagraph_capture_sizes decode_context_parallel_size disable_cascade_attn
disable_custom_all_reduce disable_hybrid_kv_cache_manager disable_log_stats disable_sliding_window
enable_chunked_prefill enable_cumem_allocator enable_eplb enable_expert_parallel enable_flashinfer_autotune
enable_prefix_caching enable_return_routed_experts enable_sleep_mode enforce_eager gpu_memory_utilization
kv_cache_memory_bytes kv_offloading_size long_prefill_token_threshold max_cudagraph_capture_size max_logprobs
max_model_len max_num_batched_tokens max_num_scheduled_tokens max_num_seqs num_gpu_blocks_override optimization_level
pipeline_parallel_size prefill_context_parallel_size seed stream_interval tensor_parallel_size watermark
"""
SIZES_AND_SWITCHES = frozenset(_NAMES.split())
"""Options whose values are numbers, booleans or lists of numbers."""

WORDS = {
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


def is_harmless(name: str, value: object) -> bool:
    """Whether this option, at any allowed value, makes vLLM import, read and run nothing."""
    if name in SIZES_AND_SWITCHES:
        numbers = value if isinstance(value, list) else [value]
        return all(number is None or isinstance(number, bool | int | float) for number in numbers)
    words = WORDS.get(name, ())
    if not isinstance(value, str):
        return value is None and name in WORDS
    return value in words if words is not None else value.replace("_", "").replace("-", "").isalnum()
