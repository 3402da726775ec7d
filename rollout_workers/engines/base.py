"""The seam between a worker and the engine that generates its tokens."""

from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeGuard, runtime_checkable

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from headway.broker.errors import LASTING_EXIT, ConfigError
from headway.broker.schema import Experts, WeightVersion
from headway.broker.user_code.kinds import did_you_mean

Fingerprints = NDArray[np.uint64]
Elements = NDArray[np.int64]


@dataclass(frozen=True)
class WeightFingerprints:
    """The fingerprints and sizes of the tensors that all shards of an engine hold together, or one shard. They are in
    arrays: there may be tens of thousands of tensors. N tensors."""

    names: tuple[str, ...]
    fingerprints_N: Fingerprints
    """The sum of the fingerprints of each tensor's parts, mod 2^64 (`weightsync.tensors.fingerprint`)."""
    elements_N: Elements
    """Elements held of each tensor: a multiple of its size if shards have copies; 0 if none of it is held."""

    @staticmethod
    def of(tensors: Mapping[str, tuple[int, int]]) -> "WeightFingerprints":
        """Build one from (fingerprint, elements) by name."""
        fingerprints = np.array([fingerprint for fingerprint, _ in tensors.values()], np.uint64)
        return WeightFingerprints(
            tuple(tensors), fingerprints, np.array([elements for _, elements in tensors.values()], np.int64)
        )

    @staticmethod
    def together(shards: Iterable["WeightFingerprints"]) -> "WeightFingerprints":
        """Add up shards that were given the same tensors. There must be at least one shard."""
        first, *others = shards
        fingerprints_N, elements_N = first.fingerprints_N.copy(), first.elements_N.copy()
        for other in others:
            fingerprints_N += other.fingerprints_N
            elements_N += other.elements_N
        return WeightFingerprints(first.names, fingerprints_N, elements_N)


FinishReason = Literal["stop", "length"]
"""The end of a response: at a stop token, or at its longest length."""

NamedTensors = Sequence[tuple[str, torch.Tensor]]
"""Hugging Face parameter names with full (unsharded) tensors, in host memory or on a GPU."""


