"""Starts SGLang as an engine: its environment, its arguments, and what it cannot do."""

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from inspect import signature
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace
from transformers import AutoConfig, AutoModelForCausalLM

from headway.broker.errors import HeadwayError
from headway.broker.installation import version_of
from headway.rollout_workers.config import EngineConfig
from headway.rollout_workers.engines import gpus_of, start_lock
from headway.rollout_workers.engines.abilities import REQUESTS, SGLANG
from headway.rollout_workers.engines.base import EngineOptionsError, check_arguments
from headway.rollout_workers.engines.external_engine import fitting_requests, routed_layers

from .lora_pool import adapter_arguments
from .sglang_engine import SglangEngine
from .sglang_processes import PARENT_BOUND, SglangProcesses, end, ignore_signal, own_log, own_sockets
from .sglang_requests import expert_arguments
from .weight_loader import LOADER

STREAM_INTERVAL = 16
"""Tokens of a request that arrive together. One by one they would take the worker's event loop longer than a GPU takes
to sample them."""

MOST_FITTING = 256
"""The most requests of an engine on a GPU that is told none, and its largest batch with a CUDA graph then, which SGLang
would choose by the GPU's memory: below 20 GB it has graphs for 8 alone."""

SPARE = 8
"""Tokens that SGLang's context is longer than `engine.max_model_len`: it ends responses a few tokens earlier."""

FULL = ("float32", "float")
"""SGLang's names of the number format for which it has kernels on CPUs alone."""

TOKENS_ON_CPU = 65_536
"""The most tokens of the cache on a CPU, where SGLang would take a part of the machine's memory."""

NCCL_DECIDES = "-2"
"""NCCL's own default of `NCCL_CUMEM_ENABLE`. Left alone, SGLang sets 0, and a learner has the default. With these two a
group of one host failed with `Cuda failure 'invalid argument'` (two H200, NCCL 2.28.9)."""


def prepare_environment(threads: int) -> None:
    """Set the environment that SGLang reads when it is imported or starts its processes. The user's settings stay."""
    settings = {
        "OMP_NUM_THREADS": str(threads),
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",  # for the spare tokens, which are never computed
        "TQDM_DISABLE": "1",
        "NCCL_CUMEM_ENABLE": NCCL_DECIDES,
    }
    if not torch.cuda.is_available():
        settings["SGLANG_USE_CPU_ENGINE"] = "1"
    for name, value in settings.items():
        os.environ.setdefault(name, value)


def engine_arguments(
    config: EngineConfig, model_dir: Path, architecture: str, seed: int, *, sleeps: bool = False
) -> dict[str, Any]:
    """Return the arguments of `sglang.Engine`. `engine.options` override these."""
    most = config.max_concurrent or (MOST_FITTING if torch.cuda.is_available() else REQUESTS)
    sequences = most + 1  # one more for `score`, which must not wait until a request ends
    length = config.max_model_len + SPARE
    # A bare config.json may not name its class. Requests name all tokens at which they stop.
    arguments: dict[str, Any] = {
        "model_path": str(model_dir),
        "json_model_override_args": json.dumps({"architectures": [architecture], "eos_token_id": None}),
        "skip_tokenizer_init": True,
        "load_format": "dummy",
        "custom_weight_loader": [LOADER],
        "dtype": config.dtype,
        "context_length": length,
        "max_running_requests": sequences,
        "random_seed": seed,
        "stream_interval": STREAM_INTERVAL,
        "log_level": "error",
        "custom_sigquit_handler": ignore_signal,
        "grammar_backend": "none",
        "skip_server_warmup": True,
    }
    if torch.cuda.is_available():
        arguments["enable_memory_saver"] = sleeps
        if config.max_concurrent is None:
            arguments["cuda_graph_max_bs_decode"] = MOST_FITTING
    else:
        arguments |= {
            "device": "cpu",
            "attention_backend": "torch_native",
            "sampling_backend": "pytorch",
            "disable_overlap_schedule": True,
            "disable_cuda_graph": True,
            "max_total_tokens": min(TOKENS_ON_CPU, sequences * length),
            "mem_fraction_static": 0.1,
            "stream_interval": 1,
        }
    arguments |= SGLANG.abilities.said(config.options)
    arguments["max_running_requests"] = arguments["max_running_requests"] or sequences  # a null says nothing
    return arguments


