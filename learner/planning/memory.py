"""Computes from shapes what every rank of the learner will hold on its device, before any process starts.

Parameters, gradients and optimizer state are exact but for the padding of buffers; the rest is an estimate.

    backend    parameters          gradients           optimizer               sharded over
    fsdp       4 bytes, sharded    4 bytes, sharded    2 moments: 8 bytes,     all ranks, context ranks too
                                                       sharded
    megatron   2 bytes (float32:   4 bytes, whole      master, 2 moments: 12   replicas and context ranks; an
               4), whole                               (float32: 8), sharded   expert's: ranks with the same experts

"Whole" is all of the rank's part: 1/tensor of every matrix and of the vocabulary, 1/(expert * expert_tensor) of the
experts, norms and routers as they are, in the layers of its pipeline stage. An fsdp rank has besides what it gathers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from broker.errors import ConfigError
from learner.config import LearnerConfig
from learner.models.layout import check_layout
from learner.models.shape import ModelShape, Parameter

FP32 = 4
MOMENTS = 2 * FP32


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """The bytes that one rank holds on its device."""

    rank: int
    part: str
    """The rank's part of the model, in words."""
    parameters: int
    gradients: int
    optimizer: int
    gathered: int
    """The tensors that fsdp gathers while layers are computed."""
    activations: int
    """Kept for the backward pass."""
    head: int
    """The output head: a chunk of logits, and the gradient of its weight while that is summed."""
    other_models: int
    """The reference of the KL penalty, and the critic of gae, which holds about what the policy holds."""
    published: int
    """Whole versions of the weights that lie beside it, for engines."""

    @property
    def total(self) -> int:
        states = self.parameters + self.gradients + self.optimizer
        return states + self.gathered + self.activations + self.head + self.other_models + self.published


