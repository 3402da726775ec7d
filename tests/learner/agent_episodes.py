"""Random episodes of agents, told turn by turn, and float64 loops over single turns: no row, no packing, no tree."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from transformers import PreTrainedModel

from headway.broker.schema import (
    AgentCall,
    Group,
    Prompt,
    Trajectory,
    TrajectoryId,
    Turn,
    VersionSpan,
    WeightVersion,
)
from tests.learner.tiny import VOCABULARY

STEP = 7
MAX_LAG = 2
PROMPT = [1, 2, 3]


@dataclass(frozen=True)
class Told:
    """One turn of an episode."""

    after: int
    """The turn after which it goes on; -1: none."""
    keeps: int
    read: list[int]
    context: list[int]
    """All that the model read."""
    sampled: list[int]
    behavior: list[float]
    lag: int
    reward: float
    is_main: bool

    @property
    def is_trained(self) -> bool:
        return self.is_main and self.lag <= MAX_LAG


@dataclass(frozen=True)
class Rollout:
    """One episode. `rest` is what it got at its end, as part of the last main turn's reward."""

    turns: list[Told]
    rest: float
    is_agent: bool = True

    @property
    def reward(self) -> float:
        return self.rest + sum(turn.reward for turn in self.turns)

    @property
    def trained(self) -> list[Told]:
        return [turn for turn in self.turns if turn.is_trained]

    @property
    def last(self) -> int:
        return max(number for number, turn in enumerate(self.turns) if turn.is_main)

    def trajectory(self, tid: TrajectoryId) -> Trajectory:
        tokens, mask, logprobs = list[int](), list[int](), list[float]()
        spans, turns = list[VersionSpan](), list[Turn]()
        for number, one in enumerate(self.turns):
            begin, start = len(tokens), len(tokens) + len(one.read)
            tokens += one.read + one.sampled
            mask += [0] * len(one.read) + [int(one.is_main)] * len(one.sampled)
            logprobs += [0.0] * len(one.read) + (one.behavior if one.is_main else [0.0] * len(one.sampled))
            spans.append(VersionSpan(begin, len(tokens), WeightVersion(1, STEP - one.lag)))
            call = AgentCall(one.after, one.keeps, role="main" if one.is_main else "auxiliary")
            reward = one.reward + (self.rest if number == self.last else 0.0)
            turns.append(Turn(start, len(tokens), reward, call if self.is_agent else None))
        return Trajectory(
            tid=tid,
            prompt_tokens=np.array(PROMPT, np.int32),
            response_tokens=np.array(tokens, np.int32),
            behavior_logprobs=np.array(logprobs, np.float32),
            loss_mask=np.array(mask, np.uint8),
            spans=tuple(spans),
            reward=self.reward,
            rewards={},
            turns=tuple(turns) if self.is_agent or len(turns) > 1 else (),
            finish_reason="stop",
            worker="w",
        )


def group_of(number: int, rollouts: Sequence[Rollout]) -> Group:
    prompt = Prompt(
        group=f"0000-{number:08d}",
        token_ids=PROMPT,
        text="",
        ground_truth="",
        data_source="",
        num_samples=len(rollouts),
    )
    tids = (TrajectoryId(prompt.group, 0, sample) for sample in range(len(rollouts)))
    made = tuple(one.trajectory(tid) for one, tid in zip(rollouts, tids, strict=True))
    return Group(prompt=prompt, round=0, trajectories=made)


@dataclass
class Script:
    """Turns as they are added; each may name any turn before it."""

    turns: list[Told] = field(default_factory=list)

    def whole(self, number: int) -> list[int]:
        return PROMPT if number < 0 else self.turns[number].context + self.turns[number].sampled

    def add(self, after: int, keeps: int, read: list[int], sampled: list[int], **others: Any) -> None:
        context = self.whole(after)[:keeps] + read
        usual = {"lag": 0, "reward": 0.0, "is_main": True, "behavior": [-2.5] * len(sampled)}
        self.turns.append(Told(after, keeps, read, context, sampled, **{**usual, **others}))


numbers = st.integers(0, VOCABULARY - 1)
rewards = st.integers(-8, 8).map(lambda eighths: eighths / 8)


@st.composite
def agents(draw: st.DrawFn) -> Rollout:
    """An agent's episode: turns that go on, branches in the middle of anything, new conversations, auxiliary calls."""
    script = Script()
    for number in range(draw(st.integers(1, 6))):
        after = draw(st.integers(-1, number - 1))
        whole = len(script.whole(after))
        keeps = draw(st.sampled_from([whole, whole, draw(st.integers(0, whole))]))
        read = draw(st.lists(numbers, max_size=2)) or [5] * (keeps == 0)
        sampled = draw(st.lists(numbers, min_size=1, max_size=3))
        script.add(
            after,
            keeps,
            read,
            sampled,
            behavior=draw(st.lists(st.integers(-32, -16), min_size=len(sampled), max_size=len(sampled)).map(eighths)),
            lag=draw(st.integers(0, MAX_LAG + 1)),
            reward=draw(rewards),
            is_main=number == 0 or draw(st.integers(0, 5)) > 0,
        )
    return Rollout([unpaid(turn) for turn in script.turns], draw(rewards))


def eighths(numbers: list[int]) -> list[float]:
    return [number / 8 for number in numbers]


def unpaid(turn: Told) -> Told:
    """Return the turn without a reward where it is auxiliary: only main turns get one."""
    return turn if turn.is_main else Told(**{**turn.__dict__, "reward": 0.0})


