"""The memory of a model that only scores: whole on one device, by transformers, without gradients."""

from typing import Literal

from learner.models.shape import ModelShape

from .estimates import all_numbers
from .planned import FP32

LOGITS = 1 << 26
"""The logits that a teacher holds at one time, in fp32, with a copy in the model's format and one of the sum."""


def scorer_bytes(
    shape: ModelShape,
    dtype: Literal["float32", "bfloat16", "float16"],
    batch_tokens: int,
    *,
    has_vocabulary: bool,
) -> int:
    """Returns the bytes of the weights, which are exact, and an estimate of one layer's activations and of the logits.

    A model without vocabulary has a head of one output.
    """
    number = FP32 if dtype == "float32" else FP32 // 2
    head = 0 if has_vocabulary else shape.width - sum(part.size for part in shape.parameters if part.part == "head")
    activations = batch_tokens * max(all_numbers(shape, layer) for layer in range(shape.layers))
    logits = min(batch_tokens * shape.vocabulary, LOGITS) if has_vocabulary else 0
    return number * (shape.num_parameters + head + activations) + (2 * FP32 + number) * logits
