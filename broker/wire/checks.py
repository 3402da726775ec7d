"""Checks that the parts of a sample agree: lengths, spans without gaps, tokens and logprobs in their ranges.

Every check raises FrameError. Workers check what they encode, and every reader checks what it decodes.
"""

import math

import numpy as np
from numpy.typing import NDArray

from headway.broker.config import MAX_TOKENS
from headway.broker.errors import FrameError
from headway.broker.schema import ScoreRequest, Segment, Trajectory, TrajectoryId, Turn, VersionSpan

from .buffers import check_experts
from .rows import is_of_agent, rows_of

MAX_TOKEN_ID = (1 << 24) - 1
MAX_CANDIDATES = 1024
"""The most candidates of a teacher in one place."""


def check_score_request(request: ScoreRequest) -> None:
    """Raises FrameError unless it has a response, and tokens, a temperature and candidates in their ranges."""
    total = len(request.prompt_tokens) + len(request.response_tokens)
    if not len(request.response_tokens) or total > MAX_TOKENS:
        raise FrameError(f"a request for scores of {total} tokens, {len(request.response_tokens)} in the response")
    if not (math.isfinite(request.temperature) and request.temperature > 0):
        raise FrameError(f"a request for scores at temperature {request.temperature}")
    if not 0 <= request.top_k <= MAX_CANDIDATES:
        raise FrameError(f"a request for {request.top_k} candidates; at most {MAX_CANDIDATES} are allowed")
    for tokens in (request.prompt_tokens, request.response_tokens):
        check_tokens("a request for scores", tokens)


def check_segment(segment: Segment) -> None:
    """Raises FrameError unless the parts agree."""
    length, tid = len(segment.tokens), segment.tid
    if length == 0 or min(segment.index, segment.start) < 0 or segment.start + length > MAX_TOKENS:
        raise FrameError(f"{tid}: segment {segment.index} of {length} tokens at {segment.start}")
    if len(segment.behavior_logprobs) != length or len(segment.loss_mask) != length:
        raise FrameError(
            f"{tid}: {length} tokens in a segment, but {len(segment.behavior_logprobs)} logprobs and a loss mask of"
            f" {len(segment.loss_mask)}"
        )
    _check_spans(tid, segment.spans, segment.start, segment.start + length)
    check_tokens(tid, segment.tokens)
    _check_logprobs(tid, segment.behavior_logprobs)
    check_mask(tid, segment.loss_mask)
    _check_turns(tid, segment.turns)
    if is_of_agent(segment.turns):
        _check_calls(tid, segment.turns, segment.loss_mask, segment.start)
    else:
        _check_answered(segment)
    if segment.experts is not None:
        check_experts(str(tid), segment.experts)
        fed = len(segment.experts)
        if fed < length or (segment.index > 0 and fed != length):  # the first segment has the prompt's experts, too
            raise FrameError(f"{tid}: segment {segment.index} of {length} tokens with the experts of {fed}")


def _check_answered(segment: Segment) -> None:
    """Raises FrameError unless the mask is 1 but for the environment's answers to the turns."""
    ends = [turn.end for turn in segment.turns]
    if not segment.loss_mask[-1] or ends != [segment.start + end for _, end in _sampled(segment.loss_mask)[:-1]]:
        raise FrameError(
            f"{segment.tid}: segment {segment.index} has turns up to {ends}, and a loss mask that says otherwise"
        )


def check_trajectory(trajectory: Trajectory) -> None:
    """Raises FrameError unless the parts agree: lengths, spans without gaps, tokens and logprobs in their
    ranges."""
    check_parts(trajectory)
    check_mask(trajectory.tid, trajectory.loss_mask)
    for tokens in (trajectory.prompt_tokens, trajectory.response_tokens):
        check_tokens(trajectory.tid, tokens)


def check_parts(trajectory: Trajectory) -> None:
    """Raises FrameError unless the parts agree, whatever the tokens are and the loss mask has besides 0."""
    length = len(trajectory.response_tokens)
    if length == 0 or length + len(trajectory.prompt_tokens) > MAX_TOKENS:
        raise FrameError(f"{trajectory.tid}: {length} response tokens; 1 to {MAX_TOKENS} with the prompt are allowed")
    if len(trajectory.behavior_logprobs) != length or len(trajectory.loss_mask) != length:
        raise FrameError(
            f"{trajectory.tid}: {length} response tokens, but {len(trajectory.behavior_logprobs)} logprobs "
            f"and a loss mask of {len(trajectory.loss_mask)}"
        )
    _check_spans(trajectory.tid, trajectory.spans, 0, length)
    _check_logprobs(trajectory.tid, trajectory.behavior_logprobs)
    _check_teacher(trajectory.tid, trajectory.teacher_logprobs, length)
    _check_candidates(trajectory, length)
    if trajectory.experts is not None:
        check_experts(str(trajectory.tid), trajectory.experts)
        fed = len(trajectory.prompt_tokens) + length - 1
        if len(trajectory.experts) != fed:
            raise FrameError(
                f"{trajectory.tid}: {fed} tokens were fed to sample the response, but there are the experts of"
                f" {len(trajectory.experts)}"
            )
    _check_turns(trajectory.tid, trajectory.turns)
    turns = [(turn.start, turn.end) for turn in trajectory.turns]
    if is_of_agent(trajectory.turns):
        _check_calls(trajectory.tid, trajectory.turns, trajectory.loss_mask, 0)
        rows_of(trajectory)
    elif turns and (not trajectory.loss_mask[-1] or turns != _sampled(trajectory.loss_mask)):
        raise FrameError(f"{trajectory.tid}: turns {turns}, and a loss mask that says otherwise")
    if not all(math.isfinite(reward) for reward in (trajectory.reward, *trajectory.rewards.values())):
        raise FrameError(f"{trajectory.tid}: a reward that is not finite: {trajectory.reward}, {trajectory.rewards}")