@st.composite
def ordinary(draw: st.DrawFn) -> Rollout:
    """An episode of one or two turns of an environment."""
    script = Script()
    for number in range(draw(st.integers(1, 2))):
        sampled = draw(st.lists(numbers, min_size=1, max_size=3))
        behavior = [-2.0 - 0.25 * place for place in range(len(sampled))]
        read = [7] if number else []
        script.add(number - 1, len(script.whole(number - 1)), read, sampled, behavior=behavior, reward=draw(rewards))
    return Rollout(script.turns, draw(rewards), is_agent=False)


batches = st.lists(
    st.builds(lambda some, one: [*some, one], st.lists(agents(), min_size=1, max_size=3), ordinary()),
    min_size=1,
    max_size=2,
)
"""Groups of rollouts, in each an ordinary one besides agents'."""


def turn_logprobs(model: PreTrainedModel, turn: Told) -> torch.Tensor:
    """[sampled] float64 logprobs of a turn by itself."""
    tokens = torch.tensor([turn.context + turn.sampled])
    logits = model(input_ids=tokens).logits[0].double()
    found = logits[:-1].log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0]
    return found[len(turn.context) - 1 :]


Sampled = list[tuple[torch.Tensor, float, float]]
"""Of each trained token of a rollout: log pi, log mu, and its advantage."""
Loss = Callable[[list[Sampled]], torch.Tensor]


def group_advantages(groups: Sequence[Sequence[Rollout]], *, by_std: bool) -> list[float]:
    found = []
    for group in groups:
        mean = sum(one.reward for one in group) / len(group)
        variance = sum((one.reward - mean) ** 2 for one in group) / max(len(group) - 1, 1)
        found += [(one.reward - mean) / (variance**0.5 + 1e-4 if by_std else 1.0) for one in group]
    return found


def parents(rollout: Rollout) -> list[int]:
    """Return the newest main turn all of which each turn's context begins with; -1: it begins with none."""
    wholes, found = list[list[tuple[int, int]]](), list[int]()  # each token by the turn that brought it, and its place
    for number, turn in enumerate(rollout.turns):
        before = wholes[turn.after] if turn.after >= 0 else [(-1, place) for place in range(len(PROMPT))]
        context = before[: turn.keeps] + [(number, place) for place in range(len(turn.read))]
        own = [one for one, whole in enumerate(wholes) if rollout.turns[one].is_main and context[: len(whole)] == whole]
        found.append(max(own, default=-1))
        wholes.append(context + [(number, -1 - place) for place in range(len(turn.sampled))])
    return found


def returns_of_turns(rollout: Rollout, gamma: float) -> dict[int, float]:
    """Return each main turn's return: every reward is carried back to all turns before it on its path."""
    paths: dict[int, list[int]] = {}
    parent = parents(rollout) if rollout.is_agent else list(range(-1, len(rollout.turns) - 1))
    for number, turn in enumerate(rollout.turns):
        path, at = [], number
        while at >= 0:
            path.append(at)
            at = parent[at]
        if turn.is_main:
            paths[number] = path
    found = dict.fromkeys(paths, 0.0)
    for number, path in paths.items():
        for distance, before in enumerate(path):
            found[before] += gamma**distance * (rollout.turns[number].reward if number != rollout.last else 0.0)
    for number in paths:
        end = max(later for later, path in paths.items() if number in path)
        outcome = rollout.rest + rollout.turns[rollout.last].reward
        found[number] += gamma ** paths[end].index(number) * outcome
    return found


def turn_advantages(groups: Sequence[Sequence[Rollout]], gamma: float) -> list[dict[int, float]]:
    """Return each main turn's advantage; a rollout counts once in its group."""
    found = []
    for group in groups:
        each = [returns_of_turns(one, gamma) for one in group]
        mean = sum(sum(one.values()) / len(one) for one in each) / len(each)
        spread = sum(sum((value - mean) ** 2 for value in one.values()) / len(one) for one in each)
        std = (spread / max(len(each) - 1, 1)) ** 0.5
        scale = 1 / (std + 1e-4) if len(each) > 1 else 0.0
        found += [{number: (value - mean) * scale for number, value in one.items()} for one in each]
    return found


def _surrogate(ratio: torch.Tensor, advantage: float, clip: float) -> torch.Tensor:
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage)


def _tokens(rollout: Sampled) -> list[torch.Tensor]:
    return [_surrogate((new - old).exp(), advantage, 0.2) for new, old, advantage in rollout]


def _total(terms: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.stack([*terms, torch.zeros((), dtype=torch.float64)]).sum()


def grpo(rollouts: list[Sampled]) -> torch.Tensor:
    trained = [one for one in rollouts if one]
    return _total([_total(_tokens(one)) / len(one) for one in trained]) / max(len(trained), 1)


def token_mean(rollouts: list[Sampled]) -> torch.Tensor:
    terms = [term for one in rollouts for term in _tokens(one)]
    return _total(terms) / max(len(terms), 1)


def dr_grpo(rollouts: list[Sampled]) -> torch.Tensor:
    trained = [one for one in rollouts if one]
    return _total([term for one in trained for term in _tokens(one)]) / (max(len(trained), 1) * 16)


def gspo(rollouts: list[Sampled]) -> torch.Tensor:
    terms = []
    for one in rollouts:
        if one:
            ratio = (_total([new - old for new, old, _ in one]) / len(one)).exp()
            terms.append(_surrogate(ratio, sum(advantage for *_, advantage in one) / len(one), 0.3))
    return _total(terms) / max(len(terms), 1)


def weighted(rollouts: list[Sampled]) -> torch.Tensor:
    """Return REINFORCE under the truncated ratio of whole rollouts."""
    trained = [one for one in rollouts if one]
    terms = []
    for one in trained:
        weight = min(float(_total([new.detach() - old for new, old, _ in one]).clamp(-20, 20).exp()), 2.0)
        terms += [-weight * advantage * new / len(one) for new, _, advantage in one]
    return _total(terms) / max(len(trained), 1)
