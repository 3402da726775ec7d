"""Calls of a swap or a sleep into SGLang's schedulers, each with a deadline.

SGLang 0.5.17 takes weights at any time. Later releases take them between `begin_weight_update` and `end_weight_update`,
and answer `(False, reason)` outside of these. Both answer with success and a message where they fail.
"""

import pickle
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch

from headway.broker.errors import WeightSyncError
from headway.rollout_workers.engines.base import Check
from headway.rollout_workers.engines.deadline import EngineCalls
from headway.rollout_workers.engines.placing.held_rows import whole

from .loader import LOADER, LoaderOrder, Told

answered = EngineCalls("SGLang").answered

TAGS = ["kv_cache", "weights"]
"""The memory that a sleep frees. CUDA graphs stay."""


@asynccontextmanager
async def session(front: Any) -> AsyncIterator[None]:
    """Wrap calls of `ordered`: a session of SGLang's, where the release has them."""
    if not hasattr(front, "begin_weight_update"):
        yield
        return
    from sglang.srt.managers import io_struct

    agreed(
        "begin an update", await answered("begin an update", front.begin_weight_update(_new(io_struct, "Begin"), None))
    )
    try:
        yield
    finally:  # otherwise SGLang would refuse the next update
        agreed("end an update", await answered("end an update", front.end_weight_update(_new(io_struct, "End"), None)))


def _new(io_struct: Any, which: str) -> Any:
    return getattr(io_struct, f"{which}WeightUpdateReqInput")()


async def ordered(front: Any, ranks: int, order: LoaderOrder) -> None:
    """Have the loader of every scheduler obey. No request may be running."""
    from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput

    encoded = torch.frombuffer(bytearray(msgspec.msgpack.encode(order)), dtype=torch.uint8)
    message = pickle.dumps([("order", encoded)])
    asked = UpdateWeightsFromTensorReqInput(
        serialized_named_tensors=[message] * ranks, load_format=LOADER, flush_cache=False
    )
    agreed("load new weights", await answered("load new weights", front.update_weights_from_tensor(asked, None)))


def agreed(what: str, answer: Any) -> None:
    """Raise WeightSyncError for an answer of failure, a tuple or an object."""
    success, message = answer[:2] if isinstance(answer, tuple) else (answer.success, answer.message)
    if not success:
        raise WeightSyncError(f"SGLang failed to {what}: {message}")


async def prove(front: Any, ranks: int, names: tuple[str, ...], check: Check | None, remedy: str = "") -> None:
    """Raise WeightSyncError, with the remedy, if a scheduler could not take what was loaded last, and whatever `check`
    raises for what the schedulers hold of the tensors `names`."""
    with tempfile.TemporaryDirectory(prefix="headway-sglang-") as directory:
        order = LoaderOrder(act="tell", directory=directory, wants_fingerprints=check is not None)
        async with session(front):
            await ordered(front, ranks, order)
        told = _read(directory, ranks)
    for one in told:
        if one.failure:
            raise WeightSyncError(f"SGLang failed to load the new weights: {one.failure}{remedy}")
    if check is not None:
        known = [
            None if one.fingerprints is None or one.elements is None else (one.fingerprints, one.elements)
            for one in told
        ]
        check(whole(names, known))


def _read(directory: str, ranks: int) -> list[Told]:
    return [msgspec.msgpack.decode(Path(directory, str(rank)).read_bytes(), type=Told) for rank in range(ranks)]


async def sleep(front: Any, ranks: int) -> None:
    """Free the GPU's memory. No request may be running."""
    from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput

    async with session(front):
        await ordered(front, ranks, LoaderOrder(act="begin"))
        await ordered(front, ranks, LoaderOrder(act="before_sleep"))
    await prove(front, ranks, (), None)
    asked = ReleaseMemoryOccupationReqInput(tags=list(TAGS))
    await answered("sleep", front.release_memory_occupation(asked, None))


async def wake(front: Any, ranks: int) -> None:
    """Take the memory again and restore what is no weight. Weights come with the next swap."""
    from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqInput

    await answered("wake up", front.resume_memory_occupation(ResumeMemoryOccupationReqInput(tags=list(TAGS)), None))
    async with session(front):
        await ordered(front, ranks, LoaderOrder(act="begin"))
        await ordered(front, ranks, LoaderOrder(act="after_wake"))
    await prove(front, ranks, (), None)
