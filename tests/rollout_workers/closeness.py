"""The distance that an engine's logprobs may have from those of the same weights elsewhere."""

from dataclasses import dataclass

import pytest
import torch
from transformers import PreTrainedModel

from .generation import Response

IN_HALF_PRECISION = {"qwen3": 0.1, "qwen3_moe": 0.4}
"""The most by which logprobs in bfloat16 are off on the mean, by the type of the model. With the wrong weights they
are off by 2 or more."""


@dataclass(frozen=True)
class Closeness:
    """The measure of one engine: exact, or rounded if the engine computes in half precision.

    Of a rounded one the mean counts, as a router in half precision sends a few tokens to other experts, and two of its
    greedy answers may part where two tokens are as likely.
    """

    tolerance: float
    is_rounded: bool = False

    @staticmethod
    def of(model: PreTrainedModel) -> "Closeness":
        """Return that of engines whose weights have this model's number format."""
        if model.dtype is not torch.float32:
            return Closeness(IN_HALF_PRECISION[model.config.model_type], is_rounded=True)
        return Closeness(1e-2 if torch.cuda.is_available() else 1e-4)

    @property
    def apart(self) -> float:
        """Return what logprobs over another cache are off by, or more."""
        return self.tolerance if self.is_rounded else 100 * self.tolerance

    def off(self, differences: torch.Tensor) -> float:
        """Return how far logprobs are off which differ by these."""
        return float(differences.mean() if self.is_rounded else differences.max())

    def check_same(self, response: Response, expected: Response) -> None:
        """Assert that two greedy answers are the same."""
        pairs = zip(response.tokens, expected.tokens, strict=True)
        parted = next((place for place, (ours, theirs) in enumerate(pairs) if ours != theirs), None)
        assert parted is None or self.is_rounded
        if self.is_rounded:
            until = None if parted is None else parted + 1
            ours, theirs = (torch.tensor(one.logprobs[:until]) for one in (response, expected))
            assert self.off((ours - theirs).abs()) < self.tolerance
        else:
            assert response.logprobs == pytest.approx(expected.logprobs, abs=self.tolerance)
