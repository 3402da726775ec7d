"""Brings weights into SGLang's schedulers: the front end's calls, each with a deadline, and the loader that they reach.

    engine ─► ordered(LoaderOrder) ─► update_weights_from_tensor ─► load, SGLang's `custom_weight_loader`: LoadedModel

SGLang hands the loader the model and a message. It returns a loader's errors by ending the process, and nothing else.
So the loader notes a failure, and writes what is asked of it into a file of its own process, in a directory that the
front end reads.

SGLang 0.5.17 takes weights at any time. Later releases take them between `begin_weight_update` and `end_weight_update`,
and answer `(False, reason)` outside of these. Both answer with success and a message where they fail.
"""

import logging
import pickle
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch

from headway.broker.errors import WeightSyncError
from headway.rollout_workers.engines.base import Check, WeightFingerprints
from headway.rollout_workers.engines.external_engine import EngineCalls
from headway.rollout_workers.engines.weight_loading.direct_loading import (
    DirectLoading,
    SleepBackup,
    derived_tensors,
    sum_of_processes,
)
from headway.rollout_workers.engines.weight_loading.shared_tensors import TensorMapper

from .lora_pool import PooledAdapters

LOADER = "headway.rollout_workers.engines.sglang.weight_loader.load"
"""The import path by which SGLang finds `load`."""

NAME = "headway"
"""The attribute of SGLang's model that holds what is loaded into it."""

logger = logging.getLogger(__name__)

Act = Literal["begin", "whole", "part", "adapter", "finish", "tell", "before_sleep", "after_wake"]


class LoaderOrder(msgspec.Struct, frozen=True, kw_only=True):
    """One message to the loader of every scheduler."""

    act: Act
    shared: bytes = b""
    """The bytes that `Handover` gave, of a whole version, of a part, or of an adapter."""
    place: int = 0
    """The place of the adapter."""
    scale: float = 0.0
    """The factor of the adapter's change."""
    directory: str = ""
    """The directory of the answers to "tell", each in a file that is called like the scheduler's rank."""
    wants_fingerprints: bool = False


class LoaderReport(msgspec.Struct, frozen=True, kw_only=True):
    """A scheduler's answer to "tell"."""

    failure: str
    """The first failure since the last "begin", or ""."""
    fingerprints: bytes | None
    elements: bytes | None
    """The bytes of `WeightFingerprints`'s arrays; None if they were not wanted or are not known."""


class LoadedModel:
    """Loads versions into one scheduler's model."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._mapped = TensorMapper()
        self._loading = DirectLoading(
            model.load_weights, lambda: dict(model.named_parameters()), derived=lambda: derived_tensors(model)
        )
        self._held: Callable[[], WeightFingerprints | None] = self._loading.held
        """Returns what the model holds of the tensors that came since the last "begin"."""
        self._adapters: PooledAdapters | None = None
        self._kept: SleepBackup | None = None
        self._failure = ""

    def obey(self, order: LoaderOrder) -> None:
        """Do what the order says. A failure is noted, and reported."""
        if order.act == "begin":
            self._failure, self._held = "", self._loading.held
        if order.act == "tell":
            self._tell(order)
        elif not self._failure:
            try:
                self._act(order)
            except Exception as error:  # SGLang would end the process
                logger.exception("weights not loaded")
                self._failure = f"{type(error).__name__}: {error}"

    def _act(self, order: LoaderOrder) -> None:
        acts: dict[Act, Callable[[], None]] = {
            "begin": self._loading.begin,
            "whole": lambda: self._loading.load(self._mapped.tensors(order.shared)),
            "part": lambda: self._loading.load_part(self._mapped.tensors(order.shared)),
            "adapter": lambda: self._take_adapter(order),
            "finish": self._loading.end,
            "before_sleep": self._before_sleep,
            "after_wake": self._after_wake,
        }
        acts[order.act]()
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    def _take_adapter(self, order: LoaderOrder) -> None:
        self._adapters = self._adapters or PooledAdapters(self._model)
        held = self._adapters.take(self._mapped.tensors(order.shared), order.scale, order.place)
        self._held = lambda: held

    def _tell(self, order: LoaderOrder) -> None:
        held = self._held() if order.wants_fingerprints and not self._failure else None
        report = LoaderReport(
            failure=self._failure,
            fingerprints=None if held is None else held.fingerprints_N.tobytes(),
            elements=None if held is None else held.elements_N.tobytes(),
        )
        path = Path(order.directory, str(torch.distributed.get_rank()))
        path.write_bytes(msgspec.msgpack.encode(report))

    def _before_sleep(self) -> None:
        derived = {name: tensor for name, tensor in derived_tensors(self._model).items() if tensor.is_cuda}
        parameters = {name: one for name, one in self._model.named_parameters() if one.is_cuda}
        self._kept = SleepBackup(derived, parameters, self._loading.loaded_rows())

    def _after_wake(self) -> None:
        if self._kept is not None:
            self._kept.restore()
            self._kept = None


def load(model: Any, message: list[tuple[str, torch.Tensor]]) -> None:
    """Obey the order that SGLang's `update_weights_from_tensor` brought. Raises nothing."""
    ((_, order),) = message
    held = vars(model)
    if NAME not in held:
        held[NAME] = LoadedModel(model)
    held[NAME].obey(msgspec.msgpack.decode(order.cpu().numpy().tobytes(), type=LoaderOrder))


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
        reports = _read(directory, ranks)
    for one in reports:
        if one.failure:
            raise WeightSyncError(f"SGLang failed to load the new weights: {one.failure}{remedy}")
    if check is not None:
        known = [
            None if one.fingerprints is None or one.elements is None else (one.fingerprints, one.elements)
            for one in reports
        ]
        check(sum_of_processes(names, known))


def _read(directory: str, ranks: int) -> list[LoaderReport]:
    return [msgspec.msgpack.decode(Path(directory, str(rank)).read_bytes(), type=LoaderReport) for rank in range(ranks)]


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