def _check_spans(tid: TrajectoryId, spans: tuple[VersionSpan, ...], start: int, end: int) -> None:
    position = start
    for span in spans:
        if span.start != position or span.end <= span.start:
            raise FrameError(f"{tid}: version span [{span.start}, {span.end}) does not follow {position}")
        if span.version.step < 0 or span.version.incarnation < 0:
            raise FrameError(f"{tid}: a negative weight version {span.version}")
        position = span.end
    if position != end:
        raise FrameError(f"{tid}: version spans end at {position}, the tokens at {end}")


def check_mask(tid: TrajectoryId, mask: NDArray[np.uint8]) -> None:
    """Raises FrameError unless each entry is 0 or 1; the mask must have some."""
    if np.maximum.reduce(mask) > 1:
        raise FrameError(f"{tid}: a loss mask is 0 or 1, not {mask.max()}")


def _check_turns(tid: TrajectoryId, turns: tuple[Turn, ...]) -> None:
    position = 0
    for turn in turns:
        if not position <= turn.start < turn.end or not math.isfinite(turn.reward):
            raise FrameError(f"{tid}: a turn [{turn.start}, {turn.end}) after {position}, with reward {turn.reward}")
        position = turn.end + (turn.call is None)  # an environment has an answer between two turns


def _check_calls(tid: TrajectoryId, turns: tuple[Turn, ...], mask: NDArray[np.uint8], start: int) -> None:
    """Raises FrameError unless exactly the tokens of an agent's main turns are trained, and the last turn ends where
    the tokens do. `start`: the response position of the mask's first token."""
    expected = np.zeros(len(mask), np.uint8)
    for turn in turns:
        if turn.call is None or turn.start < start or turn.end > start + len(mask):
            raise FrameError(f"{tid}: a turn [{turn.start}, {turn.end}) of no call, or outside of its tokens")
        expected[turn.start - start : turn.end - start] = turn.call.role == "main"
    if turns[-1].end != start + len(mask) or expected.tobytes() != mask.tobytes():
        raise FrameError(f"{tid}: an agent's turns up to {turns[-1].end}, and a loss mask that says otherwise")


def _sampled(mask: NDArray[np.uint8]) -> list[tuple[int, int]]:
    """Return the runs of sampled tokens as (start, end). The first run is empty where the mask begins with an
    environment's tokens."""
    edges = np.flatnonzero(np.diff(mask.astype(np.int8), prepend=np.int8(1), append=np.int8(0)))
    bounds = [0, *edges.tolist()]
    return list(zip(bounds[::2], bounds[1::2], strict=True))


def check_tokens(tid: TrajectoryId | str, tokens: NDArray[np.int32]) -> None:
    """Raises FrameError unless all tokens are in [0, MAX_TOKEN_ID]."""
    if (
        len(tokens) and np.maximum.reduce(np.ascontiguousarray(tokens).view(np.uint32)) > MAX_TOKEN_ID
    ):  # as unsigned, a negative token id is huge
        raise FrameError(f"{tid}: token ids outside [0, {MAX_TOKEN_ID}]")


def _check_logprobs(tid: TrajectoryId, logprobs: NDArray[np.float32]) -> None:
    if b"\0" in np.isfinite(logprobs).tobytes():  # twice as fast as `all` for the tokens of one sample
        raise FrameError(f"{tid}: a behaviour logprob that is not finite")


def _check_teacher(tid: TrajectoryId, logprobs: NDArray[np.float32] | None, length: int) -> None:
    if logprobs is None:
        return
    if len(logprobs) != length:
        raise FrameError(f"{tid}: {length} response tokens, but {len(logprobs)} logprobs of the teacher")
    if not np.isfinite(logprobs).all():
        raise FrameError(f"{tid}: a teacher's logprob that is not finite")


def _check_candidates(trajectory: Trajectory, length: int) -> None:
    tid, tokens, logprobs = trajectory.tid, trajectory.candidate_tokens, trajectory.candidate_logprobs
    if tokens is None and logprobs is None:
        return
    if tokens is None or logprobs is None or trajectory.teacher_logprobs is None:
        raise FrameError(f"{tid}: candidates of a teacher without all of their tokens and logprobs, and its own")
    if tokens.shape != logprobs.shape or len(tokens) != length or not 1 <= tokens.shape[1] <= MAX_CANDIDATES:
        raise FrameError(
            f"{tid}: {length} response tokens, but a teacher's candidates of shape {tokens.shape}, and {logprobs.shape}"
            f" logprobs of them; at most {MAX_CANDIDATES} are allowed in each place"
        )
    check_tokens(tid, tokens.reshape(-1))
    if not np.isfinite(logprobs).all():
        raise FrameError(f"{tid}: a candidate's logprob that is not finite")
    if (logprobs[:, 1:] > logprobs[:, :-1]).any():
        raise FrameError(f"{tid}: a teacher's candidates that do not begin with the likeliest")
