"""Frames whose parts agree with each other, but whose samples cannot exist, are refused, each kind by its own check."""

from collections.abc import Callable
from contextlib import nullcontext

import numpy as np
import pytest
from msgspec.structs import replace
from numpy.typing import NDArray

from headway.broker import Broker
from headway.broker.client.learner import CheckpointMark, NotReady
from headway.broker.client.leases import AppendOutcome, SubmitOutcome
from headway.broker.client.submissions import Submission, measures_of
from headway.broker.errors import FrameError, QuarantinedError
from headway.broker.schema import Lease, SampleLimits, Segment, Trajectory, TrajectoryId, VersionSpan, WeightVersion
from headway.broker.security.sample_validation import validate_sample
from headway.broker.wire.codec import encode_segment, encode_trajectory

from .scenario import as_segment, begin, groups, prompt, rules, trajectory

LIMITS = SampleLimits(vocabulary=151_936, max_new_tokens=8)
WITH_EXPERTS = SampleLimits(vocabulary=151_936, max_new_tokens=8, experts=(2, 1, 4))


def with_tokens(one: Trajectory, *tokens: int) -> Trajectory:
    changed = np.array([*one.response_tokens[: -len(tokens)], *tokens], np.int32)
    return replace(one, response_tokens=changed)


def longer(one: Trajectory, length: int) -> Trajectory:
    return replace(
        one,
        response_tokens=np.full(length, 7, np.int32),
        behavior_logprobs=np.full(length, -1, np.float32),
        loss_mask=np.ones(length, np.uint8),
        spans=(VersionSpan(0, length, one.spans[0].version),),
    )


PILLS: dict[str, tuple[Callable[[Trajectory], Trajectory], str]] = {
    "beyond the vocabulary": (lambda one: with_tokens(one, 151_936), "token id 151936"),
    "another prompt": (lambda one: replace(one, prompt_tokens=np.array([1, 2, 3], np.int32)), "prompt tokens"),
    "a prompt beyond the vocabulary": (
        lambda one: replace(one, prompt_tokens=np.array([1, 2, 999_999], np.int32)),
        "prompt tokens",
    ),
    "60,000 tokens": (lambda one: longer(one, 60_000), "60000 response tokens"),
    "a logprob of 80": (
        lambda one: replace(one, behavior_logprobs=np.array([-1, -1, -1, -1, -1, 80], np.float32)),
        "logprob of 80",
    ),
    "a logprob that the engine did not have": (
        lambda one: replace(one, behavior_logprobs=np.array([-1, -1, -9999, -1, -1, -1], np.float32)),
        "logprob of -9999, which engines send where they have none",
    ),
    "nothing to train": (
        lambda one: replace(
            one, loss_mask=np.zeros(6, np.uint8), behavior_logprobs=np.zeros(6, np.float32), teacher_logprobs=None
        ),
        "without a token that may be trained",
    ),
    "a logprob of what was said": (
        lambda one: replace(one, loss_mask=np.array([1, 1, 1, 1, 0, 1], np.uint8)),
        "not sampled",
    ),
    "a teacher's logprob of 80": (
        lambda one: replace(one, teacher_logprobs=np.array([-1, -1, -1, -1, -1, 80], np.float32)),
        "teacher's logprob of 80",
    ),
    "a teacher's logprob of what was said": (
        lambda one: replace(
            one,
            loss_mask=np.array([1, 1, 1, 1, 0, 1], np.uint8),
            behavior_logprobs=np.array([-1, -1, -1, -1, 0, -1], np.float32),
            teacher_logprobs=np.full(6, -1, np.float32),
        ),
        "teacher's logprob of a token that was not sampled",
    ),
    "weights that come later": (
        lambda one: replace(one, spans=(VersionSpan(0, 6, WeightVersion(1, 1000)),)),
        "weights 1.1000",
    ),
    "an incarnation that comes later": (
        lambda one: replace(one, spans=(VersionSpan(0, 6, WeightVersion(9, 0)),)),
        "weights 9.0",
    ),
}


