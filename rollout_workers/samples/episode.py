"""One sample as an episode: turns are generated, scored and answered until the environment ends it.

A tracer follows it: a worker tells it when each phase of a sample begins, and how it ended.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import msgspec
from msgspec.structs import replace

from headway.broker.client.submissions import SubmitOutcome
from headway.broker.errors import HeadwayError
from headway.broker.schema import Lease, Prompt, Segment, Trajectory
from headway.broker.schema.status import AgentInfo
from headway.broker.wire.rows import is_of_agent
from headway.rollout_workers.decoding import Decoding, response_text
from headway.rollout_workers.engines.base import GenerationRequest
from headway.rollout_workers.environments import Environment, Episode
from headway.rollout_workers.rewards.base import CallFailures, Reward

from .generation import room
from .recorder import Recorder


class SampleTrace(Protocol):
    """Follows one sample while this worker holds its lease. No call waits or raises."""

    def generating(self) -> AbstractContextManager[object]:
        """A turn begins, and its tokens are sampled while the block lasts."""
        ...

    def scoring(self) -> AbstractContextManager[object]:
        """The turn is scored and answered while the block lasts, and then it ends."""
        ...

    def submitted(self, trajectory: Trajectory, outcome: SubmitOutcome) -> None:
        """The sample is whole, and the broker has answered its submission."""
        ...


class SampleTracer(Protocol):
    """Makes traces of samples."""

    def sample(self, lease: Lease, recorder: Recorder) -> AbstractContextManager[SampleTrace]:
        """Traces a sample until the block ends; if its submission was not told by then, the worker gave it up or lost
        it. `recorder` is the one that the sample's tokens go to."""
        ...


class NoTracer:
    """A tracer that records nothing."""

    def sample(self, lease: Lease, recorder: Recorder) -> AbstractContextManager[SampleTrace]:
        """Returns itself: it remembers nothing of a sample."""
        return nullcontext(self)

    def generating(self) -> AbstractContextManager[object]:
        """Returns a context manager that does nothing."""
        return nullcontext()

    def scoring(self) -> AbstractContextManager[object]:
        """Returns a context manager that does nothing."""
        return nullcontext()

    def submitted(self, trajectory: Trajectory, outcome: SubmitOutcome) -> None:
        """Does nothing."""


NO_TRACER = NoTracer()


PATIENCE_S = 60.0
"""An environment that the model could understand so recently is not given up."""


class ScoredTurn(NamedTuple):
    """A scored and answered turn."""

    reward: float
    """The reward of this turn alone."""
    components: dict[str, float]
    """Each reward function's own score of the answer, and the environment's measures as `environment/part`."""
    said: Sequence[int]
    """Token ids that the model reads next; empty if the episode has ended."""


async def _keep_nothing() -> bool:
    """Keep nothing: no worker would continue the sample."""
    return True


async def _intend_nothing(_: Sequence[str]) -> list[str]:
    """Record no call: no worker would continue the sample."""
    return []


@dataclass(frozen=True, kw_only=True)
class PlayedSample:
    """A sample that is played to its end."""

    prompt: Prompt
    number: int
    """The number of the sample among those of its prompt."""
    recorder: Recorder
    """Made by the player, with the turns that were played before."""
    request: GenerationRequest
    """For a whole response to the prompt."""
    generate: Callable[[GenerationRequest, Recorder], Awaitable[None]]
    """Records one turn to its end."""
    max_model_len: int
    keep: Callable[[], Awaitable[bool]] = _keep_nothing
    """Returns once all that is recorded is durable; False if this worker's lease is lost."""
    intend: Callable[[Sequence[str]], Awaitable[Sequence[str] | None]] = _intend_nothing
    """Takes the digests of the calls that run, and returns once they are durable, with those that ran when another
    worker began its last one; None if this worker's lease is lost."""

    def room(self) -> int:
        """Return how many tokens may follow what is recorded."""
        return room(self.request, self.recorder, self.max_model_len)


class Player(Protocol):
    """Plays samples, many at a time: an environment's (`Episodes`), or an agent's (`agents.player`)."""

    most_at_once: int
    """Samples that a worker holds at most for each place in its engine."""

    @property
    def waiting_for_tools(self) -> int:
        """The samples under way that have a turn behind them and ask nothing of the engine now, as their tools work."""
        ...

    @property
    def agent(self) -> AgentInfo | msgspec.UnsetType:
        """The report of the episodes that an agent plays; UNSET: an environment does. Any thread may ask."""
        ...

    def resumes(self, segments: Sequence[Segment]) -> bool:
        """Return whether a sample can go on after what another worker recorded; else it begins anew."""
        ...

    def recorder(self, prompt: Prompt, segments: Sequence[Segment] = (), *, records_experts: bool = False) -> Recorder:
        """Return the recorder of a sample, which has the segments. Raises MissingExpertsError."""
        ...

    async def play(self, sample: PlayedSample, trace: SampleTrace = NO_TRACER) -> ScoredTurn | None:
        """Play turns until the sample needs the engine no more. Returns its scored last turn, or None if that turn
        is still to be scored. Raises as `score_turn` does."""
        ...

    async def score_turn(
        self, prompt: Prompt, recorder: Recorder, room: int, trace: SampleTrace = NO_TRACER
    ) -> ScoredTurn:
        """Score the turn that was recorded last. Raises UnscoredError or RewardError."""
        ...

    async def close(self) -> None:
        """Free everything. Idempotent."""
        ...


