"""The frozen weights of linear layers and experts in 4 or 8 bits, in the place of their parameters.

Each rank holds them whole: they are buffers, which are neither sharded, gathered nor saved. All other frozen weights
(embeddings, head, norms, routers) stay parameters in `model.dtype`.
"""

import types
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from headway.broker.errors import ConfigError
from headway.learner.backends.quantized import Quantized, check_blocks, check_quantizer, empty, frozen_product, quantize
from headway.learner.models.adapters import Target, adaptable

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CODES, SCALES = "codes", "scales"


def is_quantized(name: str) -> bool:
    """Whether a model's buffer of this name is of a quantized weight."""
    return name.endswith((f"_{CODES}", f"_{SCALES}"))


class QuantizedBase:
    """The quantized weights of one model."""

    def __init__(self, model: "PreTrainedModel", kind: str, dtype: torch.dtype) -> None:
        """Quantize the model's weights; of one without memory for them, make room, which `put` fills. Raises
        ConfigError where the library is missing, and for weights that do not fit."""
        check_quantizer(kind)
        self.kind = kind
        self._dtype = dtype
        modules = dict(model.named_modules())
        self._held = {target.parameter: (modules[target.module], target) for target in adaptable(model)}
        for target in self.targets:
            check_blocks(target, kind)
        for module, target in self._held.values():
            self._replace(module, target)

    def _replace(self, module: nn.Module, target: Target) -> None:
        weight = module._parameters.pop(target.weight)
        assert weight is not None
        shape = tuple(weight.shape)
        held = empty(shape, self.kind, weight.device) if weight.is_meta else quantize(weight.detach(), self.kind)
        module.register_buffer(f"{target.weight}_{CODES}", held.codes, persistent=False)
        module.register_buffer(f"{target.weight}_{SCALES}", held.scales, persistent=False)
        setattr(module, f"{target.weight}_kind", (self.kind, shape))
        if not target.experts:
            module.forward = types.MethodType(_linear, module)

    @property
    def targets(self) -> list[Target]:
        """The quantized weights, in the model's order."""
        return [target for _, target in self._held.values()]

    def placeholders(self) -> dict[str, torch.Tensor]:
        """Return tensors without memory by the parameters' names, in their shapes."""
        return {
            name: torch.empty(weight_of(module, target.weight).shape, device="meta")
            for name, (module, target) in self._held.items()
        }

    @torch.no_grad()
    def put(self, name: str, weight: torch.Tensor) -> None:
        """Set a weight. Raises ConfigError where it has another shape."""
        module, target = self._held[name]
        held = weight_of(module, target.weight)
        if tuple(weight.shape) != held.shape:
            raise ConfigError(f"{name} has the shape {list(weight.shape)}, config.json says {list(held.shape)}.")
        made = quantize(weight.to(held.codes.device), self.kind)
        held.codes.copy_(made.codes)
        held.scales.copy_(made.scales)

    def of_block(self, prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the weights of one decoder layer in `model.dtype`; its names begin with `prefix`."""
        for name, (module, target) in self._held.items():
            if name.startswith(prefix):
                yield name, weight_of(module, target.weight).dense(self._dtype)

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield all codes and scales."""
        for module, target in self._held.values():
            held = weight_of(module, target.weight)
            yield from (held.codes, held.scales)


def weight_of(module: Any, name: str) -> Any:
    """Return the module's weight of this name: a tensor, or `Quantized`."""
    if not hasattr(module, f"{name}_kind"):
        return getattr(module, name)
    kind, shape = getattr(module, f"{name}_kind")
    return Quantized(kind, getattr(module, f"{name}_{CODES}"), getattr(module, f"{name}_{SCALES}"), shape)


def _linear(linear: Any, rows: torch.Tensor) -> torch.Tensor:
    """[..., O] as a linear layer computes it."""
    output = frozen_product(rows, weight_of(linear, "weight"))
    return output if linear.bias is None else output + linear.bias
