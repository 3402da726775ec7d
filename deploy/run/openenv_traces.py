"""Trained episodes of agents as OpenEnv's traces: one line of JSON each, a `TrainingTrace` of schema version 1.

A turn is one call of the model whose answer is trained: all tokens that the model read, those that it sampled, with the
logprobs of the policy that sampled them, and a mask over both. What was answered and not trained, such as a title or a
turn that its agent never got, is left out, as no logprob of it is kept. Conversations are not recorded: `request` and
`response` are empty. `metadata` says what OpenEnv has no field for; its keys are those of `TurnMetadata`.
"""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

from headway.broker.errors import HeadwayError
from headway.broker.schema import Trajectory, Turn
from headway.broker.wire.rows import TurnRows, is_of_agent
from headway.learner.disk import UNFINISHED, write_errors


class NoAgentError(HeadwayError):
    """A trajectory has no turns of an agent."""


class TurnMetadata(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a turn besides its tokens."""

    trajectory: str
    """The episode, as `group:round:sample`: those of a group answer one prompt."""
    step: int
    """The learner's step that took the episode."""
    index: int
    """The turn's number in the episode, those that are left out counted."""
    after: str
    """The turn on whose tokens this one's prompt begins; "": on those of the task, or on none."""
    finish_reason: str
    tool_calls: int
    reward: float
    """Of this turn alone."""
    episode_reward: float
    versions: list[tuple[int, int, str]]
    """(start, end, weight version): which weights sampled completion tokens [start, end)."""


class TraceTurn(msgspec.Struct, frozen=True, kw_only=True):
    """One call of the model: OpenEnv's `TrainingTurn`."""

    node_id: str
    """The id that the answer had at the endpoint."""
    prompt_token_ids: list[int]
    completion_token_ids: list[int]
    per_token_logps: list[float]
    """None is above 0: what rounding left there, at most .001, is cut off."""
    loss_mask: list[int]
    """0 for the tokens of the prompt, and then 1."""
    metadata: TurnMetadata


class Trace(msgspec.Struct, frozen=True, kw_only=True):
    """One episode: OpenEnv's `TrainingTrace`."""

    schema_version: Literal[1] = 1
    turns: list[TraceTurn]


class Written(msgspec.Struct, frozen=True, kw_only=True):
    """What an export consists of."""

    out: str
    steps: int
    traces: int
    turns: int
    trained_tokens: int


def trace_of(trajectory: Trajectory, step: int) -> Trace:
    """Return the turns of an episode that are trained. Raises NoAgentError."""
    if not is_of_agent(trajectory.turns):
        raise NoAgentError(
            f"Trajectory {trajectory.tid} of step {step} was not played by an agent: it has no calls of the model to be"
            " the turns of a trace. Only runs whose recipe has `agent:` can be exported so."
        )
    rows, turns = TurnRows(trajectory.prompt_tokens, trajectory.response_tokens), list[TraceTurn]()
    for number, turn in enumerate(trajectory.turns):
        assert turn.call is not None
        rows.add(turn.start, turn.end, turn.call)
        if turn.call.role == "main":
            turns.append(_turn(trajectory, step, number, turn, rows.tokens(number).tolist()))
    return Trace(turns=turns)


def _turn(trajectory: Trajectory, step: int, number: int, turn: Turn, row: list[int]) -> TraceTurn:
    call, sampled = turn.call, slice(turn.start, turn.end)
    assert call is not None
    read = len(row) - (turn.end - turn.start)
    return TraceTurn(
        node_id=_name(number),
        prompt_token_ids=row[:read],
        completion_token_ids=row[read:],
        per_token_logps=np.minimum(trajectory.behavior_logprobs[sampled], 0).tolist(),
        loss_mask=[0] * read + trajectory.loss_mask[sampled].tolist(),
        metadata=TurnMetadata(
            trajectory=str(trajectory.tid),
            step=step,
            index=number,
            after=_name(call.after) if call.after >= 0 and call.keeps else "",
            finish_reason=call.finish_reason,
            tool_calls=call.tool_calls,
            reward=turn.reward,
            episode_reward=trajectory.reward,
            versions=_versions(trajectory, turn),
        ),
    )


def _name(number: int) -> str:
    return f"turn-{number}"


def _versions(trajectory: Trajectory, turn: Turn) -> list[tuple[int, int, str]]:
    return [
        (max(span.start, turn.start) - turn.start, min(span.end, turn.end) - turn.start, str(span.version))
        for span in trajectory.spans
        if span.start < turn.end and span.end > turn.start
    ]


def logged_traces(log: Path, first_step: int = 0, steps: int | None = None) -> Iterator[Trace]:
    """Yield the episodes that the learner took, from an experience log's folder: those of `steps` steps from
    `first_step` on, or of all. One batch at a time is in memory.

    Raises NoAgentError, LoggedBatchError for a damaged batch, HeadwayError where there is none.
    """
    from headway.learner.experience.log_files import read_batch, segments_in

    places = dict(sorted(held for segment in segments_in(log) for held in segment.places.items()))
    wanted = [step for step in places if step >= first_step][:steps]
    if not wanted:
        logged = f"steps {min(places)} to {max(places)}" if places else "none; checkpoint.log_bytes=0 keeps none"
        raise HeadwayError(f"{log} has no batch of the steps that are asked for: it has {logged}.")
    for step in wanted:
        for group in read_batch(places[step], "", step):
            yield from (trace_of(trajectory, step) for trajectory in group.trajectories)


def write_traces(log: Path, out: Path, first_step: int = 0, steps: int | None = None) -> Written:
    """Write an experience log's episodes into a file, which is replaced once all are written. Raises as `logged_traces`
    does, and HeadwayError where the file cannot be written."""
    if not out.absolute().parent.is_dir():
        raise HeadwayError(f"There is no directory {out.parent} for {out.name}: make it, or name another file.")
    part, found = out.with_name(f".{out.name}{UNFINISHED}"), set[int]()
    traces = turns = tokens = 0
    try:
        with write_errors(out), part.open("wb") as file:
            for trace in logged_traces(log, first_step, steps):
                file.write(msgspec.json.encode(trace) + b"\n")
                found.update(turn.metadata.step for turn in trace.turns)
                traces, turns = traces + 1, turns + len(trace.turns)
                tokens += sum(sum(turn.loss_mask) for turn in trace.turns)
        with write_errors(out):
            part.replace(out)
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)
    return Written(out=str(out), steps=len(found), traces=traces, turns=turns, trained_tokens=tokens)
