"""A session without a model: it answers from a script, and keeps the promises of `Session` in memory."""

import asyncio
import math
from collections.abc import Callable

from headway.rollout_workers.agents.calls import CallRefusedError, ChatAnswer, ChatCall, SessionEndedError
from headway.rollout_workers.agents.conversation import ParsedAnswer, ToolCall

TOOL = {
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


class ScriptedSession:
    """Answers each call once, and a repeated one from its record until the answer is delivered."""

    model = "tiny"

    def __init__(self, speak: Callable[[ChatCall, int], ParsedAnswer] = spoken) -> None:
        self.speak = speak
        self.calls = list[ChatCall]()
        self.delivered = list[str]()
        self.rewards = list[float]()
        self.finished: tuple[float | None, dict[str, float]] | None = None
        self.gate: asyncio.Event | None = None
        self.sampling = 0
        self._records = dict[str, asyncio.Future[ChatAnswer]]()
        self._open = set[str]()

    async def chat(self, call: ChatCall) -> ChatAnswer:
        call.check_sampling(temperature=1.0, top_p=1.0, top_k=0, seed=None)
        digest = call.digest
        known = self._records.get(digest)
        if known is None or (digest not in self._open and not call.is_retry):
            known = self._records[digest] = asyncio.get_running_loop().create_future()
            self._open.add(digest)
            try:
                known.set_result(await self._sample(call, digest))
            finally:
                known.cancel()  # no effect on a result
        return await asyncio.shield(known)

    async def _sample(self, call: ChatCall, digest: str) -> ChatAnswer:
        self.calls.append(call)
        number = len(self.calls)
        self.sampling += 1
        try:
            if self.gate is not None:
                await self.gate.wait()
        finally:
            self.sampling -= 1
        parsed = self.speak(call, number)
        return ChatAnswer(
            message=parsed.message(),
            finish_reason="tool_calls" if parsed.tool_calls else "stop",
            prompt_token_ids=call.prompt_token_ids or [1, 2, 3],
            token_ids=[104, 105],
            logprobs=[-0.5, -0.25],
            id=f"{digest}-{number}",
        )

    def note_delivered(self, answer: ChatAnswer) -> None:
        self.delivered.append(answer.id)
        self._open.discard(answer.id.partition("-")[0])

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

    def __init__(self, **sessions: ScriptedSession) -> None:
        self.by_name = dict(sessions)

    def session(self, name: str) -> ScriptedSession:
        try:
            return self.by_name[name]
        except KeyError:
            raise SessionEndedError("this episode has ended") from None
