# mypy: disable-error-code="misc"
"""A hostile worker hands in no sample that is another's, too old, or not there, and no junk holds up the learner."""

import asyncio
from contextlib import suppress

import numpy as np
import pytest
from redis.exceptions import RedisError

from headway.broker.client.evaluations import EvaluationResult
from headway.broker.client.leases import SubmitOutcome, parse_tid
from headway.broker.schema import Lease, Segment, VersionSpan, WeightVersion
from headway.broker.wire.codec import encode_segment

from .audit import Auditor
from .hostile import Cast, measures
from .renewal import renew
from .scenario import prompt
from .test_codec import WORKER


async def leased_by_honest(cast: Cast) -> tuple[Lease, bytes]:
    """Return a sample that the hostile worker held before, and its token."""
    (member, token, *_), *_ = cast.hostile.lease(1)
    await asyncio.sleep(0.6)
    leases = (await cast.honest.lease(4, 0, ttl_s=30)).leases
    return next(lease for lease in leases if str(lease.tid) == member.decode()), token


async def test_it_hands_in_no_sample_that_another_one_holds(cast: Cast) -> None:
    lease, late = await leased_by_honest(cast)
    proofless = f"{'a' * 16}.{'b' * 8}.{'c' * 24}".encode()
    for token in (late, proofless, b"x", b""):
        name = f"payload:{lease.tid}:{token.decode()}"
        if token:
            cast.hostile.store(name, b"junk")
        for again in (0, 1):
            with suppress(RedisError):
                said = (str(lease.tid), token, "", measures(4, 1, 0, 4))
                assert cast.hostile.call("submit", again, *said) == [b"fenced"]
            if token:
                cast.hostile.store(name, b"junk")
    for verb, arguments in {"release": [], "discard": [-1, "x", "x"], "mark_lost": ["x", "x"]}.items():
        assert cast.hostile.call(verb, str(lease.tid), late, *arguments) == 0
    assert cast.hostile.renew([str(lease.tid).encode(), late]) == [late]
    assert await renew(cast.worker, [lease]) == set()
    assert await cast.honest.submit(lease, 0) is SubmitOutcome.ACCEPTED


async def test_it_hands_in_no_evaluation_sample_that_another_one_holds(cast: Cast) -> None:
    version = WeightVersion(1, 0)
    await cast.learner.evaluations.ask(cast.run.owner, version, [prompt(100), prompt(101)], 1)
    await cast.worker.status.heartbeat(WORKER, 30)
    (lease,) = (await cast.worker.evaluations.lease("w", version, 1, 30)).leases
    _, _, (other, token, _) = cast.hostile.call("evaluation_lease", "1.0", 9, 1e9, "abc", "evil 1", "")
    assert other != lease.sample
    for tokens in (token, b"x", b""):
        said = ["1.0", lease.sample, tokens, "1.0", "1.0", 1, 1.0, 1, "evil 1"]
        assert cast.hostile.call("evaluation_submit", *said) == b"fenced"
        assert cast.hostile.call("evaluation_release", "1.0", lease.sample, tokens) == 0
        assert cast.hostile.call("evaluation_lease", "1.0", 9, 30, "abc", "evil 1", "", lease.sample, tokens) == [
            2,
            [0],
        ]
    for place, junk in ((1, -1), (1, "x"), (5, 2), (6, "nan"), (6, "inf"), (6, "1e999999"), (6, "x" * 99), (7, -1)):
        said = ["1.0", other, token, "1.0", "1.0", 1, 1.0, 1, "evil 1"]
        said[place] = junk
        with pytest.raises(RedisError, match="ARGUMENT"):
            cast.hostile.call("evaluation_submit", *said)
    assert await cast.worker.evaluations.submit(lease, EvaluationResult(True, 1.0, 3), [version]) == "accepted"
    progress = await cast.learner.evaluations.progress(cast.run.owner, version)
    assert progress is not None
    assert (progress.samples, progress.done) == (2, 1)


