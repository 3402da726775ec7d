"""The memory that a Megatron rank holds."""

from headway.learner.models.parallel_layout import check_layout
from headway.learner.models.shape import ROWS, ModelShape, Parameter

from .memory import (
    FP32,
    MOMENTS,
    KeptNumbers,
    PlannedModel,
    RankMemory,
    activation_bytes,
    all_numbers,
    head_bytes,
    published_bytes,
)


def plan(planned: PlannedModel) -> list[RankMemory]:
    """Returns the memory of every rank. Raises ConfigError for a layout that is impossible."""
    learner = planned.learner
    check_layout(learner.layout, learner.processes, planned.shape, planned.compute_bytes)
    return [_rank(planned, rank) for rank in range(learner.processes)]


def _rank(planned: PlannedModel, rank: int) -> RankMemory:
    """Plans one rank; ranks are numbered with tensor innermost, then context and replicas, pipeline stages
    outermost."""
    layout = planned.learner.layout
    stage_ranks = planned.learner.processes // layout.pipeline
    stage, place = divmod(rank, stage_ranks)
    layers = [layer for layer in range(planned.shape.layers) if _stage_of(planned, layer) == stage]
    dense, experts = _stage_elements(planned, stage)
    copies, expert_copies = layout.tensor, layout.expert * layout.expert_tensor
    trained, trained_experts = _adapter_elements(planned, stage) if planned.adapter else (dense, experts)
    shard = _share(trained, stage_ranks // copies, place // copies)
    shard += _share(trained_experts, stage_ranks // expert_copies, place // expert_copies)
    parameters, gradients = planned.compute_bytes * (dense + experts), FP32 * (trained + trained_experts)
    if planned.adapter:
        parameters += planned.compute_bytes * (trained + trained_experts)
    master = FP32 * shard if planned.dtype == "bfloat16" else 0
    reference = parameters + master if planned.has_reference else 0
    return RankMemory(
        rank=rank,
        part=_stage_name(planned, stage, layers),
        parameters=parameters,
        gradients=gradients if planned.is_trained else 0,
        optimizer=master + (MOMENTS * shard if planned.is_trained else 0),
        gathered=0,
        activations=activation_bytes(planned, layers, _in_flight(planned, stage), KeptNumbers(_selective, copies=True)),
        head=head_bytes(planned) if stage == layout.pipeline - 1 else 0,
        other_models=reference,
        published=published_bytes(planned, rank),
    )


def _stage_of(planned: PlannedModel, layer: int) -> int:
    """Returns a layer's stage. Each stage has `virtual_pipeline` runs of consecutive layers, dealt out in turn."""
    layout = planned.learner.layout
    run = planned.shape.layers // (layout.pipeline * layout.virtual_pipeline)
    return layer // run % layout.pipeline


def _stage_elements(planned: PlannedModel, stage: int) -> tuple[int, int]:
    """Returns (shared, experts') elements on one rank of the stage. The last stage has a copy of a tied embedding."""
    last = planned.learner.layout.pipeline - 1
    dense = experts = 0
    for parameter in planned.shape.parameters:
        size = _elements(planned, parameter)
        outside = 0 if parameter.part == "embedding" else last
        home = outside if parameter.layer is None else _stage_of(planned, parameter.layer)
        is_copied = parameter.part == "embedding" and planned.shape.is_tied and stage == last
        if parameter.part == "experts":
            experts += size * (home == stage)
        else:
            dense += size * (home == stage or is_copied)
    return dense, experts


def _elements(planned: PlannedModel, parameter: Parameter) -> int:
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


def _adapter_elements(planned: PlannedModel, stage: int) -> tuple[int, int]:
    """Returns (shared, experts') elements of A and B on one rank of the stage. Of a weight whose output features are
    split B is, of others A."""
    layout = planned.learner.layout
    dense = experts = 0
    for parameter in planned.adapter:
        assert parameter.layer is not None
        if _stage_of(planned, parameter.layer) != stage:
            continue
        weight, _, factor = parameter.name.rpartition("lora_")
        is_split = (weight.endswith(tuple(f"{row}{end}" for row in ROWS for end in "._"))) is (factor == "A")
        if parameter.part == "experts":
            experts += parameter.size // (layout.expert * (layout.expert_tensor if is_split else 1))
        else:
            dense += parameter.size // (layout.tensor if is_split else 1)
    return dense, experts


def _share(count: int, parts: int, index: int) -> int:
    return count // parts + (index < count % parts)


def _stage_name(planned: PlannedModel, stage: int, layers: list[int]) -> str:
    names = [f"stage {stage}", f"{len(layers)} layers"]
    names += ["embedding"] if stage == 0 else []
    return ", ".join(names + (["head"] if stage == planned.learner.layout.pipeline - 1 else []))


def _in_flight(planned: PlannedModel, stage: int) -> float:
    """Returns the most micro-batches whose activations a stage holds at once, if an update has that many.

    The plain schedule (one forward, one backward) holds as many as there are stages from this one to the last. The
    interleaved one holds its first forward passes, 2 * (stages after this one) + (virtual_pipeline - 1) * pipeline runs
    of layers, and the run at work.
    """
    pipeline, runs = planned.learner.layout.pipeline, planned.learner.layout.virtual_pipeline
    after = pipeline - stage - 1
    return after + 1 if runs == 1 else (2 * after + (runs - 1) * pipeline + 1) / runs


def _selective(shape: ModelShape, layer: int) -> int:
    """Counts all numbers but the recomputed ones: those of a dense feed-forward, or of the experts' activation."""
    again = 1 if shape.has_experts(layer) else 4
    return all_numbers(shape, layer) - again * shape.feed_forward_width(layer)
