"""The learner checks every sample before it trains it, and a worker every segment before it goes on after it, as they
trust no other worker.

The codec has checked by then that the parts of a frame agree with each other (`wire/checks.py`); this compares them
with the run: its identity, the prompt, the model's vocabulary and experts, the longest response, the weights that were
announced.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from headway.broker.errors import FrameError
from headway.broker.schema import (
    Experts,
    Lease,
    SampleLimits,
    Segment,
    Trajectory,
    TrajectoryId,
    VersionSpan,
    WeightVersion,
)
from headway.broker.staleness import lag_of, oldest_step

LOGPROB_ROUNDING = 1e-3
"""In low precision the logprob of a token of probability 1 may be slightly above 0."""
CLAMPED_LOGPROB = -9999.0
"""What engines send in the place of a logprob that they do not have; no token so unlikely is sampled."""
PROBABILITY_ROUNDING = 1e-2
"""By so much the probabilities of a teacher's candidates in one place may be above 1 together."""


def validate_sample(
    trajectory: Trajectory,
    prompt_tokens: NDArray[np.int32],
    limits: SampleLimits,
    *,
    identity: str,
    newest: WeightVersion,
) -> None:
    """Raises FrameError unless this can be a sample of that prompt in the run, by weights of up to `newest`."""
    tid = trajectory.tid
    if trajectory.identity != identity:
        raise FrameError(f"{tid}: a sample of run {trajectory.identity!r}, this is {identity!r}")
    if trajectory.prompt_tokens.tobytes() != prompt_tokens.tobytes():  # of one dtype, and faster than array_equal
        raise FrameError(f"{tid}: its {len(trajectory.prompt_tokens)} prompt tokens are not those of the prompt")
    _check_length(tid, len(trajectory.response_tokens), limits)
    _check_tokens(tid, trajectory.response_tokens, limits)
    _check_logprobs(tid, trajectory.behavior_logprobs, trajectory.loss_mask)
    _check_known(tid, trajectory.behavior_logprobs)
    if b"\1" not in trajectory.loss_mask.tobytes():
        raise FrameError(f"{tid}: a sample without a token that may be trained")
    _check_versions(tid, trajectory.spans, newest)
    _check_experts(tid, trajectory.experts, limits)
    _check_teacher(tid, trajectory, limits)


def check_lag(trajectory: Trajectory, step: int, max_lag: int) -> None:
    """Raises FrameError where a token is older than the bound allows, although its worker told the server otherwise."""
    oldest = oldest_step(trajectory.spans)
    if step - oldest > max_lag:
        raise FrameError(f"{trajectory.tid}: tokens of step {oldest} at step {step}, with a bound of {max_lag}")


def validate_segment(
    segment: Segment, lease: Lease, limits: SampleLimits, *, oldest: int, newest: WeightVersion
) -> None:
    """Raises FrameError unless a worker can go on after this segment under the lease. `oldest` is the step of the
    segments' oldest token, as their workers told the server."""
    tid = segment.tid
    if segment.identity != lease.identity:
        raise FrameError(f"{tid}: a segment of run {segment.identity!r}, this is {lease.identity!r}")
    _check_length(tid, segment.start + len(segment.tokens), limits)
    _check_tokens(tid, segment.tokens, limits)
    _check_logprobs(tid, segment.behavior_logprobs, segment.loss_mask)
    _check_known(tid, segment.behavior_logprobs)
    if oldest_step(segment.spans) < oldest:  # the worker that goes on after it would be blamed for that
        raise FrameError(
            f"{tid}: tokens of step {oldest_step(segment.spans)}, said to be of step {oldest} at the oldest"
        )
    _check_versions(tid, segment.spans, newest)
    _check_experts(tid, segment.experts, limits)


def _check_length(tid: TrajectoryId, length: int, limits: SampleLimits) -> None:
    if limits.max_new_tokens is not None and length > limits.max_new_tokens:
        raise FrameError(f"{tid}: {length} response tokens, sampling.max_new_tokens is {limits.max_new_tokens}")