async def test_it_names_no_blob_but_its_own(cast: Cast) -> None:
    """The function frees or keeps a blob by the name in a submission, whichever client stored it."""
    (lease,) = (await cast.honest.lease(1, 0, ttl_s=30)).leases
    assert await cast.honest.submit(lease, 0) is SubmitOutcome.ACCEPTED
    theirs = f"payload:{lease.tid}:{lease.token}"
    (member, token, *_), *_ = cast.hostile.lease(1)
    for name in (theirs, "manifest:announced", f"segment:{member.decode()}:x\n", f"3/{theirs}"):
        with pytest.raises(RedisError, match="ARGUMENT"):
            cast.hostile.call("append", member, token, 0, name, 1, measures(9, 1, 0, 1))
    _, _, number = member.decode().rpartition(":")
    for said, shard in ((f"{number}:{lease.token}", ""), ("", ""), (token, "3"), (token, "x/"), (token, "3/x:")):
        with pytest.raises(RedisError, match="ARGUMENT"):
            cast.hostile.call("submit", 0, member, said, shard, measures(9, 1, 0, 4))
    assert cast.hostile.client.exists(cast.hostile.prefix + theirs) == 1


async def test_its_measures_are_numbers_in_bounds(cast: Cast) -> None:
    (member, token, *_), *_ = cast.hostile.lease(1)
    usual, large = (9, 1, 0, 4), 1 << 31
    wrong = [b"", measures(9), measures(9, 1, 0), measures(*usual)[:-1], measures(0, 1, 0, 4), b"x" * 90_004]
    wrong += [measures(*usual[:place], large, *usual[place + 1 :]) for place in range(len(usual))]
    wrong += [measures(9, 1, 0, large - 1, 1, 1, 1), measures(*usual, 1)]
    for packed in wrong:
        with pytest.raises(RedisError, match="ARGUMENT"):
            cast.hostile.call("submit", 0, member, token, "", packed)
        with pytest.raises(RedisError, match="ARGUMENT"):
            cast.hostile.call("append", member, token, 0, f"segment:{member.decode()}:1", 1, packed)


async def test_a_name_that_is_no_text_does_not_hold_up_the_learner(cast: Cast) -> None:
    """The learner frees blobs on other shards, by the names that workers gave them."""
    for member in (b"\xff:0:0", b"x\ny:0:0"):
        said = (member, b"t", "3/", measures(9, 1, 0, 4))
        assert cast.hostile.call("submit", 0, *said) == [b"fenced"]
        assert cast.hostile.call("append", member, b"t", 0, b"3/segment:" + member + b":1", 1, said[-1])[0] == b"fenced"
    await cast.honest.generate(4, 0)
    assert await cast.run.take(0) is not None
    assert await cast.learner.batches.commit(cast.run.owner, 1) > 0
    assert await cast.learner.batches.commit(cast.run.owner, 1) == 0


async def test_it_says_no_size_that_is_not(cast: Cast) -> None:
    (member, token, *_), *_ = cast.hostile.lease(1)
    name = f"payload:{member.decode()}:{token.decode()}"
    cast.hostile.store(name, b"junk")
    assert cast.hostile.call("submit", 0, member, token, "", measures(1 << 30, 1, 0, 4)) == [b"no payload"]
    assert (await cast.learner.status.snapshot()).queues.payload_bytes == 0


async def test_a_prompt_that_is_whole_is_not_lost(cast: Cast) -> None:
    (member, token, *_), *_ = cast.hostile.lease(1)
    (lease,) = (await cast.honest.lease(1, 0, ttl_s=30)).leases
    assert lease.tid.group == member.decode().split(":")[0]
    assert cast.hostile.call("mark_lost", member, token, "damaged", b"") == 0
    assert await cast.honest.submit(lease, 0) is SubmitOutcome.ACCEPTED


async def test_segments_are_of_whoever_appended_them(cast: Cast) -> None:
    """The text of the frame and the reader of the segment do not change that."""
    leased, *_ = cast.hostile.lease(1)
    assert cast.hostile.append(leased, 0, 0) == b"appended"
    assert cast.hostile.call("release", *leased) == 1
    taken = (await cast.honest.lease(1, 0, worker=WORKER.worker)).leases
    assert [str(lease.tid).encode() for lease in taken] == [leased[0]]
    assert taken[0].segments == ()
    other, *_ = cast.hostile.lease(1)
    with pytest.raises(RedisError, match="ARGUMENT"):
        cast.hostile.call("discard", *other, WORKER.worker, "x", b"")
    cast.hostile.call("discard", *other, -1, "x", b"")
    letters = (await cast.learner.status.snapshot()).dead_letters
    assert [letter.worker for letter in letters] == ["evil", "evil"]


