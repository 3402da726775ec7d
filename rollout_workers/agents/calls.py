"""A call of the model and its answer, whatever dialect the agent speaks; `Session` is what an endpoint speaks to."""

from functools import cached_property
from typing import Any, Literal, Protocol

import msgspec

from headway.broker.errors import HeadwayError

from .conversation import Message, Tool
from .digests import ConversationDigests, Link, digest_of_call


class CallRefusedError(HeadwayError):
    """A call asks for what cannot be honoured: the agent's program is to be changed, or its settings (HTTP 400)."""

    def __init__(self, message: str, field: str = "") -> None:
        """`field` is the one of the request that is at fault, if it is one."""
        super().__init__(message)
        self.field = field


class SessionEndedError(HeadwayError):
    """There is no such session, or no more: its episode has ended, or another worker plays it now (HTTP 410)."""


class SessionAwayError(HeadwayError):
    """The session may come back: a worker has yet to take its episode over (HTTP 503)."""


class ChatCall(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """What an agent asks of the model."""

    messages: list[Message] = []
    tools: list[Tool] = []
    prompt_token_ids: list[int] | None = None
    """The whole context as tokens, in the place of messages, for agents that keep tokens themselves."""
    max_tokens: int | None = None
    """The longest answer; None: as long as the run allows."""
    temperature: float | None = None
    """This field to `seed` are the sampling that the client asks for, where it asks: `check_sampling`."""
    top_p: float | None = None
    top_k: int | None = None
    """0 or less: of all tokens."""
    seed: int | None = None
    role: Literal["main", "auxiliary"] = "main"
    """auxiliary: it is answered, and not trained."""
    key: str = ""
    """The client's own name for the call, by which it repeats it; "": it gave none."""
    is_retry: bool = False
    """Whether the client says that it repeats a call of which it got no answer."""

    @cached_property
    def links(self) -> list[Link]:
        """The conversation, of which a session knows the beginning already."""
        return ConversationDigests().links(self.messages, self.tools)

    @cached_property
    def digest(self) -> str:
        """Names what is asked: equal for calls that ask the same."""
        return digest_of_call(self.links[-1], self.prompt_token_ids, self.max_tokens, self.role)

    def check_sampling(self, *, temperature: float, top_p: float, top_k: int, seed: int | None) -> None:
        """Compare the sampling that the client asks for with the run's (`top_k` 0: of all tokens).

        Raises CallRefusedError where they differ.
        """
        top = None if self.top_k is None else max(self.top_k, 0)
        asked = {"temperature": self.temperature, "top_p": self.top_p, "top_k": top, "seed": self.seed}
        run = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "seed": seed}
        for name, value in asked.items():
            if value is not None and value != run[name]:
                message = (
                    f"'{name}' {value} is not supported: the run samples with {run[name]}. Leave it out of the call, or"
                    " set agent.ignore_sampling=true to have it ignored."
                )
                raise CallRefusedError(message, name)

    def check_tokens(self, vocabulary: int) -> None:
        """Raise CallRefusedError for a token that the model does not have: no learner would train what goes on after
        it."""
        if wrong := [token for token in self.prompt_token_ids or () if not 0 <= token < vocabulary]:
            raise CallRefusedError(f"token id {wrong[0]} is none of the model's {vocabulary}", "prompt_token_ids")


class ChatAnswer(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One turn of the model, as the engine sampled it."""

    message: Message
    """The assistant's message, of which each part is optional but the role."""
    finish_reason: Literal["stop", "length", "tool_calls"]
    prompt_token_ids: list[int]
    """All that the model read."""
    token_ids: list[int]
    """What it sampled, with the token that ended it; empty in an answer that only says that the episode's budget is
    spent (finish_reason `length`)."""
    logprobs: list[float]
    """One for each of these."""
    id: str
    """Unique within the run."""


class Session(Protocol):
    """One episode, as one attempt plays it."""

    model: str
    """The name by which the model is listed."""

    async def chat(self, call: ChatCall) -> ChatAnswer:
        """Answer a call. Its answer is durable when this returns. The same call gets the recorded answer where it is a
        retry (`is_retry`, `key`), where nobody waits for the first one any more, where the answer was lost on its way,
        and after a lost worker; else it asks for another answer. A caller that goes away cancels this coroutine.

        Raises CallRefusedError, SessionEndedError.
        """
        ...

    def note_lost(self, answer: ChatAnswer) -> None:
        """Note that the client went away before it had the whole answer: the same call gets it."""
        ...

    def count_tokens(self, call: ChatCall) -> int:
        """Return how many tokens the model would read. Raises CallRefusedError."""
        ...

    def text_of(self, token_ids: list[int]) -> str:
        """Return tokens as text, special ones included."""
        ...

    def give_reward(self, reward: float) -> None:
        """Add to the reward of the newest main turn. Raises CallRefusedError if there is none, or it is not finite."""
        ...

    async def finish(self, reward: float | None, measures: dict[str, float]) -> None:
        """End the episode of an agent that no worker started, with the whole episode's further reward."""
        ...


class Sessions(Protocol):
    """The sessions of one endpoint."""

    def session(self, name: str) -> Session:
        """Return a session by its name, which is its secret too. Raises SessionEndedError, and
        SessionAwayError for one that may come back."""
        ...


class Claims(Protocol):
    """Tasks for agents that no worker starts."""

    def claim(self, key: str) -> dict[str, Any] | None:
        """Return a task with its session; None if no task is free now. Raises CallRefusedError for a wrong key."""
        ...
