"""The seam between a worker and whatever generates tokens."""

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Literal, Protocol

import msgspec
import torch

from broker.schema import Experts, WeightVersion

from .held import Held

FinishReason = Literal["stop", "length"]
"""How a response ends: with a stop token, or because it may not get longer."""

NamedTensors = Sequence[tuple[str, torch.Tensor]]
"""Hugging Face parameter names with full (unsharded) tensors, in host memory or on a GPU."""


Parts = AsyncIterator[NamedTensors]
"""All tensors, a few at a time, each of them whole; they may be overwritten once the next ones are asked for."""


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
    experts_from: int | None = None
    """Router replay: report the experts that tokens from this position of the prompt on are given. None: of none."""


class Chunk(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens sampled one after another by one weight version."""

    token_ids: list[int]
    logprobs: list[float]
    """Of the sampled tokens, temperature applied, before top-p and top-k cut the distribution."""
    version: WeightVersion
    experts: Experts | None = None
    """Of the tokens that were fed to sample these: one row for each from the token before the first of these on; in a
    request's first chunk also for those of its prompt from `experts_from` on. What a weight swap made an engine compute
    anew is not reported again. None where the request wants none, or there are no tokens."""
    finish_reason: FinishReason | Literal["interrupted"] | None = None
    """Set on the last chunk, which may have no tokens; the stop token itself is part of the response. "interrupted":
    the engine had to give the request up, and another request can go on after these tokens."""


Check = Callable[[Held | None], None]
"""Takes what an engine holds of every tensor of a swap, read from what it computes with; None where it keeps weights in
another form than they were published in. Raises WeightSyncError if nothing may be sampled with that."""


class Engine(Protocol):
    """Generates continuously; weights may change under running requests."""

    capacity: int
    """Requests that it can batch."""
    max_model_len: int
    """Longest prompt plus response, in tokens: there a response ends with "length"."""

    def generate(self, request: GenerationRequest) -> AsyncIterator[Chunk]:
        """Stream one sample up to a chunk with a finish reason. Closing the iterator cancels the request and frees
        its place.

        The prompt may end with tokens that a request generated before: what follows is sampled as if there had been
        only one request. Raises HeadwayError for `experts_from` where the model has no experts.
        """
        ...

    async def swap_weights(
        self,
        version: WeightVersion,
        tensors: NamedTensors,
        *,
        keep_cache: bool = False,
        check: Check | None = None,
    ) -> None:
        """Load `tensors` between two decoding steps without dropping requests, and recompute what they had cached.

        Tokens sampled before are of the old version, tokens after it of the new one, exactly. With `keep_cache` what
        running requests had cached stays: their later tokens, with the logprobs that they were sampled with, are of the
        new weights over keys and values of older ones. A request that begins after the swap has returned uses nothing
        that older weights cached. Raises NoRoomError where there was no memory for it and the engine goes on with what
        it had, else WeightSyncError if it could not take the tensors.

        `check` is called, in any thread, before a token is sampled with the tensors. If it raises, so does this, and
        the engine samples nothing until a later swap succeeds; requests wait.
        """
        ...

    async def swap_in_parts(
        self, version: WeightVersion, parts: Parts, *, keep_cache: bool = False, check: Check | None = None
    ) -> None:
        """As `swap_weights`, without room for a second version: parts go over the weights that are held, and from the
        first one on nothing is sampled.

        If the parts raise, or together are not what an earlier `swap_weights` loaded, so does this, and nothing is
        sampled until a later swap succeeds. NoRoomError: there was none for the first part.
        """
        ...

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """Logprobs of `token_ids[1:]` given what precedes them, at temperature 1, under the weights held now."""
        ...

    async def sleep(self) -> None:
        """Leave the device's memory to others: weights and caches are gone, and `swap_weights` comes first afterwards.

        No request may be running. Raises WeightSyncError if it could not.
        """
        ...

    async def wake(self) -> None:
        """Take the memory again, still without weights; nothing where it is awake. Raises WeightSyncError if it could
        not."""
        ...

    async def close(self) -> None:
        """Stop generating and free everything; asleep too. Idempotent."""
        ...
