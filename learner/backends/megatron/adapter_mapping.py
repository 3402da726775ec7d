"""The place of each adapted weight in Megatron's layers, and the bindings of its A and B.

A fused layer keeps the factors of each weight that was fused into it: PEFT's files and engines know q_proj, k_proj and
v_proj alone. A tensor-parallel rank holds its rows of B where the layer splits output features, and its columns of A
where it splits input features; all ranks hold the other factor. Names are those of the model with the number of the
expert, if there is one.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from headway.learner.models.adapters import FACTORS, Target, factor_name

from .mapping import Along, Binding, Sharing, Stacked, Whole

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
    of_outputs: Sharing = Along(0) if expert is None else Stacked(2, is_one=True)
    sharings = (Whole(), of_outputs) if place.splits_outputs else (Along(1), Whole())
    for factor, name, shape, sharing in zip(FACTORS, factor_names(target, expert), shapes, sharings, strict=True):
        parameter = f"decoder.layers.{local}.{place.module}.{ADAPTER}.{short_name(target)}_{factor}"
        group = "tensor" if expert is None else "expert_tensor"
        yield Binding(parameter, (name,), (shape,), sharing, group, expert)  # type: ignore[arg-type]
