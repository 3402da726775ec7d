"""The memory of a model that only scores: whole on one device, without gradients."""

from typing import Literal

from headway.learner.models.shape import ModelShape

from .estimates import all_numbers
from .planned import FP32

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
