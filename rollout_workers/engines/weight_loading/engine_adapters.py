"""The adapters of an engine: the places that hold them, and checks that tensors are an adapter of the engine's model.

A request keeps its place. A new version takes one that no request needs, so running requests finish with theirs; where
all are needed it takes that of the oldest version, whose requests go on with the new one.

R rank, I input features, O output features, E experts.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from headway.broker.errors import WeightSyncError
from headway.broker.schema import WeightVersion
from headway.rollout_workers.engines.base import NamedTensors, WeightFingerprints
from headway.weightsync.tensors.fingerprint import fingerprint_part


class AdapterPlaces:
    """The places 1 to `count`; 0 is the place of requests that are computed without an adapter."""

    def __init__(self, count: int, engine: str) -> None:
        """`engine`: its name, for errors."""
        self.newest = 0
        """The place of requests that begin now."""
        self.base_is_new = False
        """Whether no adapter has come since the engine got its base."""
        self._count = count
        self._engine = engine
        self._changing = 0
        """The place that `next` has given and that holds no version yet; 0: none."""
        self._versions: dict[int, WeightVersion] = {}
        self._requests = Counter[int]()

    def next(self) -> int:
        """Return the place for a new version: the same one until it holds a version, since a load that has failed may
        have left anything there."""
        never = WeightVersion(0, 0)
        self._changing = self._changing or min(
            range(1, self._count + 1), key=lambda place: (self.is_needed(place), self._versions.get(place, never))
        )
        return self._changing

    def is_needed(self, place: int) -> bool:
        """Return whether a request is computed with what the place holds."""
        return self._requests[place] > 0

    def is_open(self, place: int) -> bool:
        """Return whether requests are computed with what the place holds, or may begin there before a pause."""
        return self.is_needed(place) or place == self.newest

    @property
    def are_needed(self) -> bool:
        """Whether any request runs."""
        return any(self._requests.values())

    def check_there_are(self) -> None:
        """Raise WeightSyncError if the engine was started without a place for adapters."""
        if not self._count:
            raise WeightSyncError(
                f"{self._engine} was started without adapters, and the run's versions are adapters: set"
                " weights.adapter=merged, or start the worker with the run's own configuration"
            )

    def check_are_unused(self) -> None:
        """Raise WeightSyncError if requests name adapters, which whole weights do not replace."""
        if self.newest:
            raise WeightSyncError("this engine's requests are computed with an adapter: give it adapters alone")

    def check_base_is_free(self) -> None:
        """Raise WeightSyncError if requests run that no adapter of another base would go on with."""
        if self.are_needed and (self._count > 1 or not self.newest):
            raise WeightSyncError("another base has come while requests run that keep theirs: restart the worker")

    def check_adapter_may_come(self) -> None:
        """Raise WeightSyncError if a request has begun since another base came."""
        if self.base_is_new:
            self.check_base_is_free()

    def hold(self, place: int, version: WeightVersion) -> None:
        """Compute with this version in the place, and begin requests there."""
        self._versions[place], self.newest, self._changing = version, place, 0
        self.base_is_new = self.base_is_new and not place

    def version(self, place: int) -> WeightVersion:
        """Return the version that the place holds; of place 0, which has the base of all, that of the newest place."""
        return self._versions[place or self.newest]

    @contextmanager
    def kept(self, place: int | None = None) -> Iterator[int]:
        """Keep a place (None: the newest) for one request, and yield it."""
        place = self.newest if place is None else place
        self._requests[place] += 1
        try:
            yield place
        finally:
            self._requests[place] -= 1


FACTOR_NAME = re.compile(r"(?P<module>.+)\.(?P<weight>gate_up_proj_|down_proj_|)lora_(?P<factor>[AB])")
"""The name of A or B: the module that holds the weight, the weight's name if it is that of experts, the factor."""


def check_adapter(modules: Mapping[str, nn.Module], tensors: NamedTensors) -> None:
    """Raise WeightSyncError unless `tensors` are whole changes of weights of these modules: A [R, I] and B [O, R] of
    each, with E before these for experts."""
    given = {name: tensor.shape for name, tensor in tensors}
    for name, shape in given.items():
        match = FACTOR_NAME.fullmatch(name)
        module = modules.get(match["module"]) if match else None
        if match is None or module is None:
            raise WeightSyncError(f"the engine's model has no place for {name} of an adapter")
        weight: torch.Tensor | None = getattr(module, match["weight"].rstrip("_") or "weight", None)
        first, second = (given.get(f"{name[:-1]}{factor}") for factor in "AB")
        if weight is None or first is None or second is None:
            raise WeightSyncError(f"{name} is half of an adapter, or has no weight to change")
        *outer, rows, columns = weight.shape
        rank = second[-1]
        if (tuple(first), tuple(second)) != ((*outer, rank, columns), (*outer, rows, rank)):
            raise WeightSyncError(
                f"{name} has shape {list(shape)}, which fits no change of a weight of shape {list(weight.shape)}"
            )


def wanted_adapter(modules: Mapping[str, nn.Module], tensors: NamedTensors) -> NamedTensors:
    """Return the tensors of an adapter. Raises WeightSyncError unless they are one of a model with these modules."""
    check_adapter(modules, tensors)
    return tensors


def decoder_linears(shapes: nn.Module) -> list[str]:
    """Return the last names of the decoder's linear layers, which adapters may change; the head is not among them. Of a
    model with experts they are those of attention: with another one SGLang would compute all experts by its kernels for
    adapters."""
    modules = dict(shapes.named_modules())
    within = ".self_attn." if any(hasattr(module, "has_gate") for module in modules.values()) else ".layers."
    linears = (name for name, module in modules.items() if isinstance(module, nn.Linear))
    return sorted({name.rpartition(".")[2] for name in linears if within in f".{name}"})


def held_adapter(
    tensors: Mapping[str, torch.Tensor],
    read: Callable[[str, torch.Size], tuple[torch.Tensor, torch.Tensor] | None],
) -> WeightFingerprints | None:
    """Return what an engine's process holds of these factors; None if it holds one in another number format.

    `read` returns the part of its memory that holds one of this name and shape, and which part of the factor that is: a
    view without memory, which has its place and its steps. It returns None for a factor that the process has not.
    """
    found = {}
    for name, tensor in tensors.items():
        located = read(name, tensor.shape)
        if located is None:
            found[name] = 0, 0
            continue
        part, shard = located
        if part.dtype != tensor.dtype:
            return None
        fingerprint = fingerprint_part(part.contiguous(), int(shard.storage_offset()), *shard.stride())
        found[name] = fingerprint, part.numel()
    return WeightFingerprints.of(found)