async def submit_unseen(broker: Broker, lease: Lease, pill: Trajectory, *, step: int = 0) -> SubmitOutcome:
    """Submit with the metadata of an honest sample, because scripts see only the metadata that a worker wrote."""
    frame = encode_trajectory(replace(pill, identity=lease.identity))
    submission = Submission(
        lease, frame, measures_of(frame, (VersionSpan(0, len(pill.response_tokens), WeightVersion(1, step)),)), 0.0
    )
    (outcome,) = await broker.leases._submissions._hand_in([submission])
    return outcome


@pytest.mark.parametrize("kind", PILLS)
async def test_a_pill_is_dead_lettered_and_the_sample_generated_anew(broker: Broker, kind: str) -> None:
    broker.batches.limits = LIMITS
    run = await begin(broker, rules(1))
    bad, *others = (await run.lease(4, 0)).leases
    await run.submit_all(others, 0)
    make, reason = PILLS[kind]
    assert await submit_unseen(broker, bad, make(trajectory(bad, 0))) is SubmitOutcome.ACCEPTED
    assert await run.take(0) is None
    assert run.not_ready is NotReady.REJECTED
    status = await broker.status.snapshot()
    assert [(one.tid, one.worker) for one in status.dead_letters] == [(str(bad.tid), "w")]
    assert reason in status.dead_letters[0].reason
    assert (status.queues.rejected, status.queues.retry, status.quarantined) == (1, 1, ())
    (again,) = (await run.lease(1, 0)).leases
    assert again.tid == bad.tid, "the other three are not generated again"
    await run.submit(again, 0)
    assert sorted(await run.take(0) or ()) == groups(0, 1)
    await broker.batches.commit(run.owner, 1)
    assert (await run.queues()).payload_bytes == 0


@pytest.mark.parametrize(("shape", "top"), [((8, 2, 1), 4), ((8, 3, 1), 0), (None, 0)])
async def test_experts_that_the_model_lacks_are_refused(
    broker: Broker, shape: tuple[int, ...] | None, top: int
) -> None:
    broker.batches.limits = WITH_EXPERTS
    run = await begin(broker, rules(1), group_size=1)
    bad, good = (await run.lease(2, 0)).leases
    experts = np.full(shape, top, np.uint8) if shape else None
    await run.broker.leases.submit(good, replace(trajectory(good, 0), experts=np.zeros((8, 2, 1), np.uint8)))
    await run.broker.leases.submit(bad, replace(trajectory(bad, 0), experts=experts))
    assert await run.take(0) is None
    (letter,) = (await broker.status.snapshot()).dead_letters
    assert letter.tid == str(bad.tid)
    assert "expert" in letter.reason


async def test_a_sample_without_the_teachers_logprobs_is_refused_where_they_are_trained(broker: Broker) -> None:
    broker.batches.limits = SampleLimits(has_teacher=True)
    run = await begin(broker, rules(1), group_size=1)
    bad, good = (await run.lease(2, 0)).leases
    taught = replace(trajectory(good, 0), teacher_logprobs=trajectory(good, 0).behavior_logprobs / 2)
    await run.broker.leases.submit(good, taught)
    await run.submit(bad, 0)
    assert await run.take(0) is None
    (letter,) = (await broker.status.snapshot()).dead_letters
    assert letter.tid == str(bad.tid)
    assert "no logprobs of the teacher" in letter.reason


NAMED = np.tile(np.array([[70_000, 3]], np.int32), (6, 1))
LOGPROBS = np.tile(np.array([[-0.5, -2]], np.float32), (6, 1))


