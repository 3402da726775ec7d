"""Adapters in Megatron's layers: each layer adds to its output what the adapters of its weights make of its input.

    column   x ─► A x (this rank's tokens) ─► gathered over ranks ─► B (A x) (this rank's rows)
    row      x ─► A x (this rank's columns) ─► summed, scattered over ranks ─► B (A x) (this rank's tokens)

So ranks exchange R numbers a token. A of a column and B of a row are alike on all tensor-parallel ranks; each computes
their gradient from its own tokens, and Megatron sums it, as it does for norms. All other weights are frozen: neither
gradients' buffers nor the optimizer hold them.

Shapes: p tokens of this rank, R rank, I input and O output features of this rank.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from torch import nn

from headway.learner.backends.expert_rows import ExpertChange
from headway.learner.backends.hugging_face_files import Read
from headway.learner.config import AdapterConfig, LayoutConfig
from headway.learner.models.adapters import FACTORS, Target, first_factor, peft_config, targets_of
from headway.learner.models.model import unfilled

from . import groups
from .adapter_mapping import ADAPTER, factor_bindings, factor_names, layer_of, place_of, short_name
from .architecture import Architecture
from .model import PackedGpt
from .modules import GroupedExperts
from .shards import HeldBinding, layer_position

if TYPE_CHECKING:
    from transformers import PretrainedConfig

OF_ATTENTION, OF_BLOCK = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
"""The weights that are fused into one layer, in the order of their rows."""


class LayerAdapters:
    """The adapters of one model."""

    def __init__(
        self, hugging_face: "PretrainedConfig", architecture: Architecture, layout: LayoutConfig, adapter: AdapterConfig
    ) -> None:
        """Raises ConfigError for targets that the model lacks."""
        self.config = adapter
        self._model = unfilled(hugging_face)
        self.targets = targets_of(self._model, adapter)
        self.is_dropping = False
        self._chunks: Sequence[PackedGpt] = ()
        self.architecture, self._layout = architecture, layout

    def add(self, chunks: Sequence[PackedGpt]) -> None:
        """Freeze the model and add adapters, whose values are undefined, to it."""
        self._chunks = chunks
        for chunk in chunks:
            chunk.requires_grad_(False)
        for name, module in [
            (f"{number} {name}", module)
            for number, chunk in enumerate(chunks)
            for name, module in chunk.named_modules()
        ]:
            if targets := self._by_module.get(name):
                self._add(module, targets)

    @functools.cached_property
    def _by_module(self) -> dict[str, dict[str, Target]]:
        """The targets of this stage by `CHUNK NAME` of their module, and then by their short names."""
        found: dict[str, dict[str, Target]] = {}
        for target in self.targets:
            stage, chunk, local = layer_position(self.architecture, self._layout, layer_of(target))
            if stage == groups.pipeline().rank():
                name = f"{chunk} decoder.layers.{local}.{place_of(target).module}"
                found.setdefault(name, {})[short_name(target)] = target
        return found

    def _add(self, module: Any, targets: Mapping[str, Target]) -> None:
        if isinstance(module, GroupedExperts):
            setattr(module, ADAPTER, ExpertAdapter(module, targets, self))
            return
        kind = ColumnAdapter if place_of(next(iter(targets.values()))).splits_outputs else RowAdapter
        setattr(module, ADAPTER, kind(module, targets, self))
        module.register_forward_hook(_added)

    def seconds(self) -> list[torch.Tensor]:
        """Return this rank's parts of every B, in the memory that passes read."""
        named = [pair for chunk in self._chunks for pair in chunk.named_parameters()]
        return [parameter.detach() for name, parameter in named if f".{ADAPTER}." in name and name.endswith(FACTORS[1])]

    def bindings(self, layer: int) -> Iterator[HeldBinding]:
        """Yield those of a layer's factors; the same on every rank."""
        stage, chunk, local = layer_position(self.architecture, self._layout, layer)
        targets = [target for target in self.targets if layer_of(target) == layer]
        rank, per_rank = self.config.rank, self.architecture.experts // self._layout.expert
        for target in targets:
            if not target.experts:
                for binding in factor_bindings(target, rank, local):
                    yield HeldBinding(binding, stage, chunk)
        for expert in range(self.architecture.experts):
            for target in targets:
                if target.experts:
                    for binding in factor_bindings(target, rank, local, expert):
                        yield HeldBinding(binding, stage, chunk, *divmod(expert, per_rank))

    def peft_config(self, base: str) -> dict[str, Any]:
        """Return the content of PEFT's adapter_config.json; `base` is the model's directory or hub id."""
        return peft_config(self.targets, self._model, self.config, base)

    def first_factors(self, seed: int) -> Read:
        """Return a reader of the first A and B, so that the model computes what it did without adapters."""
        known: dict[str, tuple[Target, bool, int | None]] = {}
        for target in self.targets:
            for expert in range(target.experts) if target.experts else (None,):
                first, second = factor_names(target, expert)
                known |= {first: (target, True, expert), second: (target, False, expert)}
        whole = functools.lru_cache(maxsize=1)(lambda target: first_factor(target, self.config.rank, seed))

        def read(name: str) -> torch.Tensor:
            target, is_first, expert = known[name]
            if not is_first:
                return torch.zeros(target.shapes(self.config.rank)[1][-2:])
            first: torch.Tensor = whole(target)
            return first if expert is None else first[expert]

        return read

    @contextmanager
    def dropping(self) -> Iterator[None]:
        """A context in which dropout is on, for the passes of an update."""
        self.is_dropping = self.config.dropout > 0
        try:
            yield
        finally:
            self.is_dropping = False

    def low(self, rows: torch.Tensor, firsts: Sequence[torch.Tensor]) -> torch.Tensor:
        """[..., n * R] s A x of several adapters of one input; each leaves out other parts of it where dropout is on.
        It is scaled here, where it has few numbers."""
        if not self.is_dropping:
            return F.linear(rows, torch.cat(list(firsts))) * self.config.scale
        kept = [F.linear(F.dropout(rows, self.config.dropout), first) for first in firsts]
        return torch.cat(kept, -1) * self.config.scale


