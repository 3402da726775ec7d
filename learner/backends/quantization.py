"""Frozen weights in 4 or 8 bits: numbers of a row or block share a scale, and each is a code of few bits.

`QuantizedBase` puts them in the place of the parameters of a model's linear layers and experts.

    nf4    4 bits, blocks of 64 numbers, codes at the quantiles of a normal distribution (Dettmers et al. 2023,
           arXiv:2305.14314, section 3), by the library bitsandbytes
    int8   8 bits, evenly spaced, a scale for each row

A weight is quantized in fp32 as its file has it, so a GPU, a CPU and an export have the same codes.
"""

import types
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from headway.broker.errors import ConfigError
from headway.broker.installation import is_installed
from headway.learner.models.lora import Target, adaptable
from headway.learner.models.pretrained import unfilled

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


BLOCK = 64
"""Numbers that share a scale in nf4."""
LARGEST = 127
"""The largest code of int8."""


def check_quantizer(kind: str, file: Path | None = None) -> None:
    """Raises ConfigError, with the remedy, where the library for this kind is missing. `file`: what names the kind, if
    that is no recipe."""
    if kind != "nf4" or is_installed("bitsandbytes"):
        return
    remedy = "needs bitsandbytes, which is not installed: pip install 'headway[quantized]'."
    if file is not None:
        raise ConfigError(f"model.path: {file} says that the adapter's base is in nf4, which {remedy}")
    raise ConfigError(f"model.adapter.quantize_base=nf4 {remedy} int8 needs no further package.")


def check_blocks(target: Target, kind: str) -> None:
    """Raises ConfigError for a weight that nf4 does not cut into whole blocks. Of experts, gate and up are two."""
    parts = 2 if target.weight == "gate_up_proj" else 1
    if kind == "nf4" and target.inputs * target.outputs // parts % BLOCK:
        raise ConfigError(
            f"model.adapter.quantize_base=nf4 takes weights of whole blocks of {BLOCK} numbers, and {target.name} has"
            f" {target.outputs // parts} x {target.inputs}. Take int8."
        )


class QuantizedWeight(NamedTuple):
    """A weight in few bits."""

    kind: str
    codes: torch.Tensor
    """[numbers / 2] uint8 for nf4, two of them in a byte; int8 in the weight's shape for int8."""
    scales: torch.Tensor
    """fp32: one for each block, or each row."""
    shape: tuple[int, ...]

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the weight in a number format."""
        if self.kind == "int8":
            # Each product is rounded as it is written: in fp32 an MoE model's experts of a layer take gigabytes.
            weight = torch.empty(self.shape, dtype=dtype, device=self.codes.device)
            return torch.mul(self.codes, self.scales, out=weight)
        from bitsandbytes.functional import QuantState, dequantize_4bit

        # A block to a row: the library's kernel for CPUs (0.50) takes scales of other blocks where blocks cross rows.
        shape = torch.Size((len(self.scales), BLOCK))
        state: Any = QuantState(absmax=self.scales, shape=shape, blocksize=BLOCK, quant_type=self.kind, dtype=dtype)
        blocks: torch.Tensor = dequantize_4bit(self.codes[:, None], state)
        return blocks.view(self.shape)


def quantize(weight: torch.Tensor, kind: str) -> QuantizedWeight:
    """Return a weight of a shape whose last dimension are the input features, in few bits on its device."""
    weight = weight.float().contiguous()
    if kind == "int8":
        scales = weight.abs().amax(-1, keepdim=True) / LARGEST
        codes = (weight / scales.where(scales > 0, 1.0)).round().to(torch.int8)
        return QuantizedWeight(kind, codes, scales, tuple(weight.shape))
    from bitsandbytes.functional import quantize_4bit

    packed, state = quantize_4bit(weight, blocksize=BLOCK, quant_type=kind)
    return QuantizedWeight(kind, packed[:, 0], state.absmax, tuple(weight.shape))


def empty(shape: tuple[int, ...], kind: str, device: torch.device) -> QuantizedWeight:
    """Return a weight with undefined contents."""
    if kind == "int8":
        codes = torch.empty(shape, dtype=torch.int8, device=device)
        return QuantizedWeight(kind, codes, torch.empty(*shape[:-1], 1, device=device), shape)
    count = torch.Size(shape).numel()
    codes = torch.empty(count // 2, dtype=torch.uint8, device=device)
    return QuantizedWeight(kind, codes, torch.empty(count // BLOCK, device=device), shape)


def quantized_bytes(shape: tuple[int, ...], kind: str) -> int:
    """Return the bytes of a weight of this shape."""
    made = empty(shape, kind, torch.device("meta"))
    return made.codes.nbytes + made.scales.nbytes


def quantized_weights(config: "PretrainedConfig", kind: str) -> dict[str, int]:
    """Return the bytes of each weight of a model that is held in few bits, by its name in the model."""
    weights = adaptable(unfilled(config))
    return {one.parameter: quantized_bytes(one.shape, kind) for one in weights}


class _FrozenProduct(torch.autograd.Function):
    """Rows times a weight, transposed. The backward pass makes the weight dense again, so none is kept."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weight: QuantizedWeight) -> torch.Tensor:
        ctx.weight = weight
        return F.linear(rows, weight.dense(rows.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0] @ ctx.weight.dense(gradients[0].dtype), None


class _FrozenGroupedProduct(torch.autograd.Function):
    """Each row times its expert's weight, transposed, as above."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, weight: QuantizedWeight, offsets_E: torch.Tensor, product: Any
    ) -> torch.Tensor:
        ctx.weight, ctx.product = weight, product
        ctx.save_for_backward(offsets_E)
        output: torch.Tensor = product(rows, weight.dense(rows.dtype).transpose(1, 2), offs=offsets_E)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (offsets_E,) = ctx.saved_tensors
        weight = ctx.weight.dense(gradients[0].dtype)
        return ctx.product(gradients[0].contiguous(), weight, offs=offsets_E), None, None, None


def frozen_product(rows: torch.Tensor, weight: QuantizedWeight) -> torch.Tensor:
    """[..., O] rows [..., I] times a weight [O, I]; the weight gets no gradient."""
    output: torch.Tensor = _FrozenProduct.apply(rows, weight)  # type: ignore[no-untyped-call]
    return output


def frozen_grouped_product(
    rows: torch.Tensor, weight: QuantizedWeight, offsets_E: torch.Tensor, product: Any
) -> torch.Tensor:
    """[N, O] each row [I] times its expert's matrix of [E, O, I], by a function like torch's grouped_mm."""
    output: torch.Tensor = _FrozenGroupedProduct.apply(rows, weight, offsets_E, product)  # type: ignore[no-untyped-call]
    return output


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
    """Return the module's weight of this name: a tensor, or `QuantizedWeight`."""
    if not hasattr(module, f"{name}_kind"):
        return getattr(module, name)
    kind, shape = getattr(module, f"{name}_kind")
    return QuantizedWeight(kind, getattr(module, f"{name}_{CODES}"), getattr(module, f"{name}_{SCALES}"), shape)


def _linear(linear: Any, rows: torch.Tensor) -> torch.Tensor:
    """[..., O] as a linear layer computes it."""
    output = frozen_product(rows, weight_of(linear, "weight"))
    return output if linear.bias is None else output + linear.bias
