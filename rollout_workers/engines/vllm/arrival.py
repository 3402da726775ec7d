"""Waits until everything that vLLM sampled before a pause has reached its requests."""

import asyncio
from typing import Any

from headway.broker.errors import WeightSyncError


class Arrival:
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

    async def of_everything(self) -> None:
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