@pytest.mark.parametrize(
    ("tokens", "logprobs", "reason"),
    [
        (None, None, "0 candidates of the teacher in each place, the run has 2"),
        (NAMED[:, :1], LOGPROBS[:, :1], "1 candidates of the teacher in each place, the run has 2"),
        (NAMED + 151_933, LOGPROBS, "the model's vocabulary ends at 151936"),
        (0 * NAMED, LOGPROBS, "names one candidate twice"),
        (NAMED, LOGPROBS / 8, "with a probability of 1.7"),
        (NAMED, LOGPROBS + 120, "with a probability of inf"),
    ],
)
async def test_candidates_that_are_no_part_of_a_distribution_are_refused(
    broker: Broker, tokens: NDArray[np.int32] | None, logprobs: NDArray[np.float32] | None, reason: str
) -> None:
    broker.batches.limits = replace(LIMITS, has_teacher=True, candidates=2)
    run = await begin(broker, rules(1), group_size=1)
    bad, good = (await run.lease(2, 0)).leases
    taught = replace(trajectory(good, 0), teacher_logprobs=trajectory(good, 0).behavior_logprobs / 2)
    await run.broker.leases.submit(good, replace(taught, candidate_tokens=NAMED, candidate_logprobs=LOGPROBS))
    refused = replace(taught, tid=bad.tid, prompt_tokens=trajectory(bad, 0).prompt_tokens)
    await run.broker.leases.submit(bad, replace(refused, candidate_tokens=tokens, candidate_logprobs=logprobs))
    assert await run.take(0) is None
    (letter,) = (await broker.status.snapshot()).dead_letters
    assert letter.tid == str(bad.tid)
    assert reason in letter.reason


def test_a_token_that_was_said_has_no_candidates() -> None:
    lease = Lease(tid=TrajectoryId("g", 0, 0), token="t", ttl_s=1, prompt=prompt(0))
    said = np.array([1, 1, 0, 1, 1, 1], np.uint8)
    one = trajectory(lease, 0)
    one = replace(
        one,
        loss_mask=said,
        behavior_logprobs=one.behavior_logprobs * said,
        teacher_logprobs=one.behavior_logprobs * said,
        candidate_tokens=NAMED * said[:, None],
        candidate_logprobs=LOGPROBS * said[:, None],
    )
    limits = replace(LIMITS, has_teacher=True, candidates=2)
    for changed, is_possible in ((one, True), (replace(one, candidate_tokens=NAMED), False)):
        with nullcontext() if is_possible else pytest.raises(FrameError, match="candidates for a token that was not"):
            validate_sample(changed, one.prompt_tokens, limits, identity="", newest=one.spans[0].version)


async def test_weights_that_were_never_announced_are_refused_at_once(broker: Broker) -> None:
    run = await begin(broker, rules(1))
    leases = (await run.lease(4, 0)).leases
    assert await run.submit(leases[0], 1000) is SubmitOutcome.FENCED
    (letter,) = (await broker.status.snapshot()).dead_letters
    assert (letter.tid, letter.worker) == (str(leases[0].tid), "w")
    # A few steps ahead of what the server knows may be its own fault: it can have lost its last second.
    assert await run.submit(leases[1], 2) is SubmitOutcome.FENCED
    assert len((await broker.status.snapshot()).dead_letters) == 1
    await run.submit_all(leases[2:], 0)
    await run.generate(2, 0)
    assert await run.take(0) == groups(0, 1)


async def test_a_sample_older_than_it_was_said_to_be_is_not_trained(broker: Broker) -> None:
    run = await begin(broker, rules(0), group_size=1, fed=40)
    await run.generate(2, 0)
    assert await run.take(0) == groups(0, 1)
    await run.announce(1)
    old, other = (await run.lease(2, 1)).leases
    assert await submit_unseen(broker, old, trajectory(old, 0), step=1) is SubmitOutcome.ACCEPTED
    await run.submit(other, 1)
    assert await run.take(1) is None
    (letter,) = (await broker.status.snapshot()).dead_letters
    assert "tokens of step 0 at step 1" in letter.reason