class Episodes:
    """Plays episodes: `reward` scores each turn's answer, and `environment` says what follows."""

    most_at_once = 2
    """So that slow rewards cannot pile up samples."""
    waiting_for_tools = 0
    agent = msgspec.UNSET

    def __init__(self, environment: Environment, reward: Reward, decoding: Decoding) -> None:
        self._environment = environment
        self._reward = reward
        self._decoding = decoding
        self._encoding = asyncio.Lock()
        self._failures = CallFailures(
            f"environment {getattr(environment, 'kind', type(environment).__name__)}",
            "It must say text, or token ids of the model.",
            PATIENCE_S,
            failure="said what the model cannot read",
        )

    def resumes(self, segments: Sequence[Segment]) -> bool:
        """See Player."""
        return not any(is_of_agent(segment.turns) for segment in segments)

    def recorder(self, prompt: Prompt, segments: Sequence[Segment] = (), *, records_experts: bool = False) -> Recorder:
        """See Player."""
        return Recorder(segments, prompt_length=len(prompt.token_ids) if records_experts else None)

    async def play(self, sample: PlayedSample, trace: SampleTrace = NO_TRACER) -> ScoredTurn | None:
        """See Player."""
        while True:
            with trace.generating():
                await sample.generate(sample.request, sample.recorder)
            if len(sample.recorder.turns) + 1 >= self._environment.max_turns:
                return None
            scored = await self.score_turn(sample.prompt, sample.recorder, sample.room(), trace)
            if not scored.said:
                return scored
            sample.recorder.add_environment_tokens(scored.said, scored.reward)

    async def score_turn(
        self, prompt: Prompt, recorder: Recorder, room: int, trace: SampleTrace = NO_TRACER
    ) -> ScoredTurn:
        """Score the turn that was recorded last, and let the environment answer it. Raises UnscoredError or
        RewardError."""
        with trace.scoring():
            return await self._score_turn(prompt, recorder, room)

    async def _score_turn(self, prompt: Prompt, recorder: Recorder, room: int) -> ScoredTurn:
        bounds = [*((turn.start, turn.end) for turn in recorder.turns), (recorder.turn_start, len(recorder.tokens))]
        answers = tuple(response_text(self._decoding, recorder.tokens[start:end]) for start, end in bounds)
        score = await self._reward.score(prompt, answers[-1], recorder.finished(), recorder.tokens)
        episode = Episode(
            prompt=prompt,
            answers=answers,
            rewards=tuple(turn.reward for turn in recorder.turns),
            score=score.total,
            finish_reason=recorder.finished(),
            room=room,
        )
        step = await self._environment.step(episode)
        said = await self._tokens(step.says, recorder.tokens[-1], prompt)
        if said and len(said) >= room:  # the model needs room to answer
            said, step = [], await self._environment.step(replace(episode, finish_reason="length", room=0))
        measured = {f"environment/{name}": value for name, value in step.components.items()}
        return ScoredTurn(step.reward, {**score.components, **measured}, said)

    async def close(self) -> None:
        """Close environment and reward."""
        await self._environment.close()
        await self._reward.close()

    async def _tokens(self, says: str | Sequence[int], after: int, prompt: Prompt) -> Sequence[int]:
        """Return what the model reads behind its last token, `after`. Raises UnscoredError, or RewardError if the
        environment again and again says what the model cannot read."""
        if not says:
            return ()
        try:
            tokens = await self._encoded(says, after) if isinstance(says, str) else self._possible(says)
        except HeadwayError as error:
            raise self._failures.note(prompt, error) from error
        self._failures.note_success()
        return tokens

    async def _encoded(self, says: str, after: int) -> Sequence[int]:
        async with self._encoding:  # one text at a time, in a thread: a long one takes seconds
            tokens = await asyncio.to_thread(self._decoding.encode, says, after)
        if not tokens:
            raise HeadwayError(f"the model's tokenizer makes no token of {says[:80]!r}")
        return tokens

    def _possible(self, says: Sequence[int]) -> Sequence[int]:
        vocabulary = self._decoding.vocabulary
        if wrong := [token for token in says if not 0 <= token < vocabulary]:
            raise HeadwayError(f"token id {wrong[0]} is none of the model's {vocabulary}")
        return list(says)
