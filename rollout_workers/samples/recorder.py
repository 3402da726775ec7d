"""Turns the engine's chunks of one sample into a trajectory: tokens, logprobs, and the version that sampled each token.

The model reads what an environment says after a turn, but did not sample it: these tokens have loss mask 0, logprob 0
and the version of the token before. They become part of the sample together with the first token that is sampled after
them, when they have been fed and their chosen experts are known. So no segment ends with them, and a worker that
continues a sample at a turn's end asks its environment again.

The recorder trusts no engine: it refuses impossible output before the learner would train on it.

`SegmentLog` appends what was recorded to the broker, in order, one segment at a time, while generation goes on. A
segment keeps its bounds until the broker has answered: if the answer was lost, a segment with other bounds would not
fit what the broker stores. An append takes 0.3 to 0.5 ms of a worker's CPU, with 16 tokens as with 512.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import Self

import numpy as np

from headway.broker.client.leases import AppendOutcome, AppendReply
from headway.broker.errors import HeadwayError
from headway.broker.schema import Experts, Lease, Segment, Trajectory, TrajectoryId, Turn, VersionSpan, WeightVersion
from headway.broker.security.sample_validation import CLAMPED_LOGPROB, LOGPROB_ROUNDING
from headway.rollout_workers.config import WorkersConfig
from headway.rollout_workers.engines.base import Chunk, FinishReason


class MissingExpertsError(HeadwayError):
    """A worker cannot continue this sample: its segments lack the chosen experts."""


class RoutedExperts:
    """Collects one row of experts per token of prompt and response. The newest sampled token has no row yet: it was not
    fed."""

    def __init__(self, prompt_length: int) -> None:
        self.count = 0
        """Tokens that have a row."""
        self._prompt_length = prompt_length
        self._parts: list[Experts] = []

    def add(self, experts: Experts | None, response_length: int) -> str:
        """Append the new rows of a response of `response_length` tokens. Returns what is wrong with them, or ""."""
        expected = self._prompt_length + response_length - 1 - self.count
        if experts is None or experts.ndim != 3 or len(experts) != expected:
            rows = "no" if experts is None else len(experts)
            return f"the experts of {rows} tokens where it fed {expected}"
        if self._parts and (experts.dtype, *experts.shape[1:]) != (self._parts[0].dtype, *self._parts[0].shape[1:]):
            return f"experts of shape {experts.shape} and type {experts.dtype}, unlike those before"
        ordered = np.sort(experts, axis=2)
        if (ordered[..., 1:] == ordered[..., :-1]).any():
            return "the same expert twice for one token"
        self._parts.append(experts)
        self.count += expected
        return ""

    def add_segment(self, segment: Segment) -> None:
        """Append a segment's rows. Raises MissingExpertsError if it has none: it was generated before the run recorded
        experts."""
        if wrong := self.add(segment.experts, segment.start + len(segment.tokens)):
            raise MissingExpertsError(
                f"{segment.tid}: its segment {segment.index} has {wrong}, and algorithm.router_replay=true needs them."
                " Set it to false again; or resume with --rewind-to STEP --regenerate, which forgets what was sampled."
            )

    def after(self, response_position: int) -> Experts:
        """Return the rows of the tokens that were fed to sample the response from this position on; at 0, the prompt's
        rows too."""
        first = self._prompt_length + response_position - 1 if response_position else 0
        return np.concatenate(self._parts)[first:]


class EngineOutputError(HeadwayError):
    """The engine returned impossible output: the engine or its adapter has a bug."""


class Recorder:
    """One sample as it grows, beginning with its segments. Spans always cover [0, R), R response tokens; adjacent
    tokens of one version share a span."""

    def __init__(self, segments: Sequence[Segment] = (), *, prompt_length: int | None = None) -> None:
        """`prompt_length`: tokens of the prompt if chosen experts are recorded, else None.

        Raises MissingExpertsError if they are recorded and a segment has none.
        """
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.loss_mask: list[int] = []
        self.spans: list[VersionSpan] = []
        self.turns: list[Turn] = []
        """The finished turns that another turn followed."""
        self.environment_tokens: list[int] = []
        """Tokens that the environment said after the last turn; empty once a token is sampled after them."""
        self._turn_before_environment: Turn | None = None
        self.finish_reason: FinishReason | None = None
        self.begins_anew = False
        """Whether what another worker recorded of the sample was given up."""
        self._experts = None if prompt_length is None else RoutedExperts(prompt_length)
        for segment in segments:
            if self._experts:
                self._experts.add_segment(segment)
            for span in segment.spans:
                self._extend_spans(span.end - span.start, span.version)
                self.tokens += segment.tokens[span.start - segment.start : span.end - segment.start].tolist()
            self.logprobs += segment.behavior_logprobs.tolist()
            self.loss_mask += segment.loss_mask.tolist()
            self.turns += segment.turns

    @property
    def experts_from(self) -> int | None:
        """First token of prompt and response whose experts the engine must report; None if experts are not recorded."""
        return self._experts.count if self._experts else None

    @property
    def newest_version(self) -> WeightVersion:
        """The version of the last token. The sample must have one."""
        return self.spans[-1].version

    @property
    def earned(self) -> float:
        """The sum of the rewards of the turns that another turn followed."""
        return sum(turn.reward for turn in self.turns)

    @property
    def turn_start(self) -> int:
        """Response position of the first token of the current turn."""
        return bytes(self.loss_mask).rfind(0) + 1

    def add_environment_tokens(self, said: Sequence[int], reward: float) -> None:
        """Note that the environment gave `reward` for the turn that has ended and says these tokens before the next."""
        assert said
        self._turn_before_environment = Turn(self.turn_start, len(self.tokens), reward)
        self.environment_tokens = list(said)
        self.finish_reason = None

    def add(self, chunk: Chunk) -> None:
        """Append a chunk. Raises EngineOutputError if it cannot follow what was recorded."""
        self._refuse_impossible(chunk)
        if chunk.token_ids:
            self._append_environment_tokens()
            self._add_experts(chunk)
            self._extend_spans(len(chunk.token_ids), chunk.version)
        self.tokens += chunk.token_ids
        self.logprobs += chunk.logprobs
        self.loss_mask += [1] * len(chunk.token_ids)
        if chunk.finish_reason != "interrupted":
            self.finish_reason = chunk.finish_reason

    def finished(self) -> FinishReason:
        """Return why the last turn ended. Raises EngineOutputError if it did not end or has no token."""
        if self.finish_reason is None or not self.tokens or self.environment_tokens:
            raise EngineOutputError(
                f"the engine's stream ended after {len(self.tokens)} tokens with finish reason "
                f"{self.finish_reason}; each turn needs a token and a last chunk that says stop or length"
            )
        return self.finish_reason

    def to_trajectory(self, lease: Lease, rewards: dict[str, float], reward: float, worker: str) -> Trajectory:
        """Return the finished sample, whose sampled tokens are all trained. `reward` is the last turn's; an episode's
        is the sum."""
        last = Turn(self.turn_start, len(self.tokens), reward)
        return Trajectory(
            tid=lease.tid,
            prompt_tokens=np.asarray(lease.prompt.token_ids, np.int32),
            response_tokens=np.asarray(self.tokens, np.int32),
            behavior_logprobs=np.asarray(self.logprobs, np.float32),
            loss_mask=np.asarray(self.loss_mask, np.uint8),
            spans=tuple(self.spans),
            reward=self.earned + reward,
            rewards=rewards,
            turns=(*self.turns, last) if self.turns else (),
            finish_reason=self.finished(),
            worker=worker,
            experts=self._experts.after(0) if self._experts else None,
        )

    def segment(self, tid: TrajectoryId, index: int, start: int) -> Segment:
        """Return the tokens from `start` on as the sample's segment `index`."""
        return Segment(
            tid=tid,
            index=index,
            start=start,
            tokens=np.asarray(self.tokens[start:], np.int32),
            behavior_logprobs=np.asarray(self.logprobs[start:], np.float32),
            loss_mask=np.asarray(self.loss_mask[start:], np.uint8),
            turns=tuple(turn for turn in self.turns if turn.end >= start),
            spans=tuple(VersionSpan(max(s.start, start), s.end, s.version) for s in self.spans if s.end > start),
            experts=self._experts.after(start) if self._experts else None,
        )

    def _append_environment_tokens(self) -> None:
        if self._turn_before_environment is None:
            return
        self.turns.append(self._turn_before_environment)
        self._extend_spans(len(self.environment_tokens), self.newest_version)
        self.tokens += self.environment_tokens
        self.logprobs += [0.0] * len(self.environment_tokens)
        self.loss_mask += [0] * len(self.environment_tokens)
        self.environment_tokens, self._turn_before_environment = [], None

    def _add_experts(self, chunk: Chunk) -> None:
        if self._experts is None:
            return
        if complaint := self._experts.add(chunk.experts, len(self.tokens) + len(chunk.token_ids)):
            raise EngineOutputError(
                f"after {len(self.tokens)} tokens the engine sent {complaint}; algorithm.router_replay=true needs what"
                " its routers chose"
            )

    def _extend_spans(self, count: int, version: WeightVersion) -> None:
        start = len(self.tokens)
        if self.spans and self.spans[-1].version == version:
            start = self.spans.pop().start
        self.spans.append(VersionSpan(start, len(self.tokens) + count, version))

    def _refuse_impossible(self, chunk: Chunk) -> None:
        at = f"after {len(self.tokens)} tokens the engine"
        if self.finish_reason is not None:
            raise EngineOutputError(f"{at} sent more, though it had finished with {self.finish_reason!r}")
        if len(chunk.token_ids) != len(chunk.logprobs):
            raise EngineOutputError(f"{at} sent {len(chunk.token_ids)} tokens with {len(chunk.logprobs)} logprobs")
        if self.spans and chunk.token_ids and chunk.version < self.newest_version:
            raise EngineOutputError(f"{at} went back from {self.newest_version} to {chunk.version}")
        wrong = [value for value in chunk.logprobs if not CLAMPED_LOGPROB < value <= LOGPROB_ROUNDING]
        if wrong:
            raise EngineOutputError(
                f"{at} sent {wrong[0]} as a logprob, which is none; weights with NaN or Inf do this"
            )