def open_sglang(
    config: EngineConfig,
    model_dir: Path,
    *,
    seed: int,
    tells_experts: bool = False,
    sleeps: bool = False,
    adapter_rank: int = 0,
    adapters_held: int = 1,
) -> SglangEngine:
    """Start SGLang on the config.json in `model_dir`, with random weights. An event loop must be running.

    Raises EngineOptionsError for options that SGLang does not have or that the engine cannot keep its promises with,
    and HeadwayError if a package that SGLang needs is missing, or if it cannot tell experts or take adapters here.
    """
    for name in ("quantization", "pp_size", "dp_size", "speculative_algorithm"):
        if name in config.options:
            raise EngineOptionsError(
                f"engine.options.{name} does not go with engine.kind=sglang: take engine.kind=vllm."
            )
    if torch.cuda.is_available() and config.options.get("dtype", config.dtype) in FULL:
        raise EngineOptionsError(
            "SGLang's kernels on GPUs compute in bfloat16 and float16 alone: set engine.dtype=bfloat16, or"
            " engine.kind=vllm."
        )
    prepare_environment(config.threads)
    check_options(config.options)
    with torch.device("meta"):
        shapes = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_dir, trust_remote_code=False))
    arguments = engine_arguments(config, model_dir, type(shapes).__name__, seed, sleeps=sleeps)
    routed = routed_layers(shapes) if tells_experts else None
    if routed is not None:
        arguments |= expert_arguments()
    arguments |= adapter_arguments(adapter_rank, adapters_held, shapes)
    ranks, adapters = gpus_of(config, SGLANG.abilities), adapters_held if adapter_rank else 0
    with start_lock(named_gpus(ranks) if torch.cuda.is_available() else []):
        processes = started(arguments)
    if config.max_concurrent is None:
        most = max(1, arguments["max_running_requests"] - 1)
        fitting = fitting_requests("SGLang", most, processes.cache_tokens, config.max_model_len)
        config = replace(config, max_concurrent=fitting)
    return SglangEngine(processes, config, shapes, ranks, routed, adapters=adapters)


def check_options(options: Iterable[str]) -> None:
    """Raise EngineOptionsError for the first of `engine.options` that SGLang does not have, and HeadwayError if SGLang
    cannot be imported. The environment is prepared."""
    with importing():
        from sglang.srt.server_args import ServerArgs
    check_arguments(options, signature(ServerArgs).parameters, f"SGLang {version_of('sglang') or 'here'}")


@contextmanager
def importing() -> Iterator[None]:
    """Raise HeadwayError, with the remedy, where SGLang cannot be imported."""
    try:
        yield
    except ImportError as error:
        raise HeadwayError(f"SGLang cannot be imported: {error}. {SGLANG.remedy}") from error


def named_gpus(count: int) -> list[str]:
    """Return names of the first `count` visible GPUs, for `start_lock`: SGLang measures free memory twice, and
    fails if another engine takes some in between. CUDA is not asked, as its context would take memory here."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names = visible.split(",") if visible else [str(number) for number in range(count)]
    return [f"sglang-{name}" for name in names[:count]]


def started(arguments: dict[str, Any]) -> SglangProcesses:
    """Start `sglang.Engine` with these arguments, once the environment is prepared. An event loop must be running.

    Raises HeadwayError if SGLang cannot be imported, or does not start; then the processes that it started have ended.
    """
    with importing():
        from sglang.srt.entrypoints.engine import Engine

    others = set(active_children())
    try:
        with own_log(), own_sockets() as sockets:
            sglang = type("ParentBoundEngine", (Engine,), PARENT_BOUND)(**arguments)
    except Exception as error:
        end(set(active_children()) - others)
        raise HeadwayError(
            f"SGLang did not start: {error}. What failed stands in its output above. If that names a kernel which"
            " cannot be imported, such as FA3 or flashinfer, start it without these:"
            " engine.options.attention_backend=triton engine.options.sampling_backend=pytorch"
        ) from error
    return SglangProcesses(sglang, set(active_children()) - others, sockets)