def _check_tokens(tid: TrajectoryId, tokens: NDArray[np.int32], limits: SampleLimits) -> None:
    if limits.vocabulary is not None and len(tokens) and int(tokens.max()) >= limits.vocabulary:
        raise FrameError(f"{tid}: token id {tokens.max()}, the model's vocabulary ends at {limits.vocabulary}")


def _check_known(tid: TrajectoryId, logprobs: NDArray[np.float32]) -> None:
    """Raises FrameError where an engine had no logprob for a token that it sampled."""
    if len(logprobs) and np.minimum.reduce(logprobs) <= CLAMPED_LOGPROB:
        raise FrameError(f"{tid}: a behaviour logprob of {logprobs.min():g}, which engines send where they have none")


def _check_logprobs(
    tid: TrajectoryId, logprobs: NDArray[np.float32], loss_mask: NDArray[np.uint8], whose: str = "behaviour"
) -> None:
    if len(logprobs) and np.maximum.reduce(logprobs) > LOGPROB_ROUNDING:
        raise FrameError(f"{tid}: a {whose} logprob of {logprobs.max():g}; none is above 0")
    if b"\0" in loss_mask.tobytes() and logprobs[loss_mask == 0].any():  # most samples have no other tokens
        raise FrameError(f"{tid}: a {whose} logprob of a token that was not sampled; it has none, which is told as 0")


def _check_teacher(tid: TrajectoryId, trajectory: Trajectory, limits: SampleLimits) -> None:
    if trajectory.teacher_logprobs is not None:
        _check_logprobs(tid, trajectory.teacher_logprobs, trajectory.loss_mask, "teacher's")
    elif limits.has_teacher:
        raise FrameError(f"{tid}: it has no logprobs of the teacher from which the run learns")
    tokens, logprobs = trajectory.candidate_tokens, trajectory.candidate_logprobs
    count = 0 if tokens is None else tokens.shape[1]
    if limits.candidates is not None and count != limits.candidates:
        raise FrameError(f"{tid}: {count} candidates of the teacher in each place, the run has {limits.candidates}")
    if tokens is not None and logprobs is not None:
        _check_candidates(tid, tokens, logprobs, trajectory.loss_mask)
        _check_tokens(tid, tokens.reshape(-1), limits)


def _check_candidates(
    tid: TrajectoryId, tokens: NDArray[np.int32], logprobs: NDArray[np.float32], loss_mask: NDArray[np.uint8]
) -> None:
    """Raises FrameError unless the candidates of each sampled token can be part of one distribution."""
    is_sampled = loss_mask != 0
    if tokens[~is_sampled].any() or logprobs[~is_sampled].any():
        raise FrameError(f"{tid}: a teacher's candidates for a token that was not sampled; it has none, told as 0")
    sampled = np.sort(tokens[is_sampled], axis=1)
    if (sampled[:, 1:] == sampled[:, :-1]).any():
        raise FrameError(f"{tid}: a teacher that names one candidate twice in a place")
    with np.errstate(over="ignore"):
        sums = np.exp(logprobs[is_sampled]).sum(axis=1)
    if len(sums) and sums.max() > 1 + PROBABILITY_ROUNDING:
        raise FrameError(f"{tid}: a teacher's candidates with a probability of {sums.max():g} together")


def _check_versions(tid: TrajectoryId, spans: Sequence[VersionSpan], newest: WeightVersion) -> None:
    """Raises FrameError where a token is of newer weights than `newest`. Only steps are compared, as a sample may be of
    weights that a later incarnation has made again."""
    for span in spans:
        if span.version.incarnation > newest.incarnation or lag_of(span.version, newest.step) < 0:
            raise FrameError(f"{tid}: tokens of weights {span.version}; the newest can be {newest}")


def _check_experts(tid: TrajectoryId, experts: Experts | None, limits: SampleLimits) -> None:
    if limits.experts is None:
        return
    layers, per_token, count = limits.experts
    if experts is None:
        raise FrameError(f"{tid}: it does not say which experts its tokens were given, which are to be replayed")
    if experts.shape[1:] != (layers, per_token):
        raise FrameError(f"{tid}: experts of shape {experts.shape[1:]}, the model's is {(layers, per_token)}")
    if len(experts) and int(experts.max()) >= count:
        raise FrameError(f"{tid}: expert {experts.max()}, a layer has {count}")
