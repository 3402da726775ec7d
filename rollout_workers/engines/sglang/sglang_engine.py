"""SGLang in this process (`sglang.Engine`), from 0.5.17 on.

Logprobs are those of the tempered distribution, before top-p and top-k cut it: SGLang's default.

A swap ends every request, waits until all of their outputs are there, loads while nothing runs, and sends the samples
again with the tokens that they have. SGLang's own pause is not used: it keeps requests but returns before their last
tokens, and a request that it retracts finds its prefix, computed with old weights, in the cache.

The prefix cache stays on, and requests carry a salt, the number of the last swap (`extra_key`). So the prompts of a
group are computed once in each version, and no request finds what older weights computed; SGLang frees the old entries
when it needs room. A swap with `keep_cache` sends samples again under their old salt, where SGLang finds all that they
had cached. Flushing instead would need an idle engine, and would lose the caches that `keep_cache` keeps.

A sample keeps the place of its adapter. Samples of a place that a swap leaves as it is are sent again with the same
adapter and the same salt, so they too find all that they had cached.
"""

import asyncio
import contextlib
import functools
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from typing import Any, Literal

from headway.broker.errors import HeadwayError, NoRoomError, WeightSyncError
from headway.broker.schema import Experts, WeightVersion
from headway.rollout_workers.config import EngineConfig
from headway.rollout_workers.engines.base import Check, Chunk, FinishReason, GenerationRequest, NamedTensors, Parts
from headway.rollout_workers.engines.external_engine import DEADLINE_S, RoutedLayers
from headway.rollout_workers.engines.weight_loading.engine_adapters import AdapterPlaces, wanted_adapter
from headway.rollout_workers.engines.weight_loading.named_tensors import renamed, tied_head, wanted_tensors
from headway.rollout_workers.engines.weight_loading.shared_tensors import Handover

from .lora_pool import make_known
from .sglang_processes import SglangProcesses
from .sglang_requests import SampleRequests, ending, new_tokens, routed_expert_rows, scoring
from .weight_loader import LoaderOrder, ordered, prove, session, sleep, wake

AGAIN_S = 0.2
"""Seconds between two demands that SGLang ends its requests: one that reaches it before a request does is lost."""

WHOLE = "; weights.adapter=merged sends whole weights instead"
"""The remedy for an adapter that SGLang does not take."""

Item = Chunk | HeadwayError


