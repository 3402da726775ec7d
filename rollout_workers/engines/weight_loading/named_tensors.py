"""Loads named Hugging Face tensors into a live module, and renames them for the loaders of vLLM and SGLang.

All tensors are checked before any is copied.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn

from headway.broker.errors import ForeignWeightsError, WeightSyncError
from headway.rollout_workers.engines.base import NamedTensors, WeightFingerprints
from headway.weightsync.tensors.fingerprint import fingerprint

_TABLES: "WeakKeyDictionary[nn.Module, Mapping[str, _Place]]" = WeakKeyDictionary()
"""The places in each model that lives, which are found once."""


class _Place(NamedTuple):
    """The place of a file's tensor within one of the model's."""

    name: str
    """The model's name for the tensor that holds it."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the place in this tensor of the model."""
        return tensor.detach().as_strided(self.shape, self.strides, tensor.storage_offset() + self.offset)


def load_tensors(model: nn.Module, tensors: NamedTensors) -> None:
    """Copy `tensors` into `model`, or raise WeightSyncError and change nothing."""
    fill(find_places(model, tensors))


@torch.no_grad()
def fill(places: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy every tensor to its place."""
    for target, tensor in places:
        target.copy_(tensor)


def find_places(model: nn.Module, tensors: NamedTensors) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return (place, tensor) pairs that fill the whole model. WeightSyncError names the first wrong tensor.

    Experts may come fused, as transformers holds them, or one by one, as checkpoints do; tied tensors may be left out.
    """
    filling = Filling(model)
    places = filling.places(tensors)
    filling.check_whole()
    return places


class Filling:
    """Fills a model with one version, some tensors at a time: finds each tensor's place and knows whether all have
    come."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self._held = model, _held(model)
        self._tied = tied_names(model)
        self._filled: Counter[str] = Counter()
        self.published: list[tuple[str, torch.dtype]] = []
        """Names and number formats of all tensors that have come, as they were published."""

    def places(self, tensors: NamedTensors) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return (place, tensor) pairs. WeightSyncError names the first wrong tensor."""
        places = []
        for name, tensor in tensors:
            self.published.append((name, tensor.dtype))
            holder, target = place(self._model, self._held, name)
            if holder in self._tied:
                continue
            if target.shape != tensor.shape:
                raise ForeignWeightsError(
                    f"{name} has shape {list(tensor.shape)}, the engine wants {list(target.shape)}"
                )
            self._filled[holder] += tensor.numel()
            places.append((target, tensor))
        return places

    def check_whole(self) -> None:
        """Raise WeightSyncError unless there was a tensor for every place."""
        for name, wanted in self._held.items():
            if name not in self._tied and self._filled[name] != wanted.numel():
                raise WeightSyncError(f"{self._filled[name]} of the {wanted.numel()} numbers of {name} were sent")


def held_tensors(model: nn.Module, published: Sequence[tuple[str, torch.dtype]]) -> WeightFingerprints | None:
    """Return what the model holds of these tensors; None if one was converted to another number format."""
    tensors = _held(model)
    held = {}
    for name, dtype in published:
        _, target = place(model, tensors, name)
        if target.dtype != dtype:
            return None
        held[name] = fingerprint(target), target.numel()
    return WeightFingerprints.of(held)


def tied_names(model: nn.Module) -> set[str]:
    """Return the second names of shared parameters, such as lm_head.weight."""
    return {name for name, _ in model.named_parameters(remove_duplicate=False)} - {
        name for name, _ in model.named_parameters()
    }


def one_by_one(tensors: NamedTensors) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors with fused experts taken apart, under the names that checkpoints have."""
    for name, tensor in tensors:
        if not is_fused(name):
            yield name, tensor
            continue
        prefix, _, part = name.rpartition(".")
        for index, expert in enumerate(tensor):
            if part == "down_proj":
                yield f"{prefix}.{index}.down_proj.weight", expert
            else:
                gate, up = expert.chunk(2)
                yield f"{prefix}.{index}.gate_proj.weight", gate
                yield f"{prefix}.{index}.up_proj.weight", up


def is_fused(name: str) -> bool:
    """Whether a tensor of this name holds all experts of a layer."""
    prefix, _, part = name.rpartition(".")
    return prefix.endswith(".experts") and part in ("gate_up_proj", "down_proj")


def place(model: nn.Module, held: Mapping[str, torch.Tensor], name: str) -> tuple[str, torch.Tensor]:
    """Return the place of a tensor of this name, the model's own or its files': the name of what `held` of it, as
    `state_dict` names it, and the part of that to fill. Raises ForeignWeightsError where the model has none."""
    if name in held:
        return name, held[name].detach()
    if (found := _places(model).get(name)) is not None:
        return found.name, found.of(held[found.name])
    raise ForeignWeightsError(
        f"this {type(model).__name__} has no parameter {name}; is it of the learner's architecture? If it is, use"
        " engine.kind=vllm, which loads it by itself"
    )


def _held(model: nn.Module) -> dict[str, torch.Tensor]:
    return model.state_dict(keep_vars=True)


def _places(model: nn.Module) -> Mapping[str, _Place]:
    """Return the place of each tensor of the model's files, by its name there, where that is another one than here.

    transformers' own table says how the model is written to files: it renames tensors, takes experts apart, and more.
    """
    if model not in _TABLES:
        _TABLES[model] = dict(_found(model)) if hasattr(model, "base_model_prefix") else {}
    return _TABLES[model]


@torch.no_grad()
def _found(model: Any) -> Iterator[tuple[str, _Place]]:
    from transformers.core_model_loading import revert_weight_conversion

    for name, tensor in _held(model).items():
        blank = tensor.detach().to("meta")
        written = revert_weight_conversion(model, {name: blank})
        if any(part is not blank for part in written.values()) and not tensor.is_meta:
            numbers = torch.arange(tensor.numel()).view(tensor.shape)
            written = revert_weight_conversion(model, {name: numbers})
        for other, part in written.items():
            lies = _Place(name, tuple(part.shape), *_lattice(part))
            if other != name and (part.is_meta or torch.equal(lies.of(numbers), part)):
                yield other, lies


def _lattice(numbers: torch.Tensor) -> tuple[tuple[int, ...], int]:
    """Return the strides and the offset of elements with these numbers, as far as their first neighbours tell."""
    if numbers.is_meta or not numbers.numel():
        return numbers.stride(), 0
    first = int(numbers.flatten()[0])
    strides = [
        int(numbers.select(dim, 1).flatten()[0]) - first if size > 1 else 1 for dim, size in enumerate(numbers.shape)
    ]
    return tuple(strides), first


HEAD = "lm_head.weight"


def wanted_tensors(shapes: torch.nn.Module, tensors: NamedTensors) -> NamedTensors:
    """Return the tensors as vLLM and SGLang want them: experts one by one, and a head of its own even if it is tied.

    Raises WeightSyncError unless they are the whole model.
    """
    find_places(shapes, tensors)
    return renamed(tied_head(shapes), tensors)


def renamed(tied_to_head: str | None, tensors: NamedTensors) -> NamedTensors:
    """Do as `wanted_tensors` for some of the tensors, without a check: the engine's processes know what they want."""
    named = dict(one_by_one(tensors))
    if tied_to_head in named:
        named[HEAD] = named[tied_to_head]
    return list(named.items())


def tied_head(shapes: torch.nn.Module) -> str | None:
    """Return the name of the tensor that the head is tied to; None if the head is not tied."""
    if HEAD not in tied_names(shapes):
        return None
    embedding = shapes.get_input_embeddings().weight  # type: ignore[operator]
    return next(name for name, parameter in shapes.named_parameters() if parameter is embedding)
