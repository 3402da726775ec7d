"""How long an answer may be: turns and tokens of an episode, which calls that run at the same time share."""

import asyncio
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager

from headway.rollout_workers.config import AgentConfig
from headway.rollout_workers.samples.episode import PlayedSample

from .tree import EpisodeRecorder


class EpisodeBudget:
    """What an episode has left, without what its running calls reserve."""

    def __init__(self, sample: PlayedSample, recorder: EpisodeRecorder, config: AgentConfig) -> None:
        self._sample = sample
        self._recorder = recorder
        self._config = config
        self._tokens = self._turns = 0
        """Reserved."""
        self._freed = asyncio.Event()
        """Set when a call that runs has left tokens."""

    @asynccontextmanager
    async def reserved(self, read: int, whole: int, asked: int | None, unseen: Collection[int]) -> AsyncIterator[int]:
        """Yield how many tokens an answer may have, which no other call may take meanwhile; 0 if the episode has no
        turn or token left. Where only calls that run have them, it waits for these.

        The model reads `whole` tokens, of which `read` are new. `asked`: the longest answer that the call wants.
        `unseen`: recorded turns that the agent does not have; those of earlier attempts count as no turn yet.
        """
        while (longest := self._longest(read, whole, asked)) < 1 and self._tokens:
            self._freed.clear()
            await self._freed.wait()
        unrepeated = sum(number < self._recorder.resumed for number in unseen)
        turns = len(self._recorder.turns) - unrepeated + self._turns
        if longest < 1 or turns >= self._config.max_turns:
            yield 0
            return
        self._tokens, self._turns = self._tokens + read + longest, self._turns + 1
        try:
            yield longest
        finally:
            self._tokens, self._turns = self._tokens - read - longest, self._turns - 1
            self._freed.set()

    def _longest(self, read: int, whole: int, asked: int | None) -> int:
        left = self._sample.request.max_new_tokens - len(self._recorder.tokens) - self._tokens - read
        bounds = (left, self._sample.max_model_len - whole, self._config.max_turn_tokens, asked)
        return min(bound for bound in bounds if bound is not None)
