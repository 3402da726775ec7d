"""Records an agent's episode: a tree of turns, laid out in a response as `broker.wire.rows` reads it."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from headway.broker.schema import AgentCall, Lease, Segment, Trajectory, TrajectoryId, Turn, VersionSpan, WeightVersion
from headway.broker.wire.rows import TurnRows
from headway.rollout_workers.samples.recorder import Recorder


@dataclass(frozen=True, eq=False)
class RecordedTurn:
    """One turn as it was sampled."""

    number: int
    call: AgentCall
    context: list[int]
    """All that the model read."""
    token_ids: list[int]
    logprobs: list[float]


class EpisodeRecorder(Recorder):
    """One episode as it grows, turn by turn. Turns of parallel calls are recorded as they end."""

    def __init__(self, segments: Sequence[Segment] = (), *, prompt: Sequence[int]) -> None:
        """`prompt`: the tokens of the prompt, which a turn may begin with. The segments' turns wait to be repeated."""
        super().__init__()
        self._prompt = np.asarray(prompt, np.int32)
        self._rows = TurnRows(self._prompt, np.zeros(0, np.int32))
        self._buffer, self._buffered = np.zeros(256, np.int32), 0
        """All tokens as an array with room for more, and how many it has."""
        self._rewards: list[float] = []
        self._dropped: set[int] = set()
        for segment in segments:
            self._add_segment(segment)
        self.resumed = len(self.turns)
        """Turns of earlier attempts; the first of `turns`."""

    @property
    def newest_version(self) -> WeightVersion:
        """See Recorder; turns of parallel calls end in any order."""
        return max(span.version for span in self.spans)

    @property
    def earned(self) -> float:
        """The sum of the rewards of single turns."""
        return sum(self._rewards)

    def turn(self, number: int, context: list[int] | None = None) -> RecordedTurn:
        """Return a turn by its number. `context`: what the model read, where the caller has it already."""
        turn = self.turns[number]
        assert turn.call is not None
        sampled = slice(turn.start, turn.end)
        if context is None:
            context = self._rows.tokens(number)[: self._rows.length(number) - (turn.end - turn.start)].tolist()
        return RecordedTurn(
            number=number,
            call=turn.call,
            context=context,
            token_ids=self.tokens[sampled],
            logprobs=self.logprobs[sampled],
        )

    def row(self, number: int) -> list[int]:
        """Return all tokens up to the end of a turn: its context and its answer; -1: the prompt."""
        row: list[int] = self._rows.tokens(number).tolist()
        return row

    def row_length(self, number: int) -> int:
        """Return the number of these tokens."""
        return self._rows.length(number)

    def longest_beginning(self, context: Sequence[int], unseen: Collection[int]) -> tuple[int, int]:
        """Return the turn whose row shares most tokens with the beginning of `context`, and how many they are; -1: the
        prompt does. Of several it is the newest, and an `unseen` one only if no other shares as many."""
        wanted = np.asarray(context, np.int32)
        numbers = range(-1, len(self.turns))
        shared, _, number = max((_shared(wanted, self._rows.tokens(one)), one not in unseen, one) for one in numbers)
        return number, shared

    def add_turn(self, read: Sequence[int], sampled: Recorder, call: AgentCall) -> int:
        """Append a turn: the tokens `read` after what `call` goes on from, and those that were `sampled`. Returns its
        number."""
        is_trained = call.role == "main"
        start, end = len(self.tokens) + len(read), len(self.tokens) + len(read) + len(sampled.tokens)
        first = sampled.spans[0].version
        if read:
            self._extend_spans(len(read), first)
        self.tokens += [*read, *sampled.tokens]
        self.logprobs += [0.0] * len(read) + (sampled.logprobs if is_trained else [0.0] * len(sampled.tokens))
        self.loss_mask += [0] * len(read) + [int(is_trained)] * len(sampled.tokens)
        for span in sampled.spans:
            self._append_span(start + span.start, start + span.end, span.version)
        self._note_turn(Turn(start, end, 0.0, call))
        self.finish_reason = call.finish_reason if is_trained else self.finish_reason
        return len(self.turns) - 1

    def begin_again(self) -> None:
        """Note that the agent is run again: all turns wait to be repeated, with their rewards."""
        self.resumed = len(self.turns)
        self.clear_rewards()

    def clear_rewards(self) -> None:
        """Take the rewards of all turns back."""
        self._rewards = [0.0] * len(self.turns)

    def give_reward(self, number: int, reward: float) -> None:
        """Add to a turn's reward."""
        self._rewards[number] += reward

    def drop(self, numbers: Collection[int]) -> None:
        """Train these turns not: the episode of this attempt has not repeated them."""
        self._dropped.update(numbers)

    def take_back(self, number: int) -> None:
        """Train a turn after all that was dropped."""
        self._dropped.discard(number)

    def newest_main(self) -> int | None:
        """Return the number of the newest turn that is trained; None if there is none."""
        main = [n for n, turn in enumerate(self.turns) if turn.call and turn.call.role == "main"]
        return next((number for number in reversed(main) if number not in self._dropped), None)

    def segment(self, tid: TrajectoryId, index: int, start: int) -> Segment:
        """Return the turns from `start` on. Their rewards are told with the trajectory alone."""
        return replace(
            super().segment(tid, index, start), turns=tuple(turn for turn in self.turns if turn.start >= start)
        )

    def to_trajectory(self, lease: Lease, rewards: dict[str, float], reward: float, worker: str) -> Trajectory:
        """Return the finished episode. `reward` is what the episode got beside its single turns; it is the last
        trained turn's, and the episode's is the sum."""
        last = self.newest_main()
        assert last is not None, "an episode without a turn is given up"
        mask, logprobs = np.asarray(self.loss_mask, np.uint8), np.asarray(self.logprobs, np.float32)
        turns = []
        for number, turn in enumerate(self.turns):
            assert turn.call is not None
            if number in self._dropped:
                mask[turn.start : turn.end], logprobs[turn.start : turn.end] = 0, 0
                turn = replace(turn, call=replace(turn.call, role="auxiliary"))
            given = self._rewards[number] + (reward if number == last else 0.0)
            turns.append(replace(turn, reward=given))
        final = turns[last].call
        assert final is not None
        return Trajectory(
            tid=lease.tid,
            prompt_tokens=self._prompt,
            response_tokens=np.asarray(self.tokens, np.int32),
            behavior_logprobs=logprobs,
            loss_mask=mask,
            spans=tuple(self.spans),
            reward=sum(turn.reward for turn in turns),
            rewards=rewards,
            turns=tuple(turns),
            finish_reason=final.finish_reason,
            worker=worker,
        )

    def _add_segment(self, segment: Segment) -> None:
        for span in segment.spans:
            self._append_span(span.start, span.end, span.version)
        self.tokens += segment.tokens.tolist()
        self.logprobs += segment.behavior_logprobs.tolist()
        self.loss_mask += segment.loss_mask.tolist()
        for turn in segment.turns:
            self._note_turn(replace(turn, reward=0.0))

    def _append_span(self, start: int, end: int, version: WeightVersion) -> None:
        if self.spans and self.spans[-1].version == version:
            start = self.spans.pop().start
        self.spans.append(VersionSpan(start, end, version))

    def _note_turn(self, turn: Turn) -> None:
        assert turn.call is not None
        self._rows.response = self._as_array()
        self._rows.add(turn.start, turn.end, turn.call)
        self.turns.append(turn)
        self._rewards.append(0.0)

    def _as_array(self) -> NDArray[np.int32]:
        """Return all tokens, of which only new ones are converted."""
        count = len(self.tokens)
        if count > len(self._buffer):
            self._buffer = np.resize(self._buffer, 2 * count)
        self._buffer[self._buffered : count] = self.tokens[self._buffered :]
        self._buffered = count
        return self._buffer[:count]


def _shared(one: NDArray[np.int32], other: NDArray[np.int32]) -> int:
    length = min(len(one), len(other))
    differs = one[:length] != other[:length]
    return int(differs.argmax()) if differs.any() else length
