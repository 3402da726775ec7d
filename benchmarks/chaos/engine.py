"""The engine's double: it streams each sample slowly, swaps between two tokens, and counts its tokens."""

import asyncio
import ctypes
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import ClassVar

import torch

from headway.broker.errors import WeightSyncError
from headway.broker.schema import TrajectoryId, WeightVersion
from headway.rollout_workers.config import EngineConfig
from headway.rollout_workers.engines.abilities import EngineAbilities
from headway.rollout_workers.engines.base import (
    Check,
    Chunk,
    GenerationRequest,
    NamedTensors,
    Parts,
    WeightFingerprints,
)
from headway.weightsync.tensors.fingerprint import fingerprint

from .backend import token_logprobs
from .tasks import STOP, WEIGHTS, logprobs_of, response_length, response_tokens
from .user_code import PROMPT_TOKENS

TICK_S = 0.05
TOKENS_A_TICK = 2


class Tally(ctypes.Structure):
    """Counts in memory that outlives the process, so that kill -9 does not lose them."""

    _fields_ = tuple((name, ctypes.c_int64) for name in ("generated", "resumed", "repeated", "forgotten", "received"))
    generated: int
    """The number of generated tokens."""
    resumed: int
    """The number of tokens that another worker had generated."""
    repeated: int
    """The number of submissions made once more."""
    forgotten: int
    """The number of leases that a heartbeat did not renew."""
    received: int
    """Versions that came by broadcast."""


class SlowEngine:
    """An engine in which every request is equally slow."""

    abilities = EngineAbilities(sleeps=False, tells_experts=False)
    tally: ClassVar[Tally] = Tally()
    """The counts of this process."""

    def __init__(self, config: EngineConfig, model_dir: Path, *, seed: int) -> None:
        self.capacity = config.max_concurrent
        self.max_model_len = config.max_model_len
        self._version: WeightVersion | None = None
        self._weights = torch.zeros(1)
        self._name = WEIGHTS

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Chunk]:
        """Generate from the end of the request's tokens."""
        tid, position = _tid_of(request.request_id), len(request.prompt_tokens) - PROMPT_TOKENS
        length = response_length(tid)
        assert request.stop_token_ids == [STOP], request.stop_token_ids
        self.tally.resumed += position
        while position < length:
            await asyncio.sleep(TICK_S)
            assert self._version is not None, "a request before the first weights"
            end = min(position + TOKENS_A_TICK, length)
            tokens = response_tokens(tid, position, end, self._version, self._name)
            self.tally.generated += end - position
            position = end
            yield Chunk(
                token_ids=tokens.tolist(),
                logprobs=logprobs_of(tokens).tolist(),
                version=self._version,
                finish_reason="stop" if position == length else None,
            )

    async def swap_weights(
        self, version: WeightVersion, tensors: NamedTensors, *, keep_cache: bool = False, check: Check | None = None
    ) -> None:
        """Use the weights from the next token on."""
        ((name, weights),) = tensors
        self._weights, self._name = weights.clone(), name
        if check is not None:
            check(WeightFingerprints.of({name: (fingerprint(self._weights), self._weights.numel())}))
        self._version = version

    async def swap_in_parts(
        self, version: WeightVersion, parts: Parts, *, keep_cache: bool = False, check: Check | None = None
    ) -> None:
        """Raise WeightSyncError, because no trial sends weights in parts."""
        raise WeightSyncError("the engine's double takes whole versions")

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """Return logprobs as the learner's double computes them."""
        logprobs: list[float] = token_logprobs(self._weights, torch.tensor(token_ids[1:])).tolist()
        return logprobs

    async def close(self) -> None:
        """There is nothing to free."""


def _tid_of(request_id: str) -> TrajectoryId:
    """Parse a worker's request id: `group:round:sample:...`, or `eval:place:...` for an evaluation."""
    group, round_, sample, *_ = request_id.split(":")
    if group == "eval":
        return TrajectoryId(group, 0, int(round_))
    return TrajectoryId(group, int(round_), int(sample))
