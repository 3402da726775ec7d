"""Calls of a swap or a sleep into vLLM's processes, and the wait for all that vLLM sampled before a pause."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from headway.broker.errors import WeightSyncError
from headway.rollout_workers.engines.base import Check
from headway.rollout_workers.engines.external_engine import EngineCalls
from headway.rollout_workers.engines.weight_loading.direct_loading import sum_of_processes

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


async def sleep(llm: Any) -> None:
    """Free the GPU's memory. No request may be running."""
    await answered("save what is no weight", llm.collective_rpc("headway_before_sleep"))
    await answered("sleep", llm.sleep(level=DISCARD))


async def wake(llm: Any) -> None:
    """Take the memory again and restore what is no weight. Weights come with the next swap."""
    await answered("wake up", llm.wake_up())
    await answered("restore what is no weight", llm.collective_rpc("headway_after_wake"))


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