async def later(cast: Cast, step: int) -> None:
    """Bring the run to this step, with nothing under way."""
    for number in range(step):
        while await cast.run.take(number) is None:
            assert (await cast.honest.generate(4, number)).leases
        await cast.learner.batches.commit(cast.run.owner, number + 1)
        await cast.run.announce(number + 1)


@pytest.mark.parametrize("way", ["submit", "append"])
async def test_its_sample_is_no_older_than_the_weights_that_it_leased_for(cast: Cast, way: str) -> None:
    """Otherwise the whole group, with the samples of others, would be too old to be trained."""
    await later(cast, 3)
    for number in range(3):
        leased, *_ = cast.hostile.lease(1, step=3)
        hand_in = cast.hostile.submit if way == "submit" else cast.hostile.append
        assert hand_in(leased, 2, 3) == b"fenced"
        (mine,) = (await cast.honest.lease(1, 3)).leases
        assert str(mine.tid).encode() == leased[0]
        assert await cast.honest.submit(mine, 3) is SubmitOutcome.ACCEPTED
        assert (await cast.learner.status.snapshot()).queues.rejected == number + 1
    status = await cast.learner.status.snapshot()
    assert status.quarantined == ("evil",)
    assert "step 2" in status.dead_letters[-1].reason
    with pytest.raises(ValueError, match="not enough values"):
        (_,) = cast.hostile.lease(1, step=3)


async def test_it_submits_nothing_again_that_is_too_old_to_be_trained(cast: Cast, auditor: Auditor) -> None:
    """The submission looks as if the server had forgotten the lease: it has expired, and its weights are unknown."""
    await later(cast, 3)
    auditor.redis.hset(auditor.keys.hidden("meta"), "max_lag", 1)
    first, second = cast.hostile.lease(2, step=3)
    for leased, oldest, outcome in ((first, 1, b"fenced"), (second, 2, b"accepted")):
        member, token = leased[0].decode(), leased[1].decode()
        assert cast.hostile.call("release", member, token) == 1
        cast.hostile.store(f"payload:{member}:{token}", b"junk")
        said = (member, token, "", measures(4, 1, oldest, 1, 1, 3, 0))
        assert cast.hostile.call("submit", 1, *said) == [outcome]


async def test_nobody_is_blamed_for_going_on_after_an_older_segment_than_it_was_said_to_be(cast: Cast) -> None:
    await later(cast, 3)
    leased, *_ = cast.hostile.lease(1, step=3)
    tid = parse_tid(leased[0])
    old = Segment(
        tid=tid,
        index=0,
        start=0,
        tokens=np.full(6, 7, np.int32),
        behavior_logprobs=np.full(6, -1, np.float32),
        loss_mask=np.ones(6, np.uint8),
        spans=(VersionSpan(0, 6, WeightVersion(1, 0)),),
        identity=cast.hostile.identity,
    )
    assert cast.hostile.append(leased, 3, 3, frame=encode_segment(old)) == b"appended"
    assert cast.hostile.call("release", *leased[:2]) == 1
    (mine,) = (await cast.honest.lease(1, 3)).leases
    assert (mine.tid, mine.segments) == (tid, ())
    assert await cast.honest.submit(mine, 3) is SubmitOutcome.ACCEPTED


async def test_a_segment_that_is_named_again_stays(cast: Cast, auditor: Auditor) -> None:
    (leased,) = cast.hostile.lease(1)
    member, token = leased[0].decode(), leased[1].decode()
    name = f"segment:{member}:1"
    cast.hostile.store(name, b"junk")
    said = (name, 30, measures(4, 1, 0, 6))
    assert cast.hostile.call("append", member, token, 0, *said) == [b"appended", 1]
    for shown, index, outcome in ((token, 5, [b"out of order", 1]), ("late", 0, [b"fenced", 0])):
        assert cast.hostile.call("append", member, shown, index, *said) == outcome
        auditor.look().check()
