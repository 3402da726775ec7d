"""Episodes whose model is a function of the conversation, so that agents play without an engine."""

import asyncio
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from headway.rollout_workers.agents.conversation import Message, ParsedAnswer, ToolCall
from headway.rollout_workers.agents.episode import AgentAnswer, AgentEpisode, AgentTask

Said = str | Sequence[tuple[str, Any]] | None
"""What a model says: text, calls of tools by name and arguments (JSON text, or what is written as JSON), or nothing,
since the episode has no room for another turn."""
Model = Callable[[list[Message]], Said]

NOTHING_LEFT = AgentAnswer(content="", message={"role": "assistant", "content": ""}, finish_reason="length")


class ScriptedEpisode(AgentEpisode):
    """Answers each call by `model`, and keeps what was asked and given."""

    def __init__(
        self,
        model: Model,
        *,
        base_url: str = "http://127.0.0.1:9/s/lease/v1",
        api_key: str = "secret",
        finish_reason: str = "",
    ) -> None:
        """`finish_reason`: of all answers, in the place of what they are."""
        super().__init__(base_url, api_key, self._answer)
        self._model = model
        self._finish_reason = finish_reason
        self._numbers = itertools.count(1)
        self.asked: list[dict[str, Any]] = []
        """The calls of the model."""
        self.rewards: list[float] = []
        """The rewards of single turns."""

    @property
    def conversation(self) -> list[Message]:
        """The messages of the last call."""
        return list(self.asked[-1]["messages"])

    async def _answer(self, path: str, asked: dict[str, Any]) -> Any:
        await asyncio.sleep(0)
        asked = json.loads(json.dumps(asked))  # as it would travel
        if path == "reward":
            self.rewards.append(asked["reward"])
            return {}
        assert path == "turn"
        self.asked.append(asked)
        messages = asked.get("messages") or [{"role": "user", "content": asked["prompt_token_ids"]}]
        return msgspec.to_builtins(self._said(self._model(messages), len(json.dumps(messages))))

    def _said(self, said: Said, length: int) -> AgentAnswer:
        if said is None:
            return NOTHING_LEFT
        text, calls = (said, []) if isinstance(said, str) else ("", said)
        parsed = ParsedAnswer(content=text, tool_calls=tuple(self._tool_call(name, given) for name, given in calls))
        return AgentAnswer(
            content=text,
            tool_calls=parsed.tool_calls,
            message=parsed.message(),
            finish_reason=self._finish_reason or ("tool_calls" if calls else "stop"),
            prompt_token_ids=list(range(length)),
            token_ids=[length, 0],
            logprobs=[-0.5, -0.25],
        )

    def _tool_call(self, name: str, arguments: Any) -> ToolCall:
        written = arguments if isinstance(arguments, str) else json.dumps(arguments)
        return ToolCall(id=f"call-{next(self._numbers)}", name=name, arguments=written)


def in_turn(*said: Said) -> Model:
    """Return a model that says one thing after another, and then nothing more."""
    left = iter(said)
    return lambda messages: next(left, None)


def a_task(text: str = "What is 6 * 7?", *, seed: int = 7, ground_truth: Any = None, **extra: Any) -> AgentTask:
    """Return a task of one message."""
    messages = [{"role": "user", "content": text}]
    return AgentTask(id="0-0", text=text, messages=messages, ground_truth=ground_truth, extra_info=extra, seed=seed)


def of_role(messages: Sequence[Mapping[str, Any]], role: str) -> list[str]:
    """Return the contents of the messages of a role."""
    return [message["content"] for message in messages if message["role"] == role]