async def test_who_sends_three_pills_gets_no_more_leases(broker: Broker) -> None:
    broker.batches.limits = LIMITS
    run = await begin(broker, rules(1), group_size=4)
    leases = (await run.lease(3, 0, worker="bad")).leases
    for lease in leases:
        await submit_unseen(broker, lease, with_tokens(trajectory(lease, 0), 999_999))
    others = (await run.lease(5, 0, worker="w")).leases
    await run.submit_all(others, 0)
    for _ in range(3):
        assert await run.take(0) is None
        for lease in (await run.lease(8, 0, worker="w")).leases:
            await run.submit(lease, 0)
    assert sorted(await run.take(0) or ()) == groups(0, 1)
    status = await broker.status.snapshot()
    assert (status.quarantined, status.queues.rejected) == (("bad",), 3)
    with pytest.raises(QuarantinedError, match="Worker bad gets no more leases"):
        await run.lease(1, 0, worker="bad")
    assert (await run.lease(1, 0, worker="w")).reason == "capacity"  # an honest worker only hears that none is free


async def test_a_worker_of_the_learner_before_goes_on_after_a_segment_of_the_new_one(broker: Broker) -> None:
    await begin(broker, rules(1))
    resumed = await begin(broker, rules(1), checkpoint=CheckpointMark(1, 0), resume=True)
    await resumed.announce(0)
    (lease,) = (await broker.leases.lease("w", WeightVersion(2, 0), 1, 30)).leases
    segment = as_segment(trajectory(lease, WeightVersion(2, 0)))
    assert (await broker.leases.append(lease, segment, 30)).outcome is AppendOutcome.APPENDED
    await broker.leases.release([lease])
    (again,) = (await resumed.lease(1, 0, worker="v")).leases
    assert (again.tid, len(again.segments)) == (lease.tid, 1)
    assert (await broker.status.snapshot()).dead_letters == ()


async def test_nobody_is_blamed_for_what_was_damaged_on_the_server(broker: Broker) -> None:
    run = await begin(broker, rules(1), group_size=4)
    for _ in range(4):
        await run.generate(8, 0)
        (name,) = [name for name in await broker._connection.scan("*") if ":payload:0000-00000000:0:0:" in name]
        await broker._connection.execute("SETRANGE", name, 40, b"\xff\xff\xff\xff")
        assert await run.take(0) is None
    status = await broker.status.snapshot()
    assert (status.queues.rejected, status.quarantined) == (4, ())
    await run.generate(8, 0)
    assert sorted(await run.take(0) or ()) == groups(0, 1)


@pytest.mark.parametrize("kind", ["vocabulary", "length", "logprob", "no logprob", "version"])
async def test_a_segment_that_cannot_be_gone_on_from_is_discarded(broker: Broker, kind: str) -> None:
    broker.leases.limits = LIMITS
    run = await begin(broker, rules(1))
    (lease,) = (await run.lease(1, 0)).leases
    length = 9 if kind == "length" else 6
    tokens = np.full(length, 151_936 if kind == "vocabulary" else 7, np.int32)
    logprobs = np.full(length, {"logprob": 80, "no logprob": -9999}.get(kind, -1), np.float32)
    version = WeightVersion(1, 0)
    segment = Segment(
        tid=lease.tid,
        index=0,
        start=0,
        tokens=tokens,
        behavior_logprobs=logprobs,
        loss_mask=np.ones(len(tokens), np.uint8),
        spans=(VersionSpan(0, length, version),),
    )
    if kind == "version":
        lying = replace(segment, identity=lease.identity, worker="w", spans=(VersionSpan(0, 6, WeightVersion(1, 7)),))
        frame = encode_segment(lying)
        name, store = broker.leases._blobs.store("segment", lease.tid, "abcdef", frame)
        arguments = (str(lease.tid), lease.token, 0, name, 30, measures_of(frame, segment.spans))
        assert (await broker._connection.script("append", *arguments, before=[store]))[0] == b"appended"
    else:
        await broker.leases.append(lease, segment, 30)
    await broker.leases.release([lease])
    (again,) = (await run.lease(1, 0, worker="v")).leases
    assert (again.tid, again.segments) == (lease.tid, ())
    (letter,) = (await broker.status.snapshot()).dead_letters
    assert letter.worker == "w"
