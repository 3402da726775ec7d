"""Loads weights in SGLang's schedulers, as its `custom_weight_loader`. SGLang hands it the model and a message.

SGLang returns a loader's errors by ending the process, and nothing else. So the loader notes a failure, and writes what
is asked of it into a file of its own process, in a directory that the front end reads.
"""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch

from headway.rollout_workers.engines.held import Held
from headway.rollout_workers.engines.placing.direct_loading import DirectLoading
from headway.rollout_workers.engines.placing.shared_tensors import Mapped
from headway.rollout_workers.engines.placing.sleeping import Kept, derived_tensors

from .adapters import PooledAdapters

LOADER = "headway.rollout_workers.engines.sglang.loader.load"
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


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """A scheduler's answer to "tell"."""

    failure: str
    """The first failure since the last "begin", or ""."""
    fingerprints: bytes | None
    elements: bytes | None
    """The bytes of `Held`'s arrays; None if they were not wanted or are not known."""


class LoadedModel:
    """Loads versions into one scheduler's model."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._mapped = Mapped()
        self._loading = DirectLoading(
            model.load_weights, lambda: dict(model.named_parameters()), derived=lambda: derived_tensors(model)
        )
        self._held: Callable[[], Held | None] = self._loading.held
        """Returns what the model holds of the tensors that came since the last "begin"."""
        self._adapters: PooledAdapters | None = None
        self._kept: Kept | None = None
        self._failure = ""

    def obey(self, order: LoaderOrder) -> None:
        """Do what the order says. A failure is noted, and told."""
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
        told = Told(
            failure=self._failure,
            fingerprints=None if held is None else held.fingerprints_N.tobytes(),
            elements=None if held is None else held.elements_N.tobytes(),
        )
        path = Path(order.directory, str(torch.distributed.get_rank()))
        path.write_bytes(msgspec.msgpack.encode(told))

    def _before_sleep(self) -> None:
        derived = {name: tensor for name, tensor in derived_tensors(self._model).items() if tensor.is_cuda}
        parameters = {name: one for name, one in self._model.named_parameters() if one.is_cuda}
        self._kept = Kept(derived, parameters, self._loading.loaded_rows())

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
