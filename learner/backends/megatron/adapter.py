"""Adapters in Megatron's layers: each layer adds to its output what the adapters of its weights make of its input.

    column   x ─► A x (this rank's tokens) ─► gathered over ranks ─► B (A x) (this rank's rows)
    row      x ─► A x (this rank's columns) ─► summed, scattered over ranks ─► B (A x) (this rank's tokens)

So ranks exchange R numbers a token. A of a column and B of a row are alike on all tensor-parallel ranks; each computes
their gradient from its own tokens, and Megatron sums it, as it does for norms. All other weights are frozen: neither
gradients' buffers nor the optimizer hold them.

Shapes: p tokens of this rank, R rank, I input and O output features of this rank.
"""

import functools
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
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

from headway.learner.backends.hugging_face_files import Read
from headway.learner.backends.moe import ExpertChange
from headway.learner.config import AdapterConfig, LayoutConfig
from headway.learner.models.lora import (
    FACTORS,
    Target,
    factor_name,
    initial_factor,
    merged,
    peft_config,
    peft_names,
    targets_of,
    to_peft,
)
from headway.learner.models.pretrained import unfilled

from . import groups
from .hugging_face import Exporter, PlacedBinding, layer_position
from .mapping import Architecture, Binding, DimensionShard, Replicate, StackedShard, TensorPlacement
from .model import PackedGpt
from .modules import GroupedExperts

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

    def bindings(self, layer: int) -> Iterator[PlacedBinding]:
        """Yield those of a layer's factors; the same on every rank."""
        stage, chunk, local = layer_position(self.architecture, self._layout, layer)
        targets = [target for target in self.targets if layer_of(target) == layer]
        rank, per_rank = self.config.rank, self.architecture.experts // self._layout.expert
        for target in targets:
            if not target.experts:
                for binding in factor_bindings(target, rank, local):
                    yield PlacedBinding(binding, stage, chunk)
        for expert in range(self.architecture.experts):
            for target in targets:
                if target.experts:
                    for binding in factor_bindings(target, rank, local, expert):
                        yield PlacedBinding(binding, stage, chunk, *divmod(expert, per_rank))

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
        whole = functools.lru_cache(maxsize=1)(lambda target: initial_factor(target, self.config.rank, seed))

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


LAYER = re.compile(r"\.layers\.(\d+)\.")
ADAPTER = "adapter"
"""The module with the factors, in the module whose weights they change."""


@dataclass(frozen=True)
class Place:
    """A weight in one of Megatron's decoder layers."""

    module: str
    """The layer's module that holds it."""
    splits_outputs: bool
    """Whether tensor parallelism splits its output features; else it splits the input features."""


PLACES = {
    "self_attn.q_proj": Place("self_attention.linear_qkv", splits_outputs=True),
    "self_attn.k_proj": Place("self_attention.linear_qkv", splits_outputs=True),
    "self_attn.v_proj": Place("self_attention.linear_qkv", splits_outputs=True),
    "self_attn.o_proj": Place("self_attention.linear_proj", splits_outputs=False),
    "mlp.gate_proj": Place("mlp.linear_fc1", splits_outputs=True),
    "mlp.up_proj": Place("mlp.linear_fc1", splits_outputs=True),
    "mlp.down_proj": Place("mlp.linear_fc2", splits_outputs=False),
    "mlp.experts.gate_up_proj": Place("mlp.experts", splits_outputs=True),
    "mlp.experts.down_proj": Place("mlp.experts", splits_outputs=False),
}
"""By the weight's name in a layer of the model."""


def layer_of(target: Target) -> int:
    """Return the index of the decoder layer."""
    found = LAYER.search(target.module)
    assert found is not None
    return int(found.group(1))


def place_of(target: Target) -> Place:
    """Return the place of the weight in its layer."""
    return PLACES[LAYER.split(f".{target.name}")[-1]]


def short_name(target: Target) -> str:
    """Return the last part of the weight's name, such as q_proj."""
    return target.name.rpartition(".")[2]


def factor_names(target: Target, expert: int | None = None) -> tuple[str, str]:
    """Return the names of A and B, or of one expert's part of them."""
    if expert is None:
        return target.factors
    first, second = (factor_name(target.weight, factor) for factor in FACTORS)
    return f"{target.module}.{expert}.{first}", f"{target.module}.{expert}.{second}"


def factor_bindings(target: Target, rank: int, local: int, expert: int | None = None) -> Iterator[Binding]:
    """Yield the bindings of A and B in a layer that is number `local` in the chunk that holds it."""
    place = place_of(target)
    shapes = [shape[-2:] for shape in target.shapes(rank)]
    # A B of gate and up together has the rows of both, each of which is split as its weight is.
    of_outputs: TensorPlacement = DimensionShard(0) if expert is None else StackedShard(2, is_one=True)
    sharings = (Replicate(), of_outputs) if place.splits_outputs else (DimensionShard(1), Replicate())
    for factor, name, shape, sharing in zip(FACTORS, factor_names(target, expert), shapes, sharings, strict=True):
        parameter = f"decoder.layers.{local}.{place.module}.{ADAPTER}.{short_name(target)}_{factor}"
        group = "tensor" if expert is None else "expert_tensor"
        yield Binding(parameter, (name,), (shape,), sharing, group, expert)  # type: ignore[arg-type]


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
