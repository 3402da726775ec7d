"""An agent's episode is a tree of turns; here it is cut into the rows that are computed and trained.

    turns (tokens that the model read | sampled)        rows (context | trained)
    0  after the prompt:     p p  | a a                  p p  | a a  t t  b b
    1  after turn 0:         t t  | b b                  p p a a  u | c c
    2  after turn 0 too:     u    | c c                  x x  | d d
    3  a new conversation:   x x  | d d

A turn whose context begins with the whole row of the turn that it names, and that is the first to do so, goes on in
that row. Any other turn begins a row: its context may share a part of an earlier row, or nothing. So each sampled token
is trained in one row, and is context in others. What rows share at their beginnings the learner computes once
(`learner.batching.tree`). Auxiliary turns have no row.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from headway.broker.errors import FrameError
from headway.broker.schema import AgentCall, Trajectory, Turn


@dataclass(frozen=True, eq=False)
class AgentRow:
    """One sequence of an episode. L tokens, the first C of them its context alone."""

    token_ids: NDArray[np.int32]
    """[L]"""
    context_length: int
    """C: every token before the first one that the row trains."""
    positions: NDArray[np.int64]
    """[L - C] the response positions of the trajectory at which the row's other tokens stand: their mask, logprobs and
    versions are there."""


def is_of_agent(turns: Sequence[Turn]) -> bool:
    """True where an agent plays the episode, so that its turns may be a tree."""
    return bool(turns) and turns[0].call is not None


def rows_of(trajectory: Trajectory) -> list[AgentRow]:
    """Returns the rows in the order in which they begin. Raises FrameError where turns are no tree, or none is main."""
    prompt, response = trajectory.prompt_tokens, trajectory.response_tokens
    if not is_of_agent(trajectory.turns):
        tokens = np.concatenate((prompt, response)).astype(np.int32, copy=False)
        return [AgentRow(tokens, len(prompt), np.arange(len(response)))]
    tree = TurnRows(prompt, response)
    for turn in trajectory.turns:
        assert turn.call is not None
        tree.add(turn.start, turn.end, turn.call)
    if not tree.rows:
        raise FrameError(f"{trajectory.tid}: an agent's episode without a turn that may be trained")
    return tree.rows


@dataclass
class _Chain:
    context: NDArray[np.int32]
    pieces: list[tuple[int, int]]
    """Response positions [start, end) that follow the context."""
    length: int
    last: int
    """The number of its last turn."""
    is_main: bool
    joined: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    """The context with the first pieces, so that a long row is not joined anew for each turn."""
    joined_pieces: int = -1
    """How many these are; -1: not even the context."""


@dataclass
class TurnRows:
    """Rows as turns are added, in the order of the response. The response may be longer than the turns added so far."""

    prompt: NDArray[np.int32]
    response: NDArray[np.int32]
    _chains: list[_Chain] = field(default_factory=list)
    _turns: list[tuple[_Chain, int]] = field(default_factory=list)
    """The chain of each turn, and the row's length at its end."""
    _end: int = 0

    @property
    def rows(self) -> list[AgentRow]:
        """The rows of all main turns."""
        return [self._row(chain) for chain in self._chains if chain.is_main]

    def add(self, start: int, end: int, call: AgentCall) -> None:
        """Add the turn that samples response tokens [start, end). Raises FrameError where it names no earlier turn, or
        more of it than there is."""
        number, read_from, self._end = len(self._turns), self._end, end
        if not -1 <= call.after < number or not 0 <= call.keeps <= self.length(call.after):
            raise FrameError(f"turn {number} goes on after {call.keeps} tokens of turn {call.after}, which has no such")
        chain = self._turns[call.after][0] if call.after >= 0 else None
        is_main = call.role == "main"
        if chain is None or chain.last != call.after or chain.length != call.keeps or not (chain.is_main and is_main):
            context = np.concatenate((self.tokens(call.after)[: call.keeps], self.response[read_from:start]))
            if not len(context):
                raise FrameError(f"turn {number} goes on after no token, from which no model samples")
            chain = _Chain(context.astype(np.int32, copy=False), [(start, end)], len(context) + end - start, 0, is_main)
            self._chains.append(chain)
        else:
            chain.pieces.append((read_from, end))
            chain.length += end - read_from
        chain.last = number
        self._turns.append((chain, chain.length))

    def tokens(self, turn: int) -> NDArray[np.int32]:
        """[L] the row of a turn up to its end; -1: the prompt."""
        if turn < 0:
            return self.prompt
        chain, length = self._turns[turn]
        return self._joined(chain)[:length]

    def length(self, turn: int) -> int:
        """Return the number of these tokens."""
        return len(self.prompt) if turn < 0 else self._turns[turn][1]

    def _joined(self, chain: _Chain) -> NDArray[np.int32]:
        fresh = [self.response[start:end] for start, end in chain.pieces[max(chain.joined_pieces, 0) :]]
        if chain.joined_pieces < 0 or fresh:
            chain.joined = np.concatenate([chain.context if chain.joined_pieces < 0 else chain.joined, *fresh])
            chain.joined_pieces = len(chain.pieces)
        return chain.joined

    def _row(self, chain: _Chain) -> AgentRow:
        positions = np.concatenate([np.arange(start, end) for start, end in chain.pieces])
        return AgentRow(self._joined(chain), len(chain.context), positions)
