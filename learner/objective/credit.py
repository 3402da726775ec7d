"""Credit for single turns (`algorithm.credit.kind=turn`): which of an episode's rewards each token answers for.

    main turns, their parents ─► returns along the tree ─► compared within the group ─► [R] an advantage for each token
                              └► rewards at the ends of turns and of rows ─► [R] a reward for each token, for a critic

A trajectory's reward is the sum of its turns' rewards and of what the whole episode got at its end, which the last
trained turn's reward may contain. So all that the other turns did not get is the episode's outcome, with the shaping of
rewards in it.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from headway.algorithms.turns import turn_returns
from headway.broker.schema import Group, Trajectory, Turn
from headway.broker.wire.rows import is_of_agent, rows_of

from .composition import TurnAdvantage
from .shaping import group_indices, trajectories_of


class _MainTurns(NamedTuple):
    """The turns of an episode that are trained, in order."""

    turns: list[Turn]
    parents: list[int]
    """The number, among these, of the newest turn that each goes on after the end of; -1: of none."""
    rewards: list[float]
    """Each turn's own, without the episode's outcome."""
    outcome: float


def turn_advantages(
    groups: Sequence[Group], rewards_S: torch.Tensor, advantage: TurnAdvantage, *, gamma: float
) -> list[NDArray[np.float32]]:
    """Returns [R] an advantage for each response token of each trajectory, in the order of `groups`; 0 for tokens that
    no trained turn sampled. `rewards_S` are the trajectories' shaped rewards."""
    trajectories = trajectories_of(groups)
    episodes = [_main_turns(one, reward) for one, reward in zip(trajectories, rewards_S.tolist(), strict=True)]
    returns = [
        turn_returns(
            torch.tensor(one.rewards, dtype=torch.float64), torch.tensor(one.parents), outcome=one.outcome, gamma=gamma
        )
        for one in episodes
    ]
    rollout_K = torch.tensor([number for number, one in enumerate(episodes) for _ in one.turns], dtype=torch.int64)
    returns_K = torch.cat([*returns, torch.zeros(0, dtype=torch.float64)])
    advantages_K, _ = advantage(returns_K, rollout_K, group_indices(groups))
    values = iter(advantages_K.tolist())
    return [
        _at_tokens(trajectory, [(turn, next(values)) for turn in one.turns])
        for trajectory, one in zip(trajectories, episodes, strict=True)
    ]


def token_rewards(
    trajectory: Trajectory, reward: float, loss_mask: NDArray[np.uint8], *, gamma: float = 1.0
) -> NDArray[np.float32]:
    """[R] each turn's reward at its last trained token (`loss_mask` [R]), and the episode's outcome at the last one of
    each row, where its path ends. Where nothing of a turn is trained, its reward goes to the last trained token of its
    row before it, or to none.

    GAE looks ahead along one row. What the turns of a branch got on their own also counts for the turn from which the
    branch goes on, at its last trained token: discounted by `gamma` for each token of the branch, and without the
    outcome, which each path has already. So with gamma 1 all rewards after a token are those of `turn_returns`.
    """
    episode, own = _main_turns(trajectory, reward), np.zeros(len(loss_mask), np.float64)
    whole_rows = _positions_of_rows(trajectory)
    rows = [positions[loss_mask[positions] != 0] for positions in whole_rows]
    row_of = _rows_of_turns(whole_rows, episode)

    def last_trained(turn: int) -> int | None:
        trained = rows[row_of[turn]]
        before = int(np.searchsorted(trained, episode.turns[turn].end))
        return int(trained[before - 1]) if before else None

    for number, earned in enumerate(episode.rewards):
        if (place := last_trained(number)) is not None:
            own[place] += earned
    for row in reversed(range(len(rows))):  # branches come after what they go on from
        parent = episode.parents[row_of.index(row)] if row in row_of else -1
        if parent >= 0 and (place := last_trained(parent)) is not None:
            own[place] += float(np.sum(own[rows[row]] * gamma ** np.arange(1, len(rows[row]) + 1)))
    for trained in rows:
        if len(trained):
            own[trained[-1]] += episode.outcome
    return own.astype(np.float32)


def _rows_of_turns(rows: Sequence[NDArray[np.int64]], episode: _MainTurns) -> list[int]:
    """Returns the row of each trained turn."""
    row_of = {position: row for row, positions in enumerate(rows) for position in positions.tolist()}
    return [row_of[turn.start] for turn in episode.turns]


def _positions_of_rows(trajectory: Trajectory) -> list[NDArray[np.int64]]:
    if not is_of_agent(trajectory.turns):
        return [np.arange(len(trajectory.response_tokens))]
    return [row.positions for row in rows_of(trajectory)]


def _main_turns(trajectory: Trajectory, reward: float) -> _MainTurns:
    """Returns the trained turns of an episode whose shaped reward is `reward`."""
    every = trajectory.turns or (Turn(0, len(trajectory.response_tokens), reward),)
    turns: list[Turn] = []
    parents: list[int] = []
    newest: list[int] = []
    """The number of the trained turn that each turn is or goes on after, for all turns."""
    for turn, after in zip(every, _parents(every), strict=True):
        parent = newest[after] if after >= 0 else -1
        if turn.call is not None and turn.call.role != "main":
            newest.append(parent)
            continue
        newest.append(len(turns))
        turns.append(turn)
        parents.append(parent)
    own = [turn.reward for turn in turns[:-1]]
    return _MainTurns(turns, parents, [*own, 0.0], reward - sum(own))


def _parents(turns: Sequence[Turn]) -> list[int]:
    """Returns the number of the newest turn that each turn's context has the end of; -1: of none. A rewritten history
    shares but a part of the turn that it names (`AgentCall.keeps`), and goes on from those alone which it has whole."""
    parents, lengths, end = list[int](), list[int](), 0
    for number, turn in enumerate(turns):
        if turn.call is None:
            parents.append(number - 1)
            continue
        after, keeps = turn.call.after, turn.call.keeps
        lengths.append(keeps + turn.end - end)
        end = turn.end
        while after >= 0 and lengths[after] > keeps:
            call = turns[after].call
            assert call is not None
            after, keeps = call.after, min(keeps, call.keeps)
        parents.append(after)
    return parents


def _at_tokens(trajectory: Trajectory, values: Sequence[tuple[Turn, float]]) -> NDArray[np.float32]:
    """[R] each turn's value at its tokens, 0 elsewhere."""
    found = np.zeros(len(trajectory.response_tokens), np.float32)
    for turn, value in values:
        found[turn.start : turn.end] = value
    return found
