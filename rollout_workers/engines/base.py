"""The seam between a worker and whatever generates tokens."""

from collections.abc import AsyncIterator, Sequence
from typing import Literal, Protocol

import msgspec
import torch

from broker.schema import WeightVersion

NamedTensors = Sequence[tuple[str, torch.Tensor]]
"""Hugging Face parameter names with full (unsharded) CPU tensors."""


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One sample to generate."""

    request_id: str
    prompt_tokens: list[int]
    max_new_tokens: int
    temperature: float
    """0 decodes greedily; logprobs are then those of temperature 1."""
    top_p: float = 1.0
    top_k: int = 0
    """0: all tokens."""
    stop_token_ids: list[int]
    seed: int | None = None


class Chunk(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens sampled one after another by one weight version."""

    token_ids: list[int]
    logprobs: list[float]
    """Of the sampled tokens, temperature applied, before top-p and top-k cut the distribution."""
    version: WeightVersion
    finish_reason: Literal["stop", "length"] | None = None
    """Set on the last chunk; the stop token itself is part of the response."""


class Engine(Protocol):
    """Generates continuously; weights may change under running requests."""

    capacity: int
    """Requests that it can batch."""

    def generate(self, request: GenerationRequest) -> AsyncIterator[Chunk]:
        """Stream one sample. Closing the iterator cancels the request and frees its place."""
        ...

    async def swap_weights(self, version: WeightVersion, tensors: NamedTensors) -> None:
        """Load `tensors` between two decoding steps without dropping requests, and recompute what they had cached.

        Tokens sampled before are of the old version, tokens after it of the new one, exactly. Raises WeightSyncError if
        the engine could not take them.
        """
        ...

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """Logprobs of `token_ids[1:]` given what precedes them, at temperature 1, under the weights held now."""
        ...

    async def close(self) -> None:
        """Stop generating and free everything. Idempotent."""
        ...
