"""The engine's double: streams each sample slowly, obeys swaps between two tokens, and tells how much it made."""

import asyncio
import ctypes
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import ClassVar

import torch

from broker.errors import WeightSyncError
from broker.schema import TrajectoryId, WeightVersion
from rollout_workers.config import EngineConfig
from rollout_workers.engines.abilities import EngineAbilities
from rollout_workers.engines.base import Check, Chunk, GenerationRequest, NamedTensors, Parts
from rollout_workers.engines.held import Held
from weightsync.tensors.fingerprint import fingerprint

from .backend import token_logprobs
from .tasks import STOP, WEIGHTS, logprobs_of, response_length, response_tokens
from .user_code import PROMPT_TOKENS

TICK_S = 0.05
TOKENS_A_TICK = 2


class Tally(ctypes.Structure):
    """Numbers in memory that outlives the process: kill -9 must not take them along."""

    _fields_ = tuple((name, ctypes.c_int64) for name in ("generated", "resumed", "repeated", "forgotten", "received"))
    generated: int
    """Tokens."""
    resumed: int
    """Tokens that somebody else had generated."""
    repeated: int
    """Submissions made once more."""
    forgotten: int
    """Leases that a heartbeat did not renew."""
    received: int
    """Versions that came by broadcast."""


class SlowEngine:
    """Every request is as slow as every other."""

    abilities = EngineAbilities(sleeps=False, tells_experts=False)
    tally: ClassVar[Tally] = Tally()
    """Of this process."""

    def __init__(self, config: EngineConfig, model_dir: Path, *, seed: int) -> None:
        self.capacity = config.max_concurrent
        self.max_model_len = config.max_model_len
        self._version: WeightVersion | None = None
        self._weights = torch.zeros(1)
        self._name = WEIGHTS

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Chunk]:
        """From wherever the request's tokens end."""
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
        """From the next token on."""
        ((name, weights),) = tensors
        self._weights, self._name = weights.clone(), name
        if check is not None:
            check(Held.of({name: (fingerprint(self._weights), self._weights.numel())}))
        self._version = version

    async def swap_in_parts(
        self, version: WeightVersion, parts: Parts, *, keep_cache: bool = False, check: Check | None = None
    ) -> None:
        """No trial sends weights so."""
        raise WeightSyncError("the engine's double takes whole versions")

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """As the learner's double computes it."""
        logprobs: list[float] = token_logprobs(self._weights, torch.tensor(token_ids[1:])).tolist()
        return logprobs

    async def close(self) -> None:
        """Nothing to free."""


def _tid_of(request_id: str) -> TrajectoryId:
    """The worker names requests `group:round:sample:...`, those of evaluations `eval:place:...`."""
    group, round_, sample, *_ = request_id.split(":")
    if group == "eval":
        return TrajectoryId(group, 0, int(round_))
    return TrajectoryId(group, int(round_), int(sample))
