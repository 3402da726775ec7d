"""A session with a format of single characters, and an engine that answers what a test tells it."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from headway.broker.schema import Lease, Prompt, Segment, TrajectoryId, WeightVersion
from headway.rollout_workers.agents.calls import ChatCall
from headway.rollout_workers.agents.conversation import ChatFormat, Message, ParsedAnswer, Tool, ToolCall
from headway.rollout_workers.agents.session import EpisodeSession
from headway.rollout_workers.agents.tree import EpisodeRecorder
from headway.rollout_workers.config import AgentConfig
from headway.rollout_workers.engines.base import Chunk, GenerationRequest
from headway.rollout_workers.samples.episode import PlayedSample
from headway.rollout_workers.samples.recorder import Recorder

END = 1
PROMPT = Prompt(group="0-1", token_ids=[900, 901], text="<=", ground_truth=None, data_source="test", num_samples=2)
TID = TrajectoryId("0-1", 0, 0)
LEASE = Lease(tid=TID, token="token", ttl_s=10.0, prompt=PROMPT)


class CharacterFormat:
    """A token for each character; `!name arguments` is a call of a tool."""

    name = "characters"
    stop_token_ids: tuple[int, ...] = (END,)

    def __init__(self) -> None:
        self.can_bridge = True

    def render(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        """See ChatFormat."""
        return tokens("".join(f"<{one['role'][0]}>{one.get('content') or ''}" for one in messages) + "<a>")

    def bridge(self, previous: Sequence[int], new: Sequence[Message], tools: Sequence[Tool]) -> list[int] | None:
        """See ChatFormat."""
        return self.render(new, tools) if self.can_bridge else None

    def parse(self, token_ids: Sequence[int], tools: Sequence[Tool]) -> ParsedAnswer:
        """See ChatFormat."""
        text = "".join(map(chr, (one for one in token_ids if one != END)))
        if text.startswith("!"):
            name, _, arguments = text[1:].partition(" ")
            return ParsedAnswer(content="", tool_calls=(ToolCall(id="", name=name, arguments=arguments),))
        return ParsedAnswer(content=text)


def tokens(text: str) -> list[int]:
    return list(map(ord, text))


class Engine:
    """Answers with the next text that it was given, or "ok"; it remembers what it was asked."""

    def __init__(self, *answers: str) -> None:
        self.answers = list(answers)
        self.asked: list[GenerationRequest] = []
        self.logprob = -0.5
        self.version = WeightVersion(1, 0)
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.error: Exception | None = None

    async def generate(self, request: GenerationRequest, recorder: Recorder) -> None:
        """Record one turn."""
        self.asked.append(request)
        text = self.answers.pop(0) if self.answers else "ok"
        await self.may_answer.wait()
        if self.error is not None:
            raise self.error
        sampled = [*tokens(text), END][: request.max_new_tokens]
        reason: Any = "stop" if sampled[-1] == END else "length"
        logprobs = [self.logprob - number for number in range(len(sampled))]
        recorder.add(Chunk(token_ids=sampled, logprobs=logprobs, version=self.version, finish_reason=reason))


class Attempt:
    """One attempt at the episode: its session, its recorder, and the segments that were kept."""

    def __init__(
        self,
        engine: Engine,
        *segments: Segment,
        config: AgentConfig | None = None,
        most_tokens: int = 1000,
        max_model_len: int = 2000,
        keep: Callable[[], Awaitable[bool]] | None = None,
        chat_format: ChatFormat | None = None,
        vocabulary: int = 1000,
        end: Callable[[float | None, dict[str, float]], None] | None = None,
    ) -> None:
        self.recorder = EpisodeRecorder(segments, prompt=PROMPT.token_ids)
        self.format = CharacterFormat()
        self.segments = list(segments)
        self._kept = len(self.recorder.tokens)
        self.intended: list[tuple[Sequence[str], int]] = []
        """Digests of calls that ran, and how many calls the engine had been asked when they were made durable."""
        self.left: Sequence[str] | None = ()
        """What the attempt hears of calls of the one before; None: that it has lost its lease."""
        self._engine = engine
        request = GenerationRequest(
            request_id="r", prompt_tokens=[900, 901], max_new_tokens=most_tokens, temperature=1.0, stop_token_ids=[]
        )
        sample = PlayedSample(
            prompt=PROMPT,
            number=0,
            recorder=self.recorder,
            request=request,
            generate=engine.generate,
            max_model_len=max_model_len,
            keep=keep or self._keep,
            intend=self._intend,
        )
        self.session = EpisodeSession(
            sample,
            self.recorder,
            chat_format or self.format,
            config or AgentConfig(kind="test"),
            model="m",
            text_of=lambda ids: "".join(map(chr, ids)),
            vocabulary=vocabulary,
            end=end,
        )

    async def _intend(self, calls: Sequence[str]) -> Sequence[str] | None:
        await asyncio.sleep(0)
        self.intended.append((calls, len(self._engine.asked)))
        return self.left

    async def _keep(self) -> bool:
        self.segments.append(self.recorder.segment(TID, len(self.segments), self._kept))
        self._kept = len(self.recorder.tokens)
        return True


def user(text: str, *before: Message) -> ChatCall:
    return ChatCall(messages=[*before, {"role": "user", "content": text}])


def said(call: ChatCall, message: Message, *following: Message) -> list[Message]:
    """Return the conversation of a call with its answer, and what follows."""
    return [*call.messages, message, *following]
