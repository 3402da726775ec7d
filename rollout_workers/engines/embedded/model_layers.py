"""The layers that the engine changes in a transformers model: its experts, and modules that an adapter changes.

A model with few experts gives each token to all of them, and what was not chosen counts nothing. With four experts, two
of them chosen, a hundred tokens take half of the time on a CPU that sorting them by expert takes: two products instead
of many small calls. `RouterTap` records which experts were chosen.

An adapter adds scale * B (A x) to what the modules compute that hold the weights W. The base stays as it is, so a swap
copies an adapter's few tensors and no version is a rounding of another one; the learner computes the same sum in the
same order.

T tokens, E experts, K chosen ones, I width of an expert; R rank, I input features, O output features of an adapter.
"""

import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

from headway.broker.schema import Experts
from headway.rollout_workers.engines.base import NamedTensors, WeightFingerprints
from headway.rollout_workers.engines.weight_loading.engine_adapters import FACTOR_NAME
from headway.weightsync.tensors.fingerprint import fingerprint

EXPERTS = "headway_all_experts"
MOST_WASTED = 2
"""Experts for each chosen one up to which this is faster."""


def all_experts(
    experts: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Return [T, width] the weighted sum of the chosen experts' outputs, as transformers' grouped experts do, which
    get what this function is no faster for."""
    if not _is_for(experts, top_k_index.shape[-1]):
        grouped: torch.Tensor = grouped_mm_experts_forward(experts, hidden_states, top_k_index, top_k_weights)
        return grouped
    count, gate_up, down = experts.num_experts, experts.gate_up_proj, experts.down_proj
    hidden_TEI = F.linear(hidden_states, gate_up.flatten(0, 1)).view(len(hidden_states), count, -1)
    share_TE = top_k_weights.new_zeros(len(hidden_states), count).scatter_(1, top_k_index, top_k_weights)
    weighted_TEI = experts._apply_gate(hidden_TEI) * share_TE[:, :, None]
    out: torch.Tensor = weighted_TEI.flatten(1).to(down.dtype) @ down.transpose(1, 2).flatten(0, 1)
    return out


def _is_for(experts: Any, chosen: int) -> bool:
    is_spread = getattr(experts, "_is_expert_parallel", False)  # which transformers before 5.18 do not have
    is_plain = experts.has_gate and not (experts.has_bias or experts.is_transposed or is_spread)
    is_on_cpu = experts.gate_up_proj.device.type == "cpu"
    return bool(is_plain and is_on_cpu and experts.num_experts <= MOST_WASTED * chosen)


ALL_EXPERTS_FUNCTIONS.register(EXPERTS, all_experts)


class RouterTap:
    """Listens to the expert modules of every layer, to which transformers passes the choice of the layer's router."""

    def __init__(self, model: nn.Module) -> None:
        self._experts: list[Any] = [
            part for part in model.modules() if hasattr(part, "has_gate") and hasattr(part, "num_experts")
        ]
        self._chosen: list[torch.Tensor] = []

    @property
    def is_dense(self) -> bool:
        return not self._experts

    def listen(self) -> None:
        """Listen from the next forward on. Idempotent. Before the first call it costs nothing and refuses no model."""
        if self._chosen:
            return
        self._chosen = [torch.empty(0)] * len(self._experts)
        for layer, part in enumerate(self._experts):
            part.register_forward_pre_hook(self._listener(layer))

    def last(self) -> Experts:
        """Return [T, layers, experts per token] of the last forward, in the order of the router's choice."""
        is_byte = all(part.num_experts <= 256 for part in self._experts)
        chosen_TLK = torch.stack(self._chosen, dim=1).to(torch.uint8 if is_byte else torch.uint16).cpu()
        array: Experts = np.asarray(chosen_TLK.numpy())
        return array

    def _listener(self, layer: int) -> Any:
        def listen(experts: nn.Module, arguments: tuple[torch.Tensor, ...]) -> None:
            _tokens_TH, self._chosen[layer], _weights_TK = arguments

        return listen


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