RETRY_S = 1.0
"""Seconds to wait after an append that the broker did not answer."""

Append = Callable[[Lease, Segment], Awaitable[AppendReply | None]]
"""Appends a segment to the broker; returns None while the broker is away."""

log = logging.getLogger(__name__)


class SegmentLog:
    """One sample's segments. It is a context manager: leaving it ends the append that runs in the background."""

    def __init__(self, lease: Lease, recorder: Recorder, append: Append, config: WorkersConfig) -> None:
        self._lease = lease
        self._recorder = recorder
        self._append = append
        self._tokens = config.segment_tokens
        self._seconds = config.segment_s
        self._cuts = [0, *(segment.start + len(segment.tokens) for segment in lease.segments)]
        self._sent: Segment | None = None
        self._sending: asyncio.Task[None] | None = None
        self._last_s = time.monotonic()
        self._is_off = not (self._tokens or self._seconds)
        self._is_lost = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._sending is None:
            return
        if error is None:
            await self._sending
        else:
            self._sending.cancel()
            await asyncio.wait([self._sending])

    def note(self) -> None:
        """Send a segment if one is due. Returns at once. Raises the error of the append before."""
        if self._sending is not None and self._sending.done():
            self._sending.result()
            self._sending = None
        if self._sending is None and self._is_due():
            self._sending = asyncio.create_task(self._send_next())

    async def append_rest(self) -> None:
        """Append all recorded tokens, if the broker answers and the lease is held. Generation must have ended."""
        while self._has_more() and await self._send():
            pass

    async def keep_all(self) -> bool:
        """Return once all recorded tokens are appended, and False if the lease is lost. It waits while the broker is
        away."""
        while self._has_more():
            if not await self._send() and self._sent is not None:
                await asyncio.sleep(RETRY_S)
        return not self._is_lost

    def _is_due(self) -> bool:
        waited_s = time.monotonic() - self._last_s
        if not self._has_more() or (self._sent is not None and waited_s < RETRY_S):
            return False
        new = len(self._recorder.tokens) - self._cuts[-1]
        return self._sent is not None or 0 < self._tokens <= new or 0 < self._seconds <= waited_s

    def _has_more(self) -> bool:
        return not self._is_off and (self._sent is not None or len(self._recorder.tokens) > self._cuts[-1])

    async def _send_next(self) -> None:
        await self._send()

    async def _send(self) -> bool:
        """Send the unanswered segment, or else the next one. Returns False if it makes no sense to go on now."""
        if self._sent is None:
            index = len(self._cuts) - 1
            self._sent = self._recorder.segment(self._lease.tid, index, self._cuts[index])
        reply = await self._append(self._lease, self._sent)
        self._last_s = time.monotonic()
        if reply is None:
            return False
        segment, self._sent = self._sent, None
        match reply.outcome:
            case AppendOutcome.APPENDED:
                self._cuts.append(segment.start + len(segment.tokens))
            case AppendOutcome.OUT_OF_ORDER:
                self._follow(reply.expected, segment)
            case AppendOutcome.FENCED:
                self._is_off = self._is_lost = True
        return not self._is_off

    def _follow(self, expected: int, segment: Segment) -> None:
        """Adapt to the segments that the broker has, where they differ from the sent ones."""
        if expected == segment.index + 1:  # the broker has this segment: its answer was lost
            self._cuts.append(segment.start + len(segment.tokens))
        elif expected < segment.index:  # the broker lost its last second in a restart: cut those segments again
            del self._cuts[expected + 1 :]
        else:
            log.warning(
                "%s: the broker expects segment %d after our %d; no more of it is stored until it is submitted",
                self._lease.tid,
                expected,
                segment.index,
            )
            self._is_off = True