class SglangEngine:
    """Runs SGLang as an engine. `shapes` is the model on the meta device, which swaps are checked against."""

    attaches_memory = True

    def __init__(
        self,
        processes: SglangProcesses,
        config: EngineConfig,
        shapes: Any,
        ranks: int,
        routed: RoutedLayers | None = None,
        *,
        adapters: int = 0,
    ) -> None:
        """`ranks`: how many schedulers hold a part of the model each. `routed`: the layers whose chosen experts SGLang
        tells; None: it tells none. `adapters`: how many SGLang was started to hold."""
        assert config.max_concurrent is not None, "open_sglang settles it"
        self.capacity = config.max_concurrent
        self.max_model_len = config.max_model_len
        self._processes = processes
        self._front = processes.front
        self._ranks = ranks
        self._routed = routed
        self._layers = shapes.config.num_hidden_layers
        self._vocabulary = shapes.get_input_embeddings().weight.shape[0]
        self._version: WeightVersion | None = None
        self._ended: HeadwayError | None = None
        self._swapping = asyncio.Lock()
        self._may_sample = asyncio.Event()
        self._running: set[str] = set()
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._readers: dict[asyncio.Task[None], asyncio.Queue[Item]] = {}
        self._requests = 0
        self._swaps = 0
        self._cleared = dict.fromkeys(range(adapters + 1), 0)
        """The last swap that kept no caches, of each place."""
        self._places = AdapterPlaces(adapters, "SGLang")
        self._handover = Handover(functools.partial(wanted_tensors, shapes))
        self._handover_of_adapter = Handover(functools.partial(wanted_adapter, dict(shapes.named_modules())))
        self._handover_of_parts = Handover(functools.partial(renamed, tied_head(shapes)))
        self._given: tuple[str, ...] = ()
        """The names of a whole version's tensors; a version in parts has the same, in any order."""
        processes.when_ended(self._end)

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Chunk]:
        """See Engine."""
        if request.experts_from is not None and self._routed is None:
            raise HeadwayError("this engine was not opened to tell which experts it chooses")
        self._check(request.prompt_tokens, self.max_model_len - 1)
        limit = min(request.max_new_tokens, self.max_model_len - len(request.prompt_tokens))
        sample, chunks = SampleRequests(request, limit, self._swaps), asyncio.Queue[Item]()
        reading = asyncio.create_task(self._read(sample, chunks))
        self._readers[reading] = chunks
        try:
            while True:
                chunk = await chunks.get()
                if isinstance(chunk, HeadwayError):
                    raise chunk
                yield chunk
                if chunk.finish_reason:
                    return
        finally:
            sample.is_closed = True
            if self._ended is None and not reading.done() and not self._may_sample.is_set():
                reading.cancel()  # it waits for weights
            elif self._ended is None and not reading.done():
                self._processes.abort(sample.request_id)

    async def swap_weights(
        self,
        version: WeightVersion,
        tensors: NamedTensors,
        *,
        keep_cache: bool = False,
        check: Check | None = None,
    ) -> None:
        """See Engine. If SGLang itself fails during the swap, nothing is sampled until a later swap succeeds."""
        async with self._swap(version, keep_cache, check):
            await self._load_whole(tensors)

    async def load_base(self, tensors: NamedTensors, *, check: Check | None = None) -> None:
        """See AdaptedEngine. Raises WeightSyncError if requests run that no adapter of this base would go on with."""
        self._check_takes_adapters()
        async with self._swapping:
            self._places.check_base_is_free()
            await self._load_whole(tensors)
            await prove(self._front, self._ranks, self._given, check)
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
                await make_known(self._front, place)
                async with self._loading():
                    await self._order(LoaderOrder(act="adapter", shared=given.shared, scale=scale, place=place))
            await prove(self._front, self._ranks, given.names, check, remedy=WHOLE)
            self._go_on(version, place, keep_cache and not self._places.base_is_new)

    def _check_takes_adapters(self) -> None:
        if self._ended is not None:
            raise self._ended
        self._places.check_there_are()

    async def swap_in_parts(
        self, version: WeightVersion, parts: Parts, *, keep_cache: bool = False, check: Check | None = None
    ) -> None:
        """See Engine, and `swap_weights`."""
        async with self._swap(version, keep_cache, check), AsyncExitStack() as until_all_are:
            has_begun = False
            async for part in parts:
                async with AsyncExitStack() as until_loaded:
                    try:
                        given = await until_loaded.enter_async_context(self._handover_of_parts.handed(part))
                    except NoRoomError as error:
                        if not has_begun:
                            raise
                        raise WeightSyncError(str(error)) from error  # earlier parts are loaded already
                    if not has_begun:
                        await until_all_are.enter_async_context(self._loading())
                        has_begun = True
                    await self._order(LoaderOrder(act="part", shared=given.shared))

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """See Engine."""
        return await self._scores(token_ids)

    async def score_base(self, token_ids: Sequence[int]) -> list[float]:
        """See AdaptedEngine."""
        return await self._scores(token_ids, 0)

    async def _scores(self, token_ids: Sequence[int], place: int | None = None) -> list[float]:
        """Return logprobs with the adapter of `place` (None: the newest)."""
        self._check(token_ids, self.max_model_len)
        while True:
            await self._until_it_may_sample()
            scored: list[Any] = []
            of = self._places.newest if place is None else place
            asked = scoring(token_ids, self._next_id(), self._swaps, of)
            async with aclosing(self._outputs(asked)) as outputs:
                async for output in outputs:
                    scored.append(output)
            if ending(scored[-1]) != "abort":
                entries = scored[-1]["meta_info"]["input_token_logprobs"]
                return [float(entry[0]) for entry in entries[1:]]

    async def sleep(self) -> None:
        """See Engine."""
        async with self._swapping:
            await self._emptied()
            self._version = None
            await sleep(self._front, self._ranks)

    async def wake(self) -> None:
        """See Engine."""
        async with self._swapping:
            await wake(self._front, self._ranks)

    async def close(self) -> None:
        """See Engine."""
        if self._ended is None:
            self._end(HeadwayError("the engine was closed"))
        await self._processes.close()

    @asynccontextmanager
    async def _swap(self, version: WeightVersion, keep_cache: bool, check: Check | None) -> AsyncIterator[None]:
        """Wrap the loading of tensors: once they are proved, samples go on with them."""
        if self._ended is not None:
            raise self._ended
        async with self._swapping:
            self._places.check_are_unused()
            yield
            await prove(self._front, self._ranks, self._given, check)
            self._go_on(version, 0, keep_cache)

    def _go_on(self, version: WeightVersion, place: int, keep_cache: bool) -> None:
        """Generate with what was proved, which is this version: samples of its place, and those that begin."""
        self._version = version
        self._places.hold(place, version)
        self._swaps += 1
        if not keep_cache:
            self._cleared[place] = self._swaps
        self._may_sample.set()

    async def _load_whole(self, tensors: NamedTensors) -> None:
        async with self._handover.handed(tensors) as given, self._loading():
            self._given = given.names
            await self._order(LoaderOrder(act="whole", shared=given.shared))

    @asynccontextmanager
    async def _loading(self) -> AsyncIterator[None]:
        """End all requests, and wrap the orders of one version. Nothing is sampled until a swap has succeeded."""
        await self._emptied()
        async with session(self._front):
            await self._order(LoaderOrder(act="begin"))
            yield
            await self._order(LoaderOrder(act="finish"))

    async def _order(self, order: LoaderOrder) -> None:
        await ordered(self._front, self._ranks, order)

    async def _emptied(self) -> None:
        """Let no request begin, and return once none is running and all of their outputs have been read."""
        self._may_sample.clear()
        try:
            async with asyncio.timeout(DEADLINE_S):
                while self._running:
                    self._processes.abort()
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(AGAIN_S):  # Python 3.11's wait_for may swallow a cancellation
                            await self._is_idle.wait()
        except TimeoutError as error:
            raise WeightSyncError(
                f"SGLang did not end its requests within {DEADLINE_S:.0f} s; restart the worker"
            ) from error
        if self._ended is not None:
            raise WeightSyncError(str(self._ended))

    async def _read(self, sample: SampleRequests, chunks: asyncio.Queue[Item]) -> None:
        """Generate a sample, one request after the other, whether or not its reader takes the chunks."""
        try:
            await self._until_it_may_sample()  # a sample that begins in a swap is of the new version
            with self._places.kept() as sample.place:
                while not sample.is_closed:
                    await self._until_it_may_sample()
                    if not sample.tokens or sample.salt < self._cleared[sample.place]:
                        sample.salt = self._swaps
                    if await self._read_stretch(sample, chunks):
                        return
        except HeadwayError as error:
            chunks.put_nowait(error)
        finally:
            self._readers.pop(asyncio.current_task(), None)  # type: ignore[arg-type]

    async def _read_stretch(self, sample: SampleRequests, chunks: asyncio.Queue[Item]) -> bool:
        """Generate until the sample or its request ends; return whether the sample has ended."""
        version, seen = self._places.version(sample.place), 0
        sample.request_id = self._next_id()
        async with aclosing(self._outputs(sample.request())) as outputs:
            async for output in outputs:
                if sample.is_closed:  # what `generate` demanded may have come before the request
                    self._processes.abort(sample.request_id)
                reason = ending(output)
                if reason is None and sample.first_row is not None:
                    continue  # its last output has all tokens, and with them their experts
                tokens, logprobs = new_tokens(output, seen)
                experts = self._experts(sample, output, len(tokens))
                if tokens and experts is None and sample.first_row is not None:
                    if reason != "abort":
                        raise HeadwayError("SGLang did not tell which experts it chose for a finished request")
                    tokens, logprobs = [], []  # ended in SGLang's queue: the next request samples them again
                seen += len(tokens)
                sample.tokens += tokens
                finish = _finish(sample, reason)
                if tokens or finish:
                    chunks.put_nowait(
                        Chunk(
                            token_ids=tokens,
                            logprobs=logprobs,
                            version=version,
                            experts=experts,
                            finish_reason=finish,
                        )
                    )
                if finish:
                    return True
        return False

    def _experts(self, sample: SampleRequests, output: Any, count: int) -> Experts | None:
        """Return the experts of the tokens that were fed to sample the `count` tokens of a request's last output."""
        if self._routed is None or sample.first_row is None or not count:
            return None
        rows = len(sample.asked.prompt_tokens) + len(sample.tokens) + count - 1 - sample.first_row
        return routed_expert_rows(output, self._routed, self._layers, rows)

    async def _outputs(self, request: Any) -> AsyncGenerator[Any, None]:
        """Yield a request's outputs. Raises HeadwayError if SGLang refuses it."""
        self._running.add(request.rid)
        self._is_idle.clear()
        try:
            async for output in self._front.generate_request(request, None):
                yield output
        except (ValueError, RuntimeError) as error:
            raise self._ended or HeadwayError(f"SGLang refused or lost a request: {error}") from error
        finally:
            self._running.discard(request.rid)
            if not self._running:
                self._is_idle.set()

    async def _until_it_may_sample(self) -> None:
        if self._ended is not None:
            raise self._ended
        if self._version is None:
            raise HeadwayError("this engine has no weights yet: call swap_weights first")
        while not self._may_sample.is_set():  # another swap may have begun since it was set
            await self._may_sample.wait()
        if self._ended is not None:
            raise self._ended

    def _next_id(self) -> str:
        """Return an id that no other id begins with: SGLang ends all requests whose ids begin with the given one."""
        self._requests += 1
        return f"{self._requests}."

    def _end(self, reason: HeadwayError) -> None:
        """Raise `reason` in every reader, now and later."""
        self._ended = reason
        for task, chunks in list(self._readers.items()):
            chunks.put_nowait(reason)
            task.cancel()
        self._may_sample.set()

    def _check(self, token_ids: Sequence[int], longest: int) -> None:
        if self._ended is not None:
            raise self._ended
        if not 1 <= len(token_ids) <= longest:
            raise HeadwayError(
                f"{len(token_ids)} tokens do not fit: engine.max_model_len={self.max_model_len} allows 1 to {longest}"
            )
        if min(token_ids) < 0 or max(token_ids) >= self._vocabulary:
            raise HeadwayError(f"token ids must lie in [0, {self._vocabulary}): another model's tokenizer?")


def _finish(sample: SampleRequests, reason: FinishReason | Literal["abort"] | None) -> FinishReason | None:
    """Return why the sample ends with the request that has ended for this reason; None if it goes on."""
    if reason == "abort" or (reason == "length" and sample.first_row is not None):
        return "length" if len(sample.tokens) >= sample.limit else None
    return reason