Parts = AsyncIterator[NamedTensors]
"""All tensors of a version, a few whole tensors at a time. They may be overwritten once the next ones are asked for."""


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One sample to generate."""

    request_id: str
    prompt_tokens: list[int]
    max_new_tokens: int
    temperature: float
    """Sampling temperature; 0 decodes greedily, and logprobs are then those of temperature 1."""
    top_p: float = 1.0
    top_k: int = 0
    """Number of likeliest tokens that are sampled from; 0: all of them."""
    stop_token_ids: list[int]
    seed: int | None = None
    experts_from: int | None = None
    """Position in the prompt from which on the engine reports each token's experts, for router replay; None: it reports
    none."""


class Chunk(msgspec.Struct, frozen=True, kw_only=True):
    """Consecutive tokens that one weight version sampled."""

    token_ids: list[int]
    logprobs: list[float]
    """One logprob for each token, with the temperature applied, before top-p and top-k cut the distribution."""
    version: WeightVersion
    experts: Experts | None = None
    """The experts of the tokens that were fed to sample these: one row for each token from the one before the first of
    these on; a request's first chunk has rows of its prompt too, from `experts_from` on. Tokens that an engine computes
    anew after a swap are not reported again. None if the request wants no experts, or the chunk has no tokens."""
    finish_reason: FinishReason | Literal["interrupted"] | None = None
    """Set on the last chunk, which may have no tokens; the stop token is part of the response. "interrupted": the
    engine gave the request up, and another request can go on after these tokens."""


Check = Callable[[WeightFingerprints | None], None]
"""Checks what an engine holds of every tensor of a swap, read from the memory that it computes with; the argument is
None if the engine keeps weights in another form than they were published in. Raises WeightSyncError if the engine may
not sample with them."""


class EngineOptionsError(ConfigError):
    """An engine cannot be started with these options. Another start would not mend it."""

    exit_code = LASTING_EXIT


def check_arguments(options: Iterable[str], known: Collection[str], engine: str) -> None:
    """Raise EngineOptionsError for the first of `engine.options` that is not among the arguments of this engine, which
    is told by its name and version."""
    for name in options:
        if name not in known:
            hint = did_you_mean(name, known) or "."
            raise EngineOptionsError(f"engine.options.{name}: {engine} has no such argument{hint}")


class Engine(Protocol):
    """Generates continuously; weights may change under running requests."""

    capacity: int
    """Requests that the engine can batch."""
    max_model_len: int
    """Longest prompt plus response, in tokens. A response that reaches it ends with "length"."""

    def generate(self, request: GenerationRequest) -> AsyncIterator[Chunk]:
        """Stream one sample up to a chunk with a finish reason. Closing the iterator cancels the request and frees its
        place.

        The prompt may end with tokens that an earlier request generated: sampling goes on as if there had been only one
        request. Raises HeadwayError for `experts_from` if the model has no experts.
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

        Tokens sampled before the swap are exactly of the old version, tokens after it of the new one. With `keep_cache`
        running requests keep their cache: their later tokens, and the logprobs of these, come from the new weights over
        keys and values of older ones. A request that begins after the swap has returned uses no cache of older weights.
        Raises NoRoomError if memory was lacking and the engine goes on with its old weights, else WeightSyncError if it
        could not take the tensors.

        `check` is called, in any thread, before a token is sampled with the tensors. If it raises, this method raises
        the same, and the engine samples nothing until a later swap succeeds; requests wait.
        """
        ...

    async def swap_in_parts(
        self, version: WeightVersion, parts: Parts, *, keep_cache: bool = False, check: Check | None = None
    ) -> None:
        """Swap as `swap_weights` does, without room for a second version: parts overwrite the weights that are held,
        and the engine samples nothing from the first part on.

        If the parts raise, or together differ from what an earlier `swap_weights` loaded, this method raises, and the
        engine samples nothing until a later swap succeeds. Raises NoRoomError if there was no room for the first part.
        """
        ...

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """Return the logprobs of `token_ids[1:]` given what precedes them, at temperature 1, under the weights held
        now."""
        ...

    async def sleep(self) -> None:
        """Free the device's memory: weights and caches are gone, and `swap_weights` must come first afterwards.

        No request may be running. Raises WeightSyncError if the engine could not.
        """
        ...

    async def wake(self) -> None:
        """Take the memory again, without weights; do nothing if the engine is awake. Raises WeightSyncError if it could
        not."""
        ...

    async def close(self) -> None:
        """Stop generating and free everything, also of an engine that is asleep. Idempotent."""
        ...


def rounding_of(engine: Engine) -> float:
    """Return by how much an engine's own rounding of weights may change a logprob, on the mean: its attribute
    `rounding`, which an engine has that holds weights in fewer bits than they were published in; 0 without it."""
    return float(getattr(engine, "rounding", 0.0))


def attaches_memory(engine: Engine) -> bool:
    """Return whether an engine's processes attach the memory of tensors that it is given, so that none is copied where
    they can: its attribute `attaches_memory`; False without it."""
    return bool(getattr(engine, "attaches_memory", False))


@runtime_checkable
class AdaptedEngine(Engine, Protocol):
    """An engine that also takes versions of an adapter alone: it computes W x + scale * B (A x), and W stays.

    Names are those of the model's modules, as in `layers.0.self_attn.q_proj.lora_A` [R, I] and `lora_B` [O, R], or
    `layers.0.mlp.experts.down_proj_lora_A` [E, R, I] and `..._lora_B` [E, O, R] of all experts of a layer.
    """

    async def load_base(self, tensors: NamedTensors, *, check: Check | None = None) -> None:
        """Load the weights W. The engine samples nothing from then on until `swap_adapter` has succeeded.

        It must copy the tensors: they may lie in the model's files, and what is in these may change later."""
        ...

    async def swap_adapter(
        self,
        version: WeightVersion,
        tensors: NamedTensors,
        scale: float,
        *,
        keep_cache: bool = False,
        check: Check | None = None,
    ) -> None:
        """Swap as `swap_weights` does, over the weights that `load_base` has loaded.

        An engine that was opened to hold several adapters has requests finish with the one that they began with, as
        long as it has room: else those of the oldest version go on with the new one.
        """
        ...

    async def score_base(self, token_ids: Sequence[int]) -> list[float]:
        """Return what `score` does, of the weights W alone: the engine computes as for `score`, and adds no adapter."""
        ...


def takes_adapters(engine: Engine) -> TypeGuard[AdaptedEngine]:
    """Return whether an engine has what an `AdaptedEngine` adds. It may lack methods that it states not to offer."""
    return all(hasattr(engine, name) for name in ("load_base", "swap_adapter", "score_base"))


def usable_device(name: str, key: str) -> torch.device:
    """Return the device. Raises ConfigError, with the `key` that names it, if torch cannot use it in this process."""
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:  # a torch without CUDA asserts that it has it
        why = str(error).partition("\n")[0].rstrip(".")
        raise ConfigError(f"{key} is {name}, which torch cannot use here: {why}. Set {key}=cpu.") from error
    return device
