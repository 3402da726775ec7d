"""Estimates that are alike for every backend: activations, the output head, and published versions."""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from headway.learner.batching.clusters import KEYS_OF_A_TOKEN
from headway.learner.models.shape import ModelShape

from .memory import FP32, PlannedModel

INDEX = 8


class KeptNumbers(NamedTuple):
    """The part of a layer that a backend keeps under `recompute: selective`."""

    numbers: Callable[[ModelShape, int], int]
    """(shape, layer) -> the numbers of a token."""
    copies: bool
    """Whether it keeps the copies of keys and values that sequences share."""


def activation_bytes(planned: PlannedModel, layers: Sequence[int], in_flight: float, keeps: KeptNumbers) -> int:
    """Returns the bytes of activations, of rows that share tokens or do not, whichever are more.

    Source: Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", section 4.

    Theirs is s*b*h * 34 bytes a layer with dropout, GELU and 4h wide blocks, and 5*a*s/h more for the attention matrix.
    Here rows are packed, so T tokens stand for s*b; flash attention keeps no matrix; there is no dropout; the
    feed-forward is gated. All are divided by context and, thanks to sequence parallelism, tensor (their equation 4).
    Recomputed activations exist for one layer at a time. Kernels are taken to be fused: unfused ones keep a fifth to a
    third more on a CPU.
    """
    alone = _row_bytes(planned, layers, in_flight, keeps, planned.row_tokens, 0.0)
    positions = planned.row_tokens / (1 + (planned.sharing - 1) / KEYS_OF_A_TOKEN)
    return int(max(alone, _row_bytes(planned, layers, in_flight, keeps, positions, (planned.sharing - 1) * positions)))


def _row_bytes(
    planned: PlannedModel, layers: Sequence[int], in_flight: float, keeps: KeptNumbers, positions: float, copies: float
) -> float:
    """Returns the bytes of a row of so many positions, with further copies of tokens among the keys and values.

    Sequences that share all but their ends have the most: all of them a copy of each token. By `rows.clusters` the row
    then has fewer positions. Copies are made for a layer at work, and kept with what attention keeps. Three indices of
    8 bytes a token say where they are.
    """
    shape = planned.shape
    copied = 2 * shape.key_value_heads * shape.head_width
    whole = [all_numbers(shape, layer) * positions + copied * copies for layer in layers]
    kept = (
        [_kept_numbers(planned, layer, keeps) for layer in layers] if planned.is_trained else [(0, False)] * len(layers)
    )
    held = [numbers * positions + copied * copies * keeps_copies for numbers, keeps_copies in kept]
    made_again = max(all_of_it - of_it for all_of_it, of_it in zip(whole, held, strict=True))
    indices = INDEX * (2 * (positions + copies) + positions) if copies else 0
    numbers = in_flight * sum(held) + made_again
    return planned.compute_bytes * numbers / planned.learner.layout.tensor + in_flight * indices


def _kept_numbers(planned: PlannedModel, layer: int, keeps: KeptNumbers) -> tuple[int, bool]:
    """Returns the numbers kept for a token in one layer, and whether copies of its key and value are: all, those of
    `recompute: selective`, or the layer's input."""
    shape = planned.shape
    match planned.learner.compute.recompute:
        case "none":
            return all_numbers(shape, layer), True
        case "full":
            return shape.width, False
        case "selective":
            return keeps.numbers(shape, layer), keeps.copies


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
    from headway.learner.backends.token_logprobs import LOGITS_PER_CHUNK

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


def kept_logits_bytes(planned: PlannedModel) -> int:
    """Returns the bytes of the logits that fsdp keeps from the forward to the backward pass of a row that is
    launched."""
    from headway.learner.backends.token_logprobs import keeps_logits

    tokens, rows = planned.row_tokens, planned.vocabulary_rows
    keeps = planned.learner.compute.recompute == "none" and planned.is_trained and planned.has_vocabulary
    number, on_cpu = planned.compute_bytes, planned.learner.device == "cpu"
    fits = keeps_logits(tokens, rows, number_bytes=number, on_cpu=on_cpu, device_bytes=planned.device_bytes)
    return number * tokens * rows if keeps and fits else 0


def published_bytes(planned: PlannedModel, rank: int) -> int:
    return planned.versions.get(rank, 0) * planned.compute_bytes * planned.shape.num_parameters


LOGITS = 1 << 26
"""The logits that a teacher holds at one time, in fp32, with a copy in the model's format and one of the sum."""


def scorer_bytes(
    shape: ModelShape,
    dtype: Literal["float32", "bfloat16", "float16"],
    step_tokens: int,
    *,
    has_vocabulary: bool,
    logits_tokens: int | None = None,
    cache_tokens: int = 0,
) -> int:
    """Returns the bytes of the weights and of a cache, which are exact, and an estimate of one layer's activations and
    of the logits.

    `step_tokens` go through the model at once. A model without vocabulary has a head of one output; another one holds
    the logits of `logits_tokens` at one time, or where that is None as many as LOGITS allows. The keys and values of
    `cache_tokens` stay in memory.
    """
    number = FP32 if dtype == "float32" else FP32 // 2
    head = 0 if has_vocabulary else shape.width - sum(part.size for part in shape.parameters if part.part == "head")
    activations = step_tokens * max(all_numbers(shape, layer) for layer in range(shape.layers))
    logits = min(step_tokens * shape.vocabulary, LOGITS) if logits_tokens is None else logits_tokens * shape.vocabulary
    cache = cache_tokens * 2 * shape.layers * shape.key_value_heads * shape.head_width
    held = shape.num_parameters + head + activations + cache
    return number * held + (2 * FP32 + number) * (logits if has_vocabulary else 0)
