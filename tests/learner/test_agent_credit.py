"""An agent's turns are credited along its rows, by a critic, and without one."""

from collections.abc import Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given

from headway.broker.schema import TrajectoryId
from headway.broker.wire.rows import rows_of
from headway.learner.batching.batch import PackedBatch
from headway.learner.objective.credit import token_rewards
from headway.learner.objective.critic import Critic
from headway.learner.ranks import Ranks
from tests.learner import agent_episodes
from tests.learner.agent_episodes import STEP, Rollout, group_of

from .test_agent_rows import ALONE, config_of, few, updater_of


class PrefixValues:
    """A critic whose value of a state is a number of its tokens alone."""

    rank, world_size, replica, replicas, is_lead = 0, 1, 0, 1, True

    def values(self, batches: Sequence[PackedBatch]) -> list[torch.Tensor]:
        return [torch.tensor(self.of_batch(batch)) for batch in batches]

    def of_batch(self, batch: PackedBatch) -> list[float]:
        tokens, bounds = batch.token_ids_T.tolist(), batch.cu_seqlens.tolist()
        return [value(tokens[start:at]) for start, end in pairwise(bounds) for at in range(start, end)]

    def step(self, *_: object) -> tuple[float, float, list[dict[str, float]]]:
        return 0.0, 0.0, []


def value(tokens: Sequence[int]) -> float:
    return sum((place + 1) * token for place, token in enumerate(tokens)) % 17 / 16


class RecordingCritic(Critic):
    """A critic that keeps its estimates."""

    def returns_and_advantages(self, batches: Any, rewards: Any, values: Any) -> Any:
        self.estimates = super().returns_and_advantages(batches, rewards, values)
        return self.estimates


class StillBackend(SimpleNamespace):
    """A policy that learns nothing."""

    def step(self, *_: object) -> tuple[float, float, list[dict[str, float]]]:
        return 0.0, 0.0, [{}]


def rows_by_hand(rollout: Rollout) -> list[list[int]]:
    """Return the main turns of each row: the first to go on after all of a row goes on in it."""
    rows: list[list[int]] = []
    for number, turn in enumerate(rollout.turns):
        going_on = [row for row in rows if row[-1] == turn.after and turn.keeps == whole_length(rollout, turn.after)]
        if not turn.is_main:
            continue
        if going_on:
            going_on[0].append(number)
        else:
            rows.append([number])
    return rows


def whole_length(rollout: Rollout, number: int) -> int:
    return len(rollout.turns[number].context) + len(rollout.turns[number].sampled)


class HandRow:
    """A row of a rollout: all tokens up to each trained one, and what each of these earned."""

    def __init__(self, rollout: Rollout, turns: list[int]) -> None:
        self.turns = turns
        self.states: list[tuple[int, ...]] = []
        self.ends: dict[int, int] = {}
        """How many trained tokens the row has up to the end of each of its turns."""
        for number in turns:
            turn = rollout.turns[number]
            for place in range(len(turn.sampled) if turn.is_trained else 0):
                self.states.append((*turn.context, *turn.sampled[: place + 1]))
            self.ends[number] = len(self.states)
        self.earned = [0.0] * len(self.states)

    def returns(self) -> list[tuple[list[int], float]]:
        """Schulman et al. 2016, equation 16, from the last trained token to the first, in float64."""
        found, later, next_value = [], 0.0, 0.0
        for state, reward in zip(reversed(self.states), reversed(self.earned), strict=True):
            own = value(state[:-1])
            later = reward + 0.9 * next_value - own + 0.9 * 0.8 * later
            found.append(([*state], later + own))
            next_value = own
        return found


def pay_by_hand(rows: list[HandRow], rollout: Rollout, number: int) -> None:
    """Give a turn's own reward to its last trained token, and to those from which its row, and the rows before that,
    branched off, each farther away by the branch's tokens."""
    reward = rollout.turns[number].reward
    while number >= 0:
        row = next(row for row in rows if number in row.turns)
        if not row.ends[number]:
            return
        row.earned[row.ends[number] - 1] += reward
        reward *= 0.9 ** row.ends[number]
        number = agent_episodes.parents(rollout)[row.turns[0]]


def estimates_by_hand(rollout: Rollout, *, of_turns: bool) -> list[tuple[list[int], float]]:
    """Return all tokens up to each trained one, with its return: GAE along its row, observations skipped."""
    rows = [HandRow(rollout, row) for row in rows_by_hand(rollout)] if rollout.is_agent else []
    rows = rows or [HandRow(rollout, list(range(len(rollout.turns))))]
    for number, turn in enumerate(rollout.turns):
        if of_turns and turn.is_main and number != rollout.last:
            pay_by_hand(rows, rollout, number)
    for row in rows:
        if row.earned:
            row.earned[-1] += rollout.turns[rollout.last].reward + rollout.rest if of_turns else rollout.reward
    return [one for row in rows for one in row.returns()]


@pytest.mark.parametrize("kind", ["episode", "turn"])
@pytest.mark.parametrize("sharing", ["never", "always"])
@few
@given(groups=agent_episodes.batches)
def test_a_critic_looks_ahead_along_each_row(kind: str, sharing: str, groups: list[list[Rollout]]) -> None:
    config = config_of(
        advantage={"kind": "gae"},
        objective={"kind": "ppo_clip"},
        aggregation={"kind": "token_mean"},
        credit={"kind": kind},
    )
    values: Any = PrefixValues()
    critic = RecordingCritic(values, Ranks.of(values), clip=0.2, gamma=0.9, lam=0.8, learning_rate=0.0)
    updater = updater_of(config, StillBackend(**vars(ALONE)), critic, prefix_sharing=sharing)
    scored = updater.compute_advantages([group_of(n, group) for n, group in enumerate(groups)], STEP)
    (batches,) = packed = updater.pack(scored.sequences)
    updater.update(packed, 0)
    rollouts = [one for group in groups for one in group]
    wanted = sorted(one for rollout in rollouts for one in estimates_by_hand(rollout, of_turns=kind == "turn"))
    found = []
    for batch, returns_T in zip(batches, critic.estimates.returns, strict=True):
        tokens = batch.token_ids_T.tolist()
        for start, end in pairwise(batch.cu_seqlens.tolist()):
            for at in range(start, end):
                if batch.loss_mask_T[at] > 0:
                    found.append((tokens[start : at + 1], float(returns_T[at])))
    assert [state for state, _ in sorted(found)] == [state for state, _ in wanted]
    assert [one for _, one in sorted(found)] == pytest.approx([one for _, one in wanted], abs=1e-5)
    assert len(found) == sum(len(turn.sampled) for one in rollouts for turn in one.trained)


@few
@given(rollout=agent_episodes.agents())
def test_all_that_follows_a_token_of_a_turn_is_the_turns_return(rollout: Rollout) -> None:
    """A critic that knows nothing, with gamma and lambda 1, credits turns as one that compares returns does."""
    trajectory = rollout.trajectory(TrajectoryId("0-0", 0, 0))
    wanted = agent_episodes.returns_of_turns(rollout, gamma=1.0)
    rewards = token_rewards(trajectory, rollout.reward, trajectory.loss_mask)
    for row in rows_of(trajectory):
        following = np.cumsum(rewards[row.positions][::-1])[::-1]
        for number, turn in enumerate(trajectory.turns):
            if rollout.turns[number].is_main and turn.start in row.positions:
                first = row.positions.tolist().index(turn.start)
                assert following[first] == pytest.approx(wanted[number], abs=1e-5)