@dataclass(frozen=True, kw_only=True)
class PlannedModel:
    """The subject of a plan: a model, how it is split and trained, and the models besides it."""

    shape: ModelShape
    learner: LearnerConfig
    dtype: Literal["float32", "bfloat16"]
    """`model.dtype`, of the forward and backward pass."""
    has_reference: bool = False
    has_critic: bool = False
    versions: Mapping[int, int] = field(default_factory=dict)
    """The number of whole versions of the weights on each rank's device."""

    @property
    def compute_bytes(self) -> int:
        """The bytes of one number in the forward and backward pass."""
        return 2 if self.dtype == "bfloat16" else FP32

    @property
    def replicas(self) -> int:
        layout = self.learner.layout
        return self.learner.processes // (layout.tensor * layout.pipeline * layout.context)

    @property
    def row_tokens(self) -> int:
        """The tokens of a micro-batch on one rank."""
        return -(-self.learner.micro_batch_tokens // self.learner.layout.context)

    @cached_property
    def vocabulary_rows(self) -> int:
        """The rows of the vocabulary on one rank; those of the last rank are padded."""
        return -(-self.shape.vocabulary // self.learner.layout.tensor)


def plan_memory(planned: PlannedModel) -> list[RankMemory]:
    """Every rank, largest first. Raises ConfigError for a layout that cannot be, or a backend that is not ours."""
    learner = planned.learner
    if learner.backend not in ("fsdp", "megatron"):
        raise ConfigError(f"learner.backend: nothing is known of what `{learner.backend}` holds; use fsdp or megatron.")
    check_layout(learner.backend, learner.layout, learner.processes, planned.shape, planned.compute_bytes)
    rank_of = _fsdp_rank if learner.backend == "fsdp" else _megatron_rank
    ranks = [rank_of(planned, rank) for rank in range(learner.processes)]
    return sorted(ranks, key=lambda held: (-held.total, held.rank))


def _fsdp_rank(planned: PlannedModel, rank: int) -> RankMemory:
    """Every tensor is cut along its first dimension, the first ranks have a row more (`torch.chunk`)."""
    ranks = planned.learner.processes
    elements = sum(_rows(p.shape[0], ranks, rank) * (p.size // p.shape[0]) for p in planned.shape.parameters)
    on_device = 0 if planned.learner.compute.offload_optimizer else MOMENTS * elements
    reference = FP32 * elements if planned.has_reference else 0
    critic = 2 * FP32 * elements + on_device if planned.has_critic else 0
    return RankMemory(
        rank=rank,
        part=f"1/{ranks} of every tensor",
        parameters=FP32 * elements,
        gradients=FP32 * elements,
        optimizer=on_device,
        gathered=_gathered_bytes(planned),
        activations=_activation_bytes(planned, range(planned.shape.layers), in_flight=1.0),
        head=_head_bytes(planned),
        other_models=reference + critic,
        published=_published_bytes(planned, rank),
    )


def _rows(count: int, ranks: int, rank: int) -> int:
    chunk = -(-count // ranks)
    return min(max(count - rank * chunk, 0), chunk)


def _gathered_bytes(planned: PlannedModel) -> int:
    """What FSDP2 holds whole while layers are computed, at its most, in the backward pass.

    In `model.dtype` the embedding, head and last norm all the time, the layer at work, and the next one that is being
    gathered, or of a small model everything; of one of these its gradients, and in fp32 those that are being reduced.
    Of a small model besides, with several ranks, the fp32 sums of all gradients: they are reduced after the last
    micro-batch.
    """
    from learner.backends.fsdp.sharding import GATHERED_GRADIENT_BYTES, GATHERED_WEIGHT_BYTES

    shape, number = planned.shape, planned.compute_bytes
    layer = max(_size(shape, index) for index in range(shape.layers))
    outside = _size(shape, None)
    whole = number * shape.num_parameters
    weights = whole if whole <= GATHERED_WEIGHT_BYTES else number * (outside + 2 * layer)
    sums = FP32 * shape.num_parameters if planned.learner.processes > 1 else 0
    working = weights + (number + FP32) * max(layer, outside)
    return working + (sums if sums <= GATHERED_GRADIENT_BYTES else 0)


def _size(shape: ModelShape, layer: int | None) -> int:
    return sum(parameter.size for parameter in shape.parameters if parameter.layer == layer)


def _megatron_rank(planned: PlannedModel, rank: int) -> RankMemory:
    """Ranks are numbered with tensor innermost, then context and replicas, and pipeline stages outermost."""
    layout = planned.learner.layout
    stage_ranks = planned.learner.processes // layout.pipeline
    stage, place = divmod(rank, stage_ranks)
    layers = [layer for layer in range(planned.shape.layers) if _stage_of(planned, layer) == stage]
    dense, experts = _stage_elements(planned, stage)
    copies, expert_copies = layout.tensor, layout.expert * layout.expert_tensor
    shard = _share(dense, stage_ranks // copies, place // copies)
    shard += _share(experts, stage_ranks // expert_copies, place // expert_copies)
    parameters, gradients = planned.compute_bytes * (dense + experts), FP32 * (dense + experts)
    master = FP32 * shard if planned.dtype == "bfloat16" else 0
    reference = parameters + master if planned.has_reference else 0
    critic = parameters + gradients + master + MOMENTS * shard if planned.has_critic else 0
    return RankMemory(
        rank=rank,
        part=_stage_name(planned, stage, layers),
        parameters=parameters,
        gradients=gradients,
        optimizer=master + MOMENTS * shard,
        gathered=0,
        activations=_activation_bytes(planned, layers, _in_flight(planned, stage)),
        head=_head_bytes(planned) if stage == layout.pipeline - 1 else 0,
        other_models=reference + critic,
        published=_published_bytes(planned, rank),
    )


def _stage_of(planned: PlannedModel, layer: int) -> int:
    """Each stage has `virtual_pipeline` runs of consecutive layers, dealt out in turn."""
    layout = planned.learner.layout
    run = planned.shape.layers // (layout.pipeline * layout.virtual_pipeline)
    return layer // run % layout.pipeline


def _stage_elements(planned: PlannedModel, stage: int) -> tuple[int, int]:
    """(shared, of experts) on one rank of the stage. A tied embedding stands in the last stage once more."""
    last = planned.learner.layout.pipeline - 1
    dense = experts = 0
    for parameter in planned.shape.parameters:
        size = _megatron_elements(planned, parameter)
        outside = 0 if parameter.part == "embedding" else last
        home = outside if parameter.layer is None else _stage_of(planned, parameter.layer)
        is_copied = parameter.part == "embedding" and planned.shape.is_tied and stage == last
        if parameter.part == "experts":
            experts += size * (home == stage)
        else:
            dense += size * (home == stage or is_copied)
    return dense, experts


def _megatron_elements(planned: PlannedModel, parameter: Parameter) -> int:
    layout = planned.learner.layout
    match parameter.part:
        case "embedding" | "head":
            return planned.vocabulary_rows * planned.shape.width
        case "column" | "row":
            return parameter.size // layout.tensor
        case "experts":
            return parameter.size // (layout.expert * layout.expert_tensor)
        case "whole":
            return parameter.size


def _share(count: int, parts: int, index: int) -> int:
    return count // parts + (index < count % parts)


def _stage_name(planned: PlannedModel, stage: int, layers: list[int]) -> str:
    names = [f"stage {stage}", f"{len(layers)} layers"]
    names += ["embedding"] if stage == 0 else []
    return ", ".join(names + (["head"] if stage == planned.learner.layout.pipeline - 1 else []))


def _in_flight(planned: PlannedModel, stage: int) -> float:
    """Micro-batches whose activations a stage holds at once, at most, if an update has so many.

    One forward, one backward: as many as there are stages from this one to the last. Interleaved: Megatron's warm-up of
    2 * (stages after this one) + (virtual_pipeline - 1) * pipeline runs of layers, and the one at work.
    """
    pipeline, runs = planned.learner.layout.pipeline, planned.learner.layout.virtual_pipeline
    after = pipeline - stage - 1
    return after + 1 if runs == 1 else (2 * after + (runs - 1) * pipeline + 1) / runs


def _published_bytes(planned: PlannedModel, rank: int) -> int:
    return planned.versions.get(rank, 0) * planned.compute_bytes * planned.shape.num_parameters


def _activation_bytes(planned: PlannedModel, layers: Sequence[int], in_flight: float) -> int:
    """After Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", section 4.

    Theirs is s*b*h * 34 bytes a layer with dropout, GELU and 4h wide blocks, and 5*a*s/h more for the attention matrix.
    Here rows are packed, so T tokens stand for s*b; flash attention keeps no matrix; there is no dropout; the
    feed-forward is gated. All are divided by context and, thanks to sequence parallelism, tensor (their equation 4).
    What is made again in the backward pass exists for one layer at a time. Kernels are taken to be fused: unfused ones
    keep more, by a fifth to a third on a CPU.
    """
    shape, tensor = planned.shape, planned.learner.layout.tensor
    kept = [_kept_numbers(planned, layer) for layer in layers]
    made_again = max(_all_numbers(shape, layer) - numbers for layer, numbers in zip(layers, kept, strict=True))
    return int(planned.compute_bytes * planned.row_tokens * (in_flight * sum(kept) + made_again) / tensor)


def _kept_numbers(planned: PlannedModel, layer: int) -> int:
    """A token, of one layer: all of them; what `recompute: selective` keeps; or the layer's input.

    fsdp's selective keeps what matrices and attention put out; megatron's makes a dense feed-forward again, and
    of experts the activation.
    """
    shape = planned.shape
    match planned.learner.compute.recompute, planned.learner.backend:
        case "none", _:
            return _all_numbers(shape, layer)
        case "full", _:
            return shape.width
        case _, "megatron":
            again = 1 if shape.has_experts(layer) else 4
            return _all_numbers(shape, layer) - again * shape.feed_forward_width(layer)
        case _:
            rows = shape.experts_per_token if shape.has_experts(layer) else 1
            return (2 + rows) * shape.width + _attention_numbers(shape) + 2 * shape.feed_forward_width(layer)


def _all_numbers(shape: ModelShape, layer: int) -> int:
    """A token: inputs and outputs of two norms; attention; gate, up, their activation and product; rows of experts.

    With experts, each chosen one has a copy of the token and an output of its own.
    """
    rows = shape.experts_per_token if shape.has_experts(layer) else 0
    before_norm = (shape.heads + shape.key_value_heads) * shape.head_width if shape.has_qk_norm else 0
    norms = 4 * shape.width + before_norm
    return norms + _attention_numbers(shape) + 4 * shape.feed_forward_width(layer) + 2 * rows * shape.width


def _attention_numbers(shape: ModelShape) -> int:
    """A token: queries, keys, values, and what comes out."""
    return 2 * (shape.heads + shape.key_value_heads) * shape.head_width


def _head_bytes(planned: PlannedModel) -> int:
    """Of `token_logprobs`: a chunk of logits and their gradient, the weight's gradient summed in fp32 and rounded."""
    from learner.backends.token_logprobs import LOGITS_PER_CHUNK

    rows = planned.vocabulary_rows
    tokens = min(planned.row_tokens, max(1, LOGITS_PER_CHUNK // rows))
    number = planned.compute_bytes
    return rows * (2 * number * tokens + (FP32 + number) * planned.shape.width)