def _added(module: Any, inputs: tuple[torch.Tensor, ...], output: tuple[Any, ...]) -> tuple[Any, ...]:
    """Add to a layer's output what its adapter makes of its input."""
    return output[0] + getattr(module, ADAPTER)(inputs[0]), *output[1:]


def _new(like: torch.Tensor, *shape: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape, dtype=like.dtype, device=like.device))


class _LinearAdapter(nn.Module):
    """A and B of the weights of one linear layer."""

    is_split: tuple[bool, bool]
    """Whether tensor-parallel ranks hold parts of A and of B."""

    def __init__(self, linear: Any, targets: Mapping[str, Target], adapters: LayerAdapters) -> None:
        super().__init__()
        self._adapters = adapters
        self._names = tuple(targets)
        self._is_sequence_parallel = bool(linear.config.sequence_parallel)
        ranks = groups.tensor().size()
        for name, target in targets.items():
            inputs, outputs = (
                size // (ranks if split else 1)
                for size, split in zip((target.inputs, target.outputs), self.is_split, strict=True)
            )
            rank = adapters.config.rank
            shapes = ((rank, inputs), (outputs, rank))
            for number, (factor, shape) in enumerate(zip(FACTORS, shapes, strict=True)):
                parameter = _new(linear.weight, *shape)
                if self.is_split[number]:
                    set_tensor_model_parallel_attributes(parameter, True, 1 - number, 1)
                else:
                    parameter.sequence_parallel = self._is_sequence_parallel  # type: ignore[attr-defined]
                self.register_parameter(f"{name}_{factor}", parameter)

    def _factors(self, number: int) -> list[torch.Tensor]:
        return [getattr(self, f"{name}_{FACTORS[number]}") for name in self._names]


