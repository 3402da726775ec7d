"""Estimates that are alike for every backend: activations, the output head, and published versions."""

from collections.abc import Callable, Sequence

from learner.models.shape import ModelShape

from .planned import FP32, PlannedModel

Selective = Callable[[ModelShape, int], int]
"""(shape, layer) -> the numbers of a token that a backend keeps of the layer under `recompute: selective`."""


def activation_bytes(planned: PlannedModel, layers: Sequence[int], in_flight: float, selective: Selective) -> int:
    """Returns the bytes of activations.

    Source: Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", section 4.

    Theirs is s*b*h * 34 bytes a layer with dropout, GELU and 4h wide blocks, and 5*a*s/h more for the attention matrix.
    Here rows are packed, so T tokens stand for s*b; flash attention keeps no matrix; there is no dropout; the
    feed-forward is gated. All are divided by context and, thanks to sequence parallelism, tensor (their equation 4).
    Recomputed activations exist for one layer at a time. Kernels are taken to be fused: unfused ones keep a fifth to a
    third more on a CPU.
    """
    shape, tensor = planned.shape, planned.learner.layout.tensor
    kept = [_kept_numbers(planned, layer, selective) if planned.is_trained else 0 for layer in layers]
    made_again = max(all_numbers(shape, layer) - numbers for layer, numbers in zip(layers, kept, strict=True))
    return int(planned.compute_bytes * planned.row_tokens * (in_flight * sum(kept) + made_again) / tensor)


def _kept_numbers(planned: PlannedModel, layer: int, selective: Selective) -> int:
    """Returns the numbers kept for a token in one layer: all, those of `recompute: selective`, or the layer's input."""
    shape = planned.shape
    match planned.learner.compute.recompute:
        case "none":
            return all_numbers(shape, layer)
        case "full":
            return shape.width
        case "selective":
            return selective(shape, layer)


def all_numbers(shape: ModelShape, layer: int) -> int:
    """Counts for a token: inputs and outputs of two norms; attention; gate, up, activation, product; experts' rows.

    With experts, each chosen one has a copy of the token and an output of its own.
    """
    rows = shape.experts_per_token if shape.has_experts(layer) else 0
    before_norm = (shape.heads + shape.key_value_heads) * shape.head_width if shape.has_qk_norm else 0
    norms = 4 * shape.width + before_norm
    return norms + attention_numbers(shape) + 4 * shape.feed_forward_width(layer) + 2 * rows * shape.width


def attention_numbers(shape: ModelShape) -> int:
    """Counts for a token: queries, keys, values, and attention's output."""
    return 2 * (shape.heads + shape.key_value_heads) * shape.head_width


def head_bytes(planned: PlannedModel) -> int:
    """Returns the bytes in `token_logprobs`: a chunk of logits, their gradient, the weight's in fp32 and rounded; of a
    model that is not trained, the chunk and its fp32 copy."""
    from learner.backends.token_logprobs import LOGITS_PER_CHUNK

    if not planned.has_vocabulary:
        return 0
    rows = planned.vocabulary_rows
    tokens = min(planned.row_tokens, max(1, LOGITS_PER_CHUNK // rows))
    number = planned.compute_bytes
    if not planned.is_trained:
        return rows * (FP32 + number) * tokens
    if planned.adapter:  # the head is frozen
        return rows * 2 * number * tokens
    return rows * (2 * number * tokens + (FP32 + number) * planned.shape.width)


def published_bytes(planned: PlannedModel, rank: int) -> int:
    return planned.versions.get(rank, 0) * planned.compute_bytes * planned.shape.num_parameters
