"""Adapters in a transformers model: A and B are parameters of the modules whose weights they change.

A module's `forward` is replaced on the instance, so the model's own parameters keep their names. They are frozen, and
held in `model.dtype`, to which each pass would round them anyway; A and B are fp32 masters.

T tokens, N rows of experts (a token has one for each of its experts), H model width, R rank, E experts.
"""

import functools
import types
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers.integrations.moe import _grouped_mm

from headway.broker.errors import ConfigError
from headway.learner.backends.moe import ExpertChange, collect, experts_forward, route, row_offsets, spread
from headway.learner.backends.quantization import QuantizedBase, QuantizedWeight, frozen_grouped_product, weight_of
from headway.learner.config import AdapterConfig
from headway.learner.models.lora import FACTORS, Target, factor_name, initial_factor, peft_config, targets_of

from .experts import is_plain
from .sharding import copy_rows

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Adapters:
    """The adapters of one model."""

    def __init__(self, model: "PreTrainedModel", adapter: AdapterConfig, dtype: torch.dtype) -> None:
        """Freeze the model and add adapters to it, before it is sharded; `fill` gives them their first values. Raises
        ConfigError for targets that the model lacks, and for experts that adapters cannot change."""
        self.config = adapter
        self.targets = targets_of(model, adapter)
        self._model = model
        self._modules = dict(model.named_modules())
        self._is_dropping = False
        self.base: QuantizedBase | None = None
        if adapter.quantize_base != "none":
            self.base = QuantizedBase(model, adapter.quantize_base, dtype)
        changed = {target.module: target for target in (*self.targets, *(self.base.targets if self.base else ()))}
        experts = [self._modules[name] for name, target in changed.items() if target.experts]
        _check_experts(experts)
        for part in experts:
            part.forward = types.MethodType(_with_scale(_experts, adapter.scale), part)
        for parameter in model.parameters():
            parameter.requires_grad_(False)
            parameter.data = parameter.data.to(dtype)
        for target in self.targets:
            self._add(self._modules[target.module], target)

    def _add(self, module: nn.Module, target: Target) -> None:
        weight = weight_of(module, target.weight)
        device = weight.codes.device if isinstance(weight, QuantizedWeight) else weight.device
        for factor, shape in zip(FACTORS, target.shapes(self.config.rank), strict=True):
            name = factor_name(target.weight, factor)
            module.register_parameter(name, nn.Parameter(torch.zeros(shape, dtype=torch.float32, device=device)))
        if not target.experts:
            forward = functools.partial(_linear, plain=module.forward, adapters=self)
            module.forward = types.MethodType(_with_scale(forward, self.config.scale), module)

    def fill(self, seed: int) -> None:
        """Give A its first values, and B zeros, so that the model computes what it did without adapters."""
        for target in self.targets:
            module = self._modules[target.module]
            first, second = (getattr(module, factor_name(target.weight, factor)) for factor in FACTORS)
            copy_rows(initial_factor(target, self.config.rank, seed), first)
            copy_rows(torch.zeros(second.shape), second)

    @contextmanager
    def dropping(self) -> Iterator[None]:
        """A context in which dropout is on, for the passes of an update."""
        self._is_dropping = self.config.dropout > 0
        try:
            yield
        finally:
            self._is_dropping = False

    def dropped(self, rows: torch.Tensor) -> torch.Tensor:
        """Return an adapter's inputs, less those that dropout leaves out."""
        return F.dropout(rows, self.config.dropout) if self._is_dropping else rows

    def peft_config(self, base: str) -> dict[str, Any]:
        """Return the content of PEFT's adapter_config.json; `base` is the model's directory or hub id."""
        return peft_config(self.targets, self._model, self.config, base)

    def factors(self) -> Iterator[tuple[Target, tuple[torch.Tensor, torch.Tensor]]]:
        """Yield the shards of A and B of every target, in the model's order."""
        for target in self.targets:
            module = self._modules[target.module]
            first, second = (getattr(module, factor_name(target.weight, factor)).detach() for factor in FACTORS)
            yield target, (first, second)


def _with_scale(forward: Any, scale: float) -> Any:
    def scaled(module: nn.Module, *inputs: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = forward(module, scale, *inputs)
        return output

    return scaled


def _linear(linear: Any, scale: float, rows: torch.Tensor, *, plain: Any, adapters: Adapters) -> torch.Tensor:
    """[..., O] W x + s B (A x). The last product scales and adds in its own kernel: rows of O are wide."""
    rows_NI = rows.flatten(0, -2)
    output_NO: torch.Tensor = plain(rows_NI)
    low_NR = F.linear(adapters.dropped(rows_NI), linear.lora_A)
    return torch.addmm(output_NO, low_NR, linear.lora_B.T, alpha=scale).view(*rows.shape[:-1], -1)


def _experts(
    experts: Any, scale: float, tokens_TH: torch.Tensor, experts_TK: torch.Tensor, weights_TK: torch.Tensor
) -> torch.Tensor:
    """[T, H] what `moe.grouped_experts` gives, with each expert's own A and B."""
    routing = route(experts_TK)
    rows_NH = spread(tokens_TH, routing.sources_N, routing.places_TK)
    weights_N = weights_TK.flatten()[routing.order_N]
    gate_up, down = weight_of(experts, "gate_up_proj"), weight_of(experts, "down_proj")
    offsets_E = row_offsets(experts_TK, gate_up.shape[0])
    changes = _change(experts, "gate_up_proj", scale), _change(experts, "down_proj", scale)
    output_NH = experts_forward(rows_NH, weights_N, offsets_E, gate_up, down, changes=changes, product=_product)
    return collect(output_NH, routing.sources_N, routing.places_TK).to(tokens_TH.dtype)


def _change(experts: Any, weight: str, scale: float) -> ExpertChange | None:
    """Return the adapter of a tensor of experts, if it has one."""
    first, second = (getattr(experts, factor_name(weight, factor), None) for factor in FACTORS)
    return None if first is None or second is None else ExpertChange(first, second, scale)


def _product(rows_N: torch.Tensor, weights_E: Any, offsets_E: torch.Tensor) -> torch.Tensor:
    """[N, O] each row times its expert's [O, I] matrix, transposed. transformers' has a way for the dtypes and devices
    that torch's grouped product does not take."""
    if isinstance(weights_E, QuantizedWeight):
        return frozen_grouped_product(rows_N, weights_E, offsets_E, _grouped_mm)
    output_N: torch.Tensor = _grouped_mm(rows_N, weights_E.transpose(1, 2), offs=offsets_E)
    return output_N


def _check_experts(experts: Iterable[Any]) -> None:
    if not all(is_plain(part) for part in experts):
        raise ConfigError(
            "model.adapter.targets: this model's experts are not down(silu(gate(x)) * up(x)), and adapters change none"
            " but these. Name the linear layers to change, and leave the experts out."
        )
