"""Calls of a swap, or a sleep, into vLLM's processes, each with a deadline and told apart from our own errors."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import numpy as np

from broker.errors import HeadwayError, WeightSyncError
from rollout_workers.engines.base import Check
from rollout_workers.engines.held import Held

T = TypeVar("T")

DEADLINE_S = 300.0
"""For each call: vLLM may hang instead of failing."""

DISCARD = 2
"""vLLM's level of sleep that keeps no weights. Level 1 would copy them into memory that it pins anew every time, to be
overwritten later: a learner that trains has newer ones."""


Load = Callable[[bytes, bool], Awaitable[None]]
"""Takes what `Handover` gave, and whether that is a whole version."""


@asynccontextmanager
async def loading(llm: Any) -> AsyncIterator[Load]:
    """Yields what puts tensors into every process of a paused AsyncLLM, by vLLM's API for weight transfer.

    Whether they could be taken is found out by `prove`.
    """
    from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

    async def load(shared: bytes, is_whole: bool) -> None:
        update = {"shared": shared, "is_whole": is_whole}
        await answered("load new weights", llm.update_weights(WeightTransferUpdateRequest(update)))

    await answered("prepare for new weights", llm.start_weight_update())
    try:
        yield load
    finally:  # or vLLM would refuse the next one
        await answered("finish with new weights", llm.finish_weight_update())


async def prove(llm: Any, names: tuple[str, ...], check: Check | None) -> None:
    """Raises WeightSyncError where a process could not take what was loaded last, and what `check` raises of all that
    they hold of the tensors of these names."""
    outcomes = await answered("fingerprint weights", llm.collective_rpc("headway_outcome", args=(check is not None,)))
    for failure, _ in outcomes:
        if failure:
            raise WeightSyncError(f"vLLM failed to load the new weights: {failure}")
    if check is not None:
        check(whole(names, [held for _, held in outcomes]))


def whole(names: tuple[str, ...], processes: Sequence[tuple[bytes, bytes] | None]) -> Held | None:
    """What the processes hold together; None where one does not know. The head is its own even where the model's is
    tied."""
    known = [held for held in processes if held is not None]
    if len(known) < len(processes):
        return None
    return Held.together(
        Held(names, np.frombuffer(fingerprints, np.uint64), np.frombuffer(elements, np.int64))
        for fingerprints, elements in known
    )


async def answered(what: str, call: Coroutine[Any, Any, T]) -> T:
    """The call's answer, or WeightSyncError when it fails or takes too long."""
    try:
        async with asyncio.timeout(DEADLINE_S):
            return await call
    except TimeoutError as error:
        raise WeightSyncError(f"vLLM did not {what} within {DEADLINE_S:.0f} s; restart the worker") from error
    except HeadwayError:
        raise
    except Exception as error:  # vLLM raises no narrower one where a call fails in its processes
        raise WeightSyncError(f"vLLM failed to {what}: {error}") from error


def vllm_errors() -> tuple[type[Exception], ...]:
    """What its front end raises for bad requests, dead processes and failed calls."""
    from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

    return (EngineDeadError, EngineGenerateError, ValueError, RuntimeError)


async def sleep(llm: Any) -> None:
    """Nothing may be running."""
    await answered("save what is no weight", llm.collective_rpc("headway_before_sleep"))
    await answered("sleep", llm.sleep(level=DISCARD))


async def wake(llm: Any) -> None:
    """Without weights, but with all else."""
    await answered("wake up", llm.wake_up())
    await answered("restore what is no weight", llm.collective_rpc("headway_after_wake"))
