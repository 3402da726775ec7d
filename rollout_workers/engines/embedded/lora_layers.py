"""An adapter in the embedded engine: W x + scale * B (A x), added by the modules that hold the weights W.

The base stays as it is, so a swap copies an adapter's few tensors and no version is a rounding of another one; the
learner computes the same sum in the same order.

R rank, I input features, O output features, E experts, T tokens, K experts chosen for each.
"""

import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from headway.rollout_workers.engines.base import NamedTensors, WeightFingerprints
from headway.rollout_workers.engines.weight_loading.engine_adapters import FACTOR_NAME
from headway.weightsync.tensors.fingerprint import fingerprint


class Adapter:
    """The adapter of one model, which computes without any until the first one is given."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = dict(model.named_modules())
        """The model's modules by name."""
        self._factors: dict[str, torch.Tensor] = {}
        """A and B by name, in the memory that forward passes read."""
        self._changed: dict[str, _Factors] = {}
        """The factors of each module that computes with some."""

    @torch.no_grad()
    def fill(self, tensors: NamedTensors, scale: float) -> None:
        """Take the adapter in the place of the one before."""
        if {name for name, _ in tensors} != set(self._factors):
            self.drop()
            for name, tensor in tensors:
                self._add(name, tensor)
        for name, tensor in tensors:
            self._factors[name].copy_(tensor)
        for factors in self._changed.values():
            factors.scale = scale

    def drop(self) -> None:
        """Compute without an adapter from now on."""
        for name in self._changed:
            self.modules[name].__dict__.pop("forward", None)  # the class's own again
        self._factors, self._changed = {}, {}

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """A context in which the same modules compute by the same kernels, and add nothing."""
        scales = [factors.scale for factors in self._changed.values()]
        try:
            for factors in self._changed.values():
                factors.scale = 0.0
            yield
        finally:
            for factors, scale in zip(self._changed.values(), scales, strict=True):
                factors.scale = scale

    def held(self, tensors: NamedTensors) -> WeightFingerprints | None:
        """Return what forward passes read of these tensors; None if one was converted to another number format."""
        read = {
            f"{module}.{name}": tensor
            for module, factors in self._changed.items()
            if factors.is_read_by(self.modules[module])
            for name, tensor in factors.tensors.items()
        }
        if any(name in read and read[name].dtype != tensor.dtype for name, tensor in tensors):
            return None
        return WeightFingerprints.of({name: (fingerprint(tensor), tensor.numel()) for name, tensor in read.items()})

    def _add(self, name: str, tensor: torch.Tensor) -> None:
        match = FACTOR_NAME.fullmatch(name)
        assert match is not None, "`check_adapter` has looked"
        module, weight = match["module"], match["weight"]
        place = next(self.modules[module].parameters(recurse=False))
        held = self._factors[name] = torch.empty_like(tensor, device=place.device, dtype=place.dtype)
        if module not in self._changed:
            self._changed[module] = _Factors()
            forward = _experts if weight else _linear
            self.modules[module].forward = types.MethodType(_with(self._changed[module], forward), self.modules[module])
        self._changed[module].tensors[f"{weight}lora_{match['factor']}"] = held


class _Factors:
    """The factors that one module adds."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.scale = 0.0

    def is_read_by(self, module: nn.Module) -> bool:
        """Whether the module's forward pass adds these factors: another forward pass computes without them."""
        return getattr(module.forward, "factors", None) is self

    def change(self, rows: torch.Tensor, weight: str = "", expert: int | None = None) -> torch.Tensor | float:
        """[..., O] scale * B (A x); 0 for a weight that the adapter does not change."""
        first, second = (self.tensors.get(f"{weight}lora_{factor}") for factor in "AB")
        if first is None or second is None:
            return 0.0
        if expert is not None:
            first, second = first[expert], second[expert]
        return F.linear(F.linear(rows, first), second) * self.scale


def _with(factors: _Factors, forward: Any) -> Any:
    def changed(module: nn.Module, *inputs: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = forward(module, factors, *inputs)
        return output

    changed.factors = factors  # type: ignore[attr-defined]
    return changed


def _linear(linear: Any, factors: _Factors, rows: torch.Tensor) -> torch.Tensor:
    output: torch.Tensor = type(linear).forward(linear, rows)
    return output + factors.change(rows)


def _experts(
    experts: Any, factors: _Factors, tokens_TH: torch.Tensor, experts_TK: torch.Tensor, weights_TK: torch.Tensor
) -> torch.Tensor:
    """[T, H] the sum over each token's experts of weight * down(act(gate(x)) * up(x)), expert by expert."""
    output_TH = torch.zeros_like(tokens_TH)
    for expert in sorted(set(experts_TK.flatten().tolist())):
        token_N, choice_N = torch.where(experts_TK == expert)
        rows_NH = tokens_TH[token_N]
        both_N2F = F.linear(rows_NH, experts.gate_up_proj[expert]) + factors.change(rows_NH, "gate_up_proj_", expert)
        gate_NF, up_NF = both_N2F.chunk(2, dim=-1)
        inner_NF = experts.act_fn(gate_NF) * up_NF
        made_NH = F.linear(inner_NF, experts.down_proj[expert]) + factors.change(inner_NF, "down_proj_", expert)
        output_TH.index_add_(0, token_N, (made_NH * weights_TK[token_N, choice_N, None]).to(output_TH.dtype))
    return output_TH
