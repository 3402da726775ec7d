"""What agent code sees: `async def rollout(episode, task) -> float | dict | None`.

    async def rollout(episode: AgentEpisode, task: AgentTask) -> float:
        messages = [{"role": "user", "content": task.text}]
        answer = await episode.chat(messages, tools=TOOLS)
        ...
        return 1.0

It runs in a host process, or in any program that has an episode's URL and key, and imports nothing of the worker.
"""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Literal

import msgspec

from headway.broker.errors import HeadwayError

from .conversation import Message, Tool, ToolCall


class AgentCallError(HeadwayError):
    """A call of the model asks for what cannot be honoured."""


class EpisodeOverError(HeadwayError):
    """The episode takes no more calls: it has ended, or another worker plays it now."""


class AgentTask(msgspec.Struct, frozen=True, kw_only=True):
    """What the agent is to do: a prompt of the run, and the number of this sample of it."""

    id: str
    """The prompt's name in the run."""
    text: str
    messages: list[Message]
    """The prompt as a conversation; of a prompt that is text, one message of the user."""
    ground_truth: Any = None
    data_source: str = ""
    extra_info: dict[str, Any] = {}
    """The other fields of its row."""
    sample: int = 0
    """The number of this sample of the prompt's group."""
    seed: int = 0
    """The same for all samples of a group and all attempts: seed what the task draws with it."""


class AgentAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """One turn of the model."""

    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    message: Message
    """The assistant's message, to be sent back with the next call, as it is."""
    finish_reason: str
    """stop, tool_calls, or length: it was cut, or the episode has no tokens or turns left."""
    prompt_token_ids: list[int] = []
    token_ids: list[int] = []
    logprobs: list[float] = []

    @property
    def is_over(self) -> bool:
        """Whether the episode has no room for another turn: this answer has no token."""
        return not self.token_ids


Outcome = float | Mapping[str, float] | None
"""The whole episode's reward beside what single turns got; with measures beside `reward`; None: it does not apply, and
the run's reward functions score the last answer."""


class AgentEpisode:
    """A model to talk to. Each call is one turn of a tree: a call that repeats the conversation so far goes on with the
    very tokens that were sampled; any other call begins a branch."""

    def __init__(self, base_url: str, api_key: str, call: Callable[[str, dict[str, Any]], Awaitable[Any]]) -> None:
        """`base_url`: of an OpenAI endpoint, with `/v1`. `call` posts JSON to a path below it, and returns the answer's
        JSON."""
        self.base_url = base_url
        """For a client of OpenAI's; without `/v1` for one of Anthropic's."""
        self.api_key = api_key
        self._call = call

    async def chat(
        self, messages: Sequence[Message], tools: Sequence[Tool] = (), *, max_tokens: int | None = None
    ) -> AgentAnswer:
        """Have the model answer a conversation. Raises AgentCallError for a call that cannot be honoured."""
        asked: dict[str, Any] = {"messages": list(messages), "tools": list(tools)}
        return await self._answered(asked | ({} if max_tokens is None else {"max_tokens": max_tokens}))

    async def generate(self, prompt_token_ids: Sequence[int], *, max_tokens: int | None = None) -> AgentAnswer:
        """Have the model go on after these tokens."""
        asked: dict[str, Any] = {"prompt_token_ids": list(prompt_token_ids)}
        return await self._answered(asked | ({} if max_tokens is None else {"max_tokens": max_tokens}))

    async def reward(self, reward: float) -> None:
        """Add to the reward of the newest turn."""
        await self._call("reward", {"reward": reward})

    async def _answered(self, asked: dict[str, Any]) -> AgentAnswer:
        return msgspec.convert(await self._call("turn", asked), AgentAnswer)


Resume = Literal["replay", "restart"]
"""replay: with the same task and the same answers of the model the agent comes to the same point, so an interrupted
episode is played again with the recorded answers. restart: it has effects outside of itself or draws at random, so the
episode begins anew, with new answers."""


class Agent(ABC):
    """Plays episodes, many side by side, in one process: the seam of the kinds and the tasks."""

    resume: Resume = "replay"
    """What becomes of an episode whose worker was lost."""

    @abstractmethod
    async def rollout(self, episode: AgentEpisode, task: AgentTask) -> Outcome:
        """Play one episode. When it returns, raises or is cancelled, all that the episode held is freed."""

    async def check(self) -> None:  # noqa: B027 - most agents need no more than their opening tells
        """Raise HeadwayError for what this machine lacks, such as a sandbox, so that no episode could be played. Each
        process that plays it asks this first."""

    async def check_servers(self) -> None:  # noqa: B027 - most agents need no server
        """Raise HeadwayError for a server elsewhere that cannot be used. It is asked before a run: workers do not ask,
        as a server that is away for a while costs them single episodes."""

    async def close(self) -> None:  # noqa: B027 - most agents share nothing
        """Free what episodes share. Idempotent."""
