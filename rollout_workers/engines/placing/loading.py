"""Loads named Hugging Face tensors into a live module, and checks all of them before it copies any."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import nn

from broker.errors import WeightSyncError
from rollout_workers.engines.base import NamedTensors
from rollout_workers.engines.held import Held
from weightsync.tensors.fingerprint import fingerprint

_EXPERT = re.compile(r"(?P<experts>.*\.experts)\.(?P<index>\d+)\.(?P<part>gate_proj|up_proj|down_proj)\.weight")


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
        self._parameters = dict(model.named_parameters())
        self._tied = tied_names(model)
        self._filled: Counter[str] = Counter()
        self.published: list[tuple[str, torch.dtype]] = []
        """Names and number formats of all tensors that have come, as they were published."""

    def places(self, tensors: NamedTensors) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return (place, tensor) pairs. WeightSyncError names the first wrong tensor."""
        places = []
        for name, tensor in tensors:
            self.published.append((name, tensor.dtype))
            if name in self._tied:
                continue
            parameter, target = place(self._parameters, name)
            if target.shape != tensor.shape:
                raise WeightSyncError(f"{name} has shape {list(tensor.shape)}, the engine wants {list(target.shape)}")
            self._filled[parameter] += tensor.numel()
            places.append((target, tensor))
        return places

    def check_whole(self) -> None:
        """Raise WeightSyncError unless there was a tensor for every place."""
        for name, wanted in self._parameters.items():
            if self._filled[name] != wanted.numel():
                raise WeightSyncError(f"{self._filled[name]} of the {wanted.numel()} numbers of {name} were sent")


def held_tensors(model: nn.Module, published: Sequence[tuple[str, torch.dtype]]) -> Held | None:
    """Return what the model holds of these tensors; None if one was converted to another number format."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    held = {}
    for name, dtype in published:
        _, target = place(parameters, name)
        if target.dtype != dtype:
            return None
        held[name] = fingerprint(target), target.numel()
    return Held.of(held)


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


def place(parameters: Mapping[str, nn.Parameter], name: str) -> tuple[str, torch.Tensor]:
    """Return the place of a tensor of this name: the parameter's name and the part of it to fill."""
    if name in parameters:
        return name, parameters[name].detach()
    if match := _EXPERT.fullmatch(name):
        part = match["part"]
        fused = f"{match['experts']}.{'down_proj' if part == 'down_proj' else 'gate_up_proj'}"
        index = int(match["index"])
        if fused in parameters and index < len(parameters[fused]):
            expert = parameters[fused].detach()[index]
            return fused, expert if part == "down_proj" else expert.chunk(2)[part == "up_proj"]
    raise WeightSyncError(f"this model has no parameter {name}; is it of the learner's architecture?")