class ColumnAdapter(_LinearAdapter):
    """The adapters of weights that are fused into one layer, of which ranks hold output features."""

    is_split = (False, True)

    def __init__(self, linear: Any, targets: Mapping[str, Target], adapters: LayerAdapters) -> None:
        super().__init__(linear, targets, adapters)
        known, ranks = adapters.architecture, groups.tensor().size()
        if set(targets) <= set(OF_ATTENTION):
            # The rows of a key/value head follow those of its query heads.
            self._runs = known.key_value_heads // ranks
            of_query = known.heads // known.key_value_heads * known.head_width
            self._widths = dict(zip(OF_ATTENTION, (of_query, known.head_width, known.head_width), strict=True))
        else:
            self._runs, self._widths = 1, dict.fromkeys(OF_BLOCK, known.ffn_width // ranks)

    def forward(self, rows_p: torch.Tensor) -> torch.Tensor:
        """[P, 1, O] the change of the layer's output, at the tokens of all ranks."""
        low = self._adapters.low(rows_p, self._factors(0))
        if self._is_sequence_parallel:
            low = gather_from_sequence_parallel_region(low, group=groups.tensor())
        changes = {
            name: F.linear(part, second).view(*part.shape[:-1], self._runs, -1)
            for name, part, second in zip(self._names, low.chunk(len(self._names), -1), self._factors(1), strict=True)
        }
        parts = [
            changes[name] if name in changes else low.new_zeros(*low.shape[:-1], self._runs, width)
            for name, width in self._widths.items()
        ]
        return torch.cat(parts, -1).flatten(-2)


class RowAdapter(_LinearAdapter):
    """The adapter of a layer of which ranks hold input features."""

    is_split = (True, False)

    def forward(self, rows_P: torch.Tensor) -> torch.Tensor:
        """[p, 1, O] the change of the layer's output, at this rank's tokens."""
        low = self._adapters.low(rows_P, self._factors(0))
        if self._is_sequence_parallel:
            low = reduce_scatter_to_sequence_parallel_region(low, group=groups.tensor())
        return F.linear(low, self._factors(1)[0])


class _Summed(torch.autograd.Function):
    """A parameter that is alike on all ranks, each of which computes a part of its gradient: backward sums them."""

    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        whole = gradients[0].contiguous()
        dist.all_reduce(whole, group=ctx.group)
        return whole, None


def _summed(parameter: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    same: torch.Tensor = _Summed.apply(parameter, group)  # type: ignore[no-untyped-call]
    return same


class ExpertAdapter(nn.Module):
    """A and B of this rank's experts.

    Expert-tensor ranks get the same tokens, and Megatron sums their outputs. The factor that is alike on all of them
    has its gradient summed in the backward pass; `shared` lets one of them alone count it in the gradients' norm.
    """

    def __init__(self, experts: GroupedExperts, targets: Mapping[str, Target], adapters: LayerAdapters) -> None:
        super().__init__()
        self._scale = adapters.config.scale
        self._split = {name: place_of(target).splits_outputs for name, target in targets.items()}
        count, rank = len(experts.gate_up), adapters.config.rank
        group = groups.expert_tensor()
        for name, target in targets.items():
            of_outputs = self._split[name]
            inputs = target.inputs // (1 if of_outputs else group.size())
            outputs = target.outputs // (group.size() if of_outputs else 1)
            for factor, shape, is_split in zip(
                FACTORS, ((count, rank, inputs), (count, outputs, rank)), (not of_outputs, of_outputs), strict=True
            ):
                parameter: Any = _new(experts.gate_up, *shape)
                parameter.allreduce = False
                set_tensor_model_parallel_attributes(parameter, True, 0, 1)
                parameter.shared = not is_split and group.rank() > 0
                self.register_parameter(f"{name}_{factor}", parameter)

    def change(self, name: str) -> ExpertChange | None:
        """Return that of `gate_up_proj` or `down_proj`; None if it has no adapter."""
        if name not in self._split:
            return None
        first, second = (getattr(self, f"{name}_{factor}") for factor in FACTORS)
        group = groups.expert_tensor()
        if group.size() > 1:
            if self._split[name]:
                first = _summed(first, group)
            else:
                second = _summed(second, group)
        return ExpertChange(first, second, self._scale)
