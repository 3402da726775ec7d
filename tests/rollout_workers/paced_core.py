"""vLLM with all real parts of a worker's process, around a core that computes nothing.

`AsyncLLM` talks to its engine core, another process on another CPU, through one client object. Here that object makes
the outputs itself: one token for every running request, a step every `step_s`. So all of a
worker's process runs without a GPU.
"""

import asyncio
import random
from collections.abc import Iterator, Sequence
from itertools import cycle
from types import SimpleNamespace
from typing import Any

import numpy as np

KINDS_OF_TOKENS = 32
"""The number of different tokens, whose logprobs are made once: the core's process makes them elsewhere."""


class PacedCore:
    """A stand-in for AsyncLLM's client of its engine core."""

    def __init__(self, capacity: int, step_s: float, mean_tokens: float) -> None:
        self.engine_ranks_managed = [0]
        self.resources = SimpleNamespace(engine_dead=False)
        self.outputs_queue: asyncio.Queue[Any] = asyncio.Queue(maxsize=1)  # a slow reader slows the core down
        self._capacity = capacity
        self._step_s = step_s
        self._mean_tokens = mean_tokens
        self._left: dict[str, int] = {}
        self._stop: dict[str, int | None] = {}
        self._unscored: set[str] = set()
        self._lengths = random.Random(0)
        self._may_run = asyncio.Event()
        self._may_run.set()
        self._samples = cycle(_samples())
        self._stepping = asyncio.get_running_loop().create_task(self._step_for_ever())

    async def get_output_async(self) -> Any:
        return await self.outputs_queue.get()

    async def get_supported_tasks_async(self) -> tuple[str, ...]:
        return ("generate",)

    async def add_request_async(self, request: Any) -> None:
        """Add a request whose length is geometric, cut at its limit: a few are many times as long as most."""
        params = request.sampling_params
        drawn = 1 + int(self._lengths.expovariate(1 / self._mean_tokens))
        self._left[request.request_id] = min(params.max_tokens, drawn)
        ends = drawn < params.max_tokens and params.stop_token_ids
        self._stop[request.request_id] = params.stop_token_ids[0] if ends else None
        if params.logprobs is None:
            self._unscored.add(request.request_id)

    async def abort_requests_async(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self._left.pop(request_id, None)
            self._stop.pop(request_id, None)

    async def pause_scheduler_async(self, **how: object) -> None:
        self._may_run.clear()

    async def resume_scheduler_async(self) -> None:
        self._may_run.set()

    async def reset_mm_cache_async(self) -> None:
        """Do nothing, because there is no such cache."""

    async def collective_rpc_async(self, method: str, *rest: object) -> list[tuple[str, None]]:
        """Answer as `WeightExtension.headway_outcome` does."""
        return [("", None)]

    def routed_experts(self, request_id: str) -> Any:
        """Return the experts of the tokens fed for the request's next token; for tests that want them."""
        return None

    def shutdown(self, timeout: float | None = None) -> None:
        self._stepping.cancel()

    async def _step_for_ever(self) -> None:
        from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason

        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            due = max(due + self._step_s, loop.time())
            await asyncio.sleep(due - loop.time())
            await self._may_run.wait()
            outputs = []
            for request_id in list(self._left)[: self._capacity]:
                token, logprobs = next(self._samples)
                self._left[request_id] -= 1
                reason = None
                if not self._left[request_id]:
                    del self._left[request_id]
                    stop = self._stop.pop(request_id)
                    reason = FinishReason.LENGTH if stop is None else FinishReason.STOP
                    token = token if stop is None else stop
                if self._unscored and request_id in self._unscored:
                    logprobs = None
                routed = self.routed_experts(request_id)
                outputs.append(
                    EngineCoreOutput(request_id, [token], logprobs, finish_reason=reason, routed_experts=routed)
                )
            if outputs:
                await self.outputs_queue.put(EngineCoreOutputs(outputs=outputs))


def _samples() -> Iterator[tuple[int, Any]]:
    from vllm.v1.outputs import LogprobsLists

    for token in range(2, 2 + KINDS_OF_TOKENS):
        arrays = np.array([[token]], np.int32), np.array([[-token / 7]], np.float32), np.array([1], np.int32)
        yield token, LogprobsLists(*arrays)
