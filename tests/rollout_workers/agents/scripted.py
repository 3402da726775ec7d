"""A session without a model: it answers from a script, and keeps the promises of `Session` in memory."""

import asyncio
import math
from collections.abc import Callable
from typing import Any

from headway.rollout_workers.agents.calls import CallRefusedError, ChatAnswer, ChatCall, Session, SessionEndedError
from headway.rollout_workers.agents.conversation import ParsedAnswer, ToolCall

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "look_up", "description": "looks up", "parameters": {"type": "object", "properties": {}}},
}


def spoken(call: ChatCall, number: int) -> ParsedAnswer:
    """Return the script's usual answer: a call of the first tool that is offered, or text."""
    if call.tools and call.messages[-1]["role"] != "tool":
        name = call.tools[0]["function"]["name"]
        return ParsedAnswer(
            content="", tool_calls=(ToolCall(id=f"call_{number}", name=name, arguments='{"key": "x"}'),)
        )
    return ParsedAnswer(content=f"answer {number}")


class Record:
    """The answer to a call, or the task that samples it."""

    def __init__(self, sampling: asyncio.Task[ChatAnswer]) -> None:
        self.sampling = sampling
        self.waiting = 0
        self.is_lost = False


class ScriptedSession:
    """Answers a call that was lost, or that is a retry, from its record."""

    model = "tiny"

    def __init__(self, speak: Callable[[ChatCall, int], ParsedAnswer] = spoken) -> None:
        self.speak = speak
        self.calls = list[ChatCall]()
        self.lost = list[str]()
        self.rewards = list[float]()
        self.finished: tuple[float | None, dict[str, float]] | None = None
        self.gate: asyncio.Event | None = None
        self.waiting = 0
        self._records = dict[str, Record]()

    async def chat(self, call: ChatCall) -> ChatAnswer:
        call.check_sampling(temperature=1.0, top_p=1.0, top_k=0, seed=None)
        record = self._records.get(call.digest)
        if record is None or not (record.is_lost or call.is_retry):
            self.calls.append(call)
            record = Record(asyncio.create_task(self._sample(call, len(self.calls))))
            self._records[call.digest] = record
        record.is_lost = False
        record.waiting += 1
        self.waiting += 1
        try:
            return await asyncio.shield(record.sampling)
        except asyncio.CancelledError:
            record.is_lost = record.waiting == 1
            raise
        finally:
            record.waiting -= 1
            self.waiting -= 1

    async def _sample(self, call: ChatCall, number: int) -> ChatAnswer:
        if self.gate is not None:
            await self.gate.wait()
        parsed = self.speak(call, number)
        return ChatAnswer(
            message=parsed.message(),
            finish_reason="tool_calls" if parsed.tool_calls else "stop",
            prompt_token_ids=call.prompt_token_ids or [1, 2, 3],
            token_ids=[104, 105],
            logprobs=[-0.5, -0.25],
            id=f"{call.digest}-{number}",
        )

    def note_lost(self, answer: ChatAnswer) -> None:
        self.lost.append(answer.id)
        self._records[answer.id.partition("-")[0]].is_lost = True

    def count_tokens(self, call: ChatCall) -> int:
        return 7 * len(call.messages)

    def text_of(self, token_ids: list[int]) -> str:
        return "".join(map(chr, token_ids))

    def give_reward(self, reward: float) -> None:
        if not self.calls or not math.isfinite(reward):
            raise CallRefusedError("there is no turn to reward")
        self.rewards.append(reward)

    async def finish(self, reward: float | None, measures: dict[str, float]) -> None:
        self.finished = reward, measures


class ScriptedSessions:
    """The sessions of an endpoint by their names."""

    def __init__(self, **sessions: Session) -> None:
        self.by_name = dict(sessions)

    def session(self, name: str) -> Session:
        try:
            return self.by_name[name]
        except KeyError:
            raise SessionEndedError("this episode has ended") from None
