"""The memory that an fsdp rank holds."""

from collections.abc import Iterable

from headway.learner.models.parallel_layout import check_context, check_ranks
from headway.learner.models.shape import ModelShape, Parameter

from .memory import (
    FP32,
    MOMENTS,
    KeptNumbers,
    PlannedModel,
    RankMemory,
    activation_bytes,
    attention_numbers,
    head_bytes,
    kept_logits_bytes,
    published_bytes,
)


def plan(planned: PlannedModel) -> list[RankMemory]:
    """Returns the memory of every rank. Raises ConfigError for a layout that is impossible."""
    learner, shape = planned.learner, planned.shape
    check_ranks(learner.layout, learner.processes)
    check_context(learner.layout.context, shape.heads, shape.key_value_heads)
    return [_rank(planned, rank) for rank in range(learner.processes)]


def is_replayed(planned: PlannedModel) -> bool:
    """Returns whether kernels of this model are recorded and replayed."""
    from headway.learner.backends.fsdp.cuda_graphs import why_launched

    learner, shape = planned.learner, planned.shape
    reason = why_launched(
        learner.compute,
        ranks=learner.processes,
        parameters=shape.num_parameters,
        is_rounded=planned.dtype == "bfloat16",
        has_adapter=bool(planned.adapter),
        drops_activations=False,  # one that does is launched, and takes less
        is_quantized=bool(planned.quantized),
        has_experts=any(shape.has_experts(layer) for layer in range(shape.layers)),
        has_window=shape.has_window,
    )
    return learner.device == "cuda" and planned.has_vocabulary and not reason


def _rank(planned: PlannedModel, rank: int) -> RankMemory:
    """Plans one rank. Every tensor is cut along its first dimension; the first ranks have a row more
    (`torch.chunk`)."""
    ranks = planned.learner.processes
    elements = _elements(planned.plain_parameters, ranks, rank)
    trained, parameters = elements, FP32 * elements
    if planned.adapter:
        trained = _elements(planned.adapter, ranks, rank)
        parameters = planned.compute_bytes * elements + FP32 * trained + sum(planned.quantized.values())
    is_elsewhere = planned.learner.compute.offload_optimizer or not planned.is_trained
    on_device = 0 if is_elsewhere else MOMENTS * trained
    rows, copies = 1, 0
    if is_replayed(planned):
        rows, copies = 2, planned.compute_bytes * trained  # a graph's memory is its own, and other rows are launched
    reference = parameters + copies if planned.has_reference else 0
    computes_again = is_replayed(planned) and planned.learner.compute.cuda_graphs != "always"
    return RankMemory(
        rank=rank,
        part=f"1/{ranks} of every tensor",
        parameters=parameters,
        gradients=FP32 * trained if planned.is_trained else 0,
        optimizer=on_device,
        gathered=_gathered_bytes(planned),
        activations=rows
        * activation_bytes(
            planned, range(planned.shape.layers), in_flight=1.0, keeps=KeptNumbers(_selective, copies=False)
        ),
        head=rows * (head_bytes(planned) + (0 if computes_again else kept_logits_bytes(planned))),
        other_models=reference,
        published=published_bytes(planned, rank),
    )


def _elements(parameters: Iterable[Parameter], ranks: int, rank: int) -> int:
    return sum(_rows(p.shape[0], ranks, rank) * (p.size // p.shape[0]) for p in parameters)


def _rows(count: int, ranks: int, rank: int) -> int:
    chunk = -(-count // ranks)
    return min(max(count - rank * chunk, 0), chunk)


def _gathered_bytes(planned: PlannedModel) -> int:
    """Returns the most bytes that FSDP2 holds gathered at once, which is in the backward pass.

    In `model.dtype`: the embedding, head and last norm all the time, the layer at work and the next one, or a small
    model whole. Also the gradients of one layer, and in fp32 those that are being reduced. A small model on several
    ranks also holds fp32 sums of all gradients until they are reduced after the last micro-batch. A model that is
    replayed holds copies of what is trained, and all gradients of a pass. Beside an adapter on a single GPU the base is
    computed with in its place. One of the weights that are held in few bits is dense at a time.
    """
    from headway.learner.backends.fsdp.sharding import GATHERED_GRADIENT_BYTES, GATHERED_WEIGHT_BYTES

    shape, number = planned.shape, planned.compute_bytes
    adapter = sum(parameter.size for parameter in planned.adapter)
    plain = planned.plain_parameters
    layer, outside = max(_size(plain, index) for index in range(shape.layers)), _size(plain, None)
    whole = number * (sum(parameter.size for parameter in plain) + adapter)
    if is_replayed(planned):
        return number * (adapter or shape.num_parameters) * (2 if planned.is_trained else 1)
    weights = whole if whole <= GATHERED_WEIGHT_BYTES else number * (outside + 2 * layer)
    if adapter and _stays_whole(planned, whole):
        weights = number * adapter
    if not planned.is_trained:
        return weights
    if planned.adapter:
        trained, largest = adapter, max(_size(planned.adapter, index) for index in range(shape.layers))
    else:
        trained, largest = shape.num_parameters, max(layer, outside)
    sums = FP32 * trained if planned.learner.processes > 1 else 0
    dense = max((parameter.size for parameter in shape.parameters if parameter.name in planned.quantized), default=0)
    working = weights + (number + FP32) * largest + number * dense
    return working + (sums if sums <= GATHERED_GRADIENT_BYTES else 0)


def _stays_whole(planned: PlannedModel, whole: int) -> bool:
    """Returns whether a policy of so many bytes is not sharded; see `sharding.stays_whole`."""
    from headway.learner.backends.fsdp.sharding import GATHERED_WEIGHT_BYTES

    is_alone = planned.learner.processes == 1 and planned.learner.device == "cuda"
    has_room = whole <= GATHERED_WEIGHT_BYTES
    return is_alone and planned.dtype == "bfloat16" and planned.has_vocabulary and has_room


def _size(parameters: Iterable[Parameter], layer: int | None) -> int:
    return sum(parameter.size for parameter in parameters if parameter.layer == layer)


def _selective(shape: ModelShape, layer: int) -> int:
    """Counts the outputs of matrices and attention."""
    rows = shape.experts_per_token if shape.has_experts(layer) else 1
    return (2 + rows) * shape.width + attention_numbers(shape) + 2 * shape.feed_forward_width(layer)
