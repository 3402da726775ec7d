"""The right answers of agents' trials, in the place of `tasks`: what the engine's double samples in each turn.

    [   nonce   body   ]        a call of the tool, whose argument is the digits
        nonce   body   STOP     the last answer

The nonce is random, so that no two answers of a trial are the same. All else can be computed again from the sample,
what the model had read, the nonce and the weights' versions.
"""

import random
import zlib
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from headway.broker.schema import AgentCall, Prompt, Trajectory, TrajectoryId, WeightVersion
from headway.broker.wire.rows import TurnRows
from headway.learner.data.prompts.cursor import place_of

from .tasks import ALPHABET, STOP, logprobs_of
from .user_code import text_of

CALL_BEGIN, CALL_END = ALPHABET.index("["), ALPHABET.index("]")
DIGITS = 10
NONCE = 8
LONGEST_BODY = 16
MOST_CALLS = 5
LONGEST_EPISODE = 300
"""Tokens of a whole episode beside its prompt; a few episodes are cut there."""


class EpisodeTurn(msgspec.Struct, frozen=True, array_like=True):
    """One turn, as the learner trained it or as the agent got it."""

    read: str
    """All that the model had read, a character a token."""
    said: str
    """What it sampled."""

    @property
    def argument(self) -> str:
        """Return the argument of its call; "": it calls no tool."""
        return self.said[1:-1] if self.said.startswith("[") and self.said.endswith("]") else ""


def written(tokens: Sequence[int]) -> str:
    """Return tokens as text, the last one of an answer as a full stop."""
    return "".join("." if token == STOP else ALPHABET[token] for token in tokens)


def turn_of(read: Sequence[int], said: Sequence[int]) -> EpisodeTurn:
    """Return a turn of these tokens."""
    return EpisodeTurn(written(read), written(said))


class Answer:
    """One answer, known up to the version that samples each of its tokens."""

    def __init__(self, tid: TrajectoryId, read: Sequence[int], nonce: Sequence[int]) -> None:
        calls = random.Random(str(tid)).randint(1, MOST_CALLS)
        self._nonce = list(nonce)
        self._begins = [CALL_BEGIN] if list(read).count(CALL_END) < calls else []
        self._key = zlib.crc32(f"{tid} {written(read)} {self._nonce}".encode())
        self.length = len(self._begins) + NONCE + self._key % LONGEST_BODY + 1

    def tokens(self, start: int, end: int, version: WeightVersion) -> list[int]:
        """Return the tokens that `version` samples at the places [start, end)."""
        return [self._token(place, version) for place in range(start, min(end, self.length))]

    def _token(self, place: int, version: WeightVersion) -> int:
        if place == self.length - 1:
            return CALL_END if self._begins else STOP
        known = [*self._begins, *self._nonce]
        return known[place] if place < len(known) else zlib.crc32(f"{self._key} {version} {place}".encode()) % DIGITS


def turns_of(trajectory: Trajectory) -> Iterator[tuple[EpisodeTurn, AgentCall, int]]:
    """Yield each turn with its call, and the response position at which it begins."""
    tree = TurnRows(trajectory.prompt_tokens, trajectory.response_tokens)
    for number, turn in enumerate(trajectory.turns):
        assert turn.call is not None
        tree.add(turn.start, turn.end, turn.call)
        row, length = tree.tokens(number).tolist(), turn.end - turn.start
        yield turn_of(row[:-length], row[-length:]), turn.call, turn.start


def trained_turns(trajectory: Trajectory) -> tuple[EpisodeTurn, ...]:
    """Return the turns that have a token in the loss."""
    mask = trajectory.loss_mask
    return tuple(turn for turn, _, start in turns_of(trajectory) if mask[start : start + len(turn.said)].any())


def what_is_wrong_in(prompt: Prompt, trajectory: Trajectory) -> str:
    """Return '', or the difference between an episode and what the engine's double sampled."""
    if prompt.group != trajectory.tid.group or prompt.text != text_of(place_of(prompt.group)[1]):
        return "the prompt is another group's"
    if trajectory.prompt_tokens.tolist() != prompt.token_ids:
        return "it continues another prompt"
    if not trajectory.turns or trajectory.turns[0].call is None:
        return "it has no turn of an agent"
    mask = np.zeros(len(trajectory.response_tokens), np.uint8)
    for turn, call, start in turns_of(trajectory):
        if call.role == "main":
            mask[start : start + len(turn.said)] = 1
            if wrong := _what_is_wrong_at(trajectory, turn, call, start):
                return wrong
    return "" if np.array_equal(mask, trajectory.loss_mask) else "other tokens are in the loss than the sampled ones"


def _what_is_wrong_at(trajectory: Trajectory, turn: EpisodeTurn, call: AgentCall, start: int) -> str:
    end = start + len(turn.said)
    said = trajectory.response_tokens[start:end]
    begins = int(said[0] == CALL_BEGIN)
    read = [ALPHABET.index(character) if character != "." else STOP for character in turn.read]
    answer = Answer(trajectory.tid, read, said[begins : begins + NONCE].tolist())
    made = [
        token
        for span in trajectory.spans
        for token in answer.tokens(max(span.start, start) - start, min(span.end, end) - start, span.version)
    ]
    if made != said.tolist():
        return f"the turn at {start} was not sampled after what it has as read"
    if not np.array_equal(trajectory.behavior_logprobs[start:end], logprobs_of(said)):
        return f"the logprobs of the turn at {start} are those of other tokens"
    is_whole = len(said) == answer.length
    return "" if is_whole == (call.finish_reason == "stop") else f"the turn at {start} is cut"
