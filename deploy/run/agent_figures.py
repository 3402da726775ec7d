"""Figures of the episodes that agents play: of a learner's step, and of all workers together."""

from collections import Counter
from collections.abc import Sequence
from statistics import fmean
from typing import Any

import msgspec

from headway.broker.schema import Trajectory
from headway.broker.schema.agent_measures import FAILED, PREFIX, REFUSED
from headway.broker.schema.status import AgentInfo, WorkerInfo
from headway.broker.schema.step_metrics import AgentFigures
from headway.broker.wire.rows import is_of_agent

MOST_REASONS = 20
"""The most reasons of which a sum over workers keeps counts, those of most."""


class AgentsTogether(AgentInfo, frozen=True, kw_only=True):
    """The reports of all workers together, with the shares that displays show; None: nothing to take a share of."""

    turns_per_episode: float | None = None
    """Of finished episodes."""
    tool_s_per_turn: float | None = None
    fork_fraction: float | None = None
    """The share of turns that were forks."""
    reread_fraction: float | None = None
    """The share of all tokens, read and sampled, that forks read after the place where they break off."""


def agent_figures(trajectories: Sequence[Trajectory]) -> AgentFigures | msgspec.UnsetType:
    """Return the figures of a step's samples; UNSET where no agent played them."""
    played = [one for one in trajectories if is_of_agent(one.turns)]
    if not played:
        return msgspec.UNSET
    sums = Counter[str]()
    for one in played:
        sums.update({name: value for name, value in one.rewards.items() if name.startswith(PREFIX)})
    turns, tokens = sum(len(one.turns) for one in played), sum(len(one.response_tokens) for one in played)

    def total(name: str) -> int:
        return round(sums[PREFIX + name])

    def by_reason(name: str) -> dict[str, int]:
        start = f"{PREFIX}{name}/"
        return {key.removeprefix(start): round(sums[key]) for key in sorted(sums) if key.startswith(start)}

    return AgentFigures(
        episodes=len(played),
        turns_mean=turns / len(played),
        turns_max=max(len(one.turns) for one in played),
        tool_calls_mean=sum(turn.call.tool_calls for one in played for turn in one.turns if turn.call) / len(played),
        tool_s_mean=sum(turn.call.waited_s for one in played for turn in one.turns if turn.call) / len(played),
        versions_mean=fmean(len({span.version for span in one.spans}) for one in played),
        fork_fraction=total("forks") / turns,
        reread_fraction=total("reread_tokens") / max(tokens, 1),
        unseen_fraction=total("unseen_turns") / turns,
        resumed_calls=total("resumed"),
        repeated_calls=total("repeated"),
        lost_calls=total("lost_calls"),
        restarted=total("restarted"),
        over_budget=total("over_budget"),
        turn_timeouts=total("turn_timeouts"),
        failures=by_reason(FAILED),
        refused_calls=by_reason(REFUSED),
    )


def flat_figures(figures: AgentFigures) -> dict[str, float]:
    """Return the figures by name, counts by reason as `failures/raised`."""
    found: dict[str, float] = {}
    for name, value in msgspec.structs.asdict(figures).items():
        if isinstance(value, dict):
            found |= {f"{name}/{reason}": count for reason, count in value.items()}
        else:
            found[name] = value
    return found


def agents_together(workers: Sequence[WorkerInfo]) -> AgentsTogether | None:
    """Return the reports of these workers together; None where no agent plays."""
    reports = [worker.agent for worker in workers if isinstance(worker.agent, AgentInfo)]
    if not reports:
        return None
    found: dict[str, Any] = {
        field.name: _by_reason([getattr(one, field.name) for one in reports])
        if field.type == dict[str, int]
        else sum(getattr(one, field.name) for one in reports)
        for field in msgspec.structs.fields(AgentInfo)
    }
    return AgentsTogether(
        **found,
        turns_per_episode=_share(found["finished_turns"], found["finished"]),
        tool_s_per_turn=_share(found["tool_s"], found["turns"]),
        fork_fraction=_share(found["forks"], found["turns"]),
        reread_fraction=_share(found["reread_tokens"], found["read_tokens"] + found["sampled_tokens"]),
    )


def _by_reason(counts: Sequence[dict[str, int]]) -> dict[str, int]:
    sums = Counter[str]()
    for one in counts:
        sums.update(one)
    return dict(sums.most_common(MOST_REASONS))


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None
