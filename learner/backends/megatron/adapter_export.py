"""A and B gathered from the ranks that hold parts of them, one decoder layer at a time."""

import itertools
from collections.abc import Iterator

import torch

from headway.learner.models.adapters import Target, merged, peft_names, to_peft

from .adapter_mapping import LAYER, factor_names, layer_of
from .adapters import LayerAdapters
from .export import Exporter

Factors = tuple[torch.Tensor, torch.Tensor]


class AdapterExport:
    """The tensors of an adapter, and of the model that it makes of its base. All calls are collective."""

    def __init__(self, adapters: LayerAdapters, exporter: Exporter) -> None:
        self._adapters = adapters
        self._exporter = exporter

    def factor_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield A and B of every adapted weight by the model's names, in the model's order."""
        for target, factors in self._factors():
            yield from zip(target.factors, factors, strict=True)

    def adapter_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield them by their names, and in their form, in PEFT's files."""
        names = peft_names(self._adapters.targets)
        for target, factors in self._factors():
            yield from zip(names[target.parameter], to_peft(target, *factors), strict=True)

    def merged_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the model's tensors by Hugging Face name, changed by the adapter."""
        layer, changes = "", dict[str, Factors]()
        for name, tensor in self._exporter.named_tensors():
            found = LAYER.search(name)
            if found and found.group(1) != layer:
                layer = found.group(1)
                changes = dict(_by_file(self._of_layer(int(layer))))
            factors = changes.get(name)
            yield name, tensor if factors is None else merged(tensor, factors, self._adapters.config.scale)

    def _factors(self) -> Iterator[tuple[Target, Factors]]:
        for layer, _ in itertools.groupby(self._adapters.targets, key=layer_of):
            yield from self._of_layer(layer).items()

    def _of_layer(self, layer: int) -> dict[Target, Factors]:
        """Return A and B of a layer's targets, whole."""
        gathered = dict(self._exporter.tensors(self._adapters.bindings(layer)))
        return {target: _of_target(target, gathered) for target in self._adapters.targets if layer_of(target) == layer}


def _of_target(target: Target, gathered: dict[str, torch.Tensor]) -> Factors:
    if not target.experts:
        first, second = (gathered[name] for name in target.factors)
        return first, second
    names = zip(*(factor_names(target, expert) for expert in range(target.experts)), strict=True)
    first, second = (torch.stack([gathered[name] for name in of_experts]) for of_experts in names)
    return first, second


def _by_file(layer: dict[Target, Factors]) -> Iterator[tuple[str, Factors]]:
    """Yield the factors of each tensor in files, which have one for each expert, and gate and up apart."""
    for target, (first, second) in layer.items():
        if not target.experts:
            yield target.parameter, (first, second)
            continue
        parts = ("gate_proj", "up_proj") if target.weight == "gate_up_proj" else (target.weight,)
        for expert in range(target.experts):
            for part, rows in zip(parts, second[expert].chunk(len(parts)), strict=True):
                yield f"{target.module}.{expert}.{part}.weight", (first[expert], rows)
