# mypy: disable-error-code="union-attr"
"""A hostile worker keeps no sample from the others, however many it leases and under however many names."""

import asyncio
import itertools
import random
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from msgspec.structs import replace
from redis.exceptions import ResponseError

from headway.broker.client.evaluations import EvaluationLease, EvaluationResult
from headway.broker.client.leases import AppendOutcome, SubmitOutcome
from headway.broker.schema import Lease, WeightVersion
from headway.broker.server.embedded import EmbeddedServer

from .audit import Auditor
from .hostile import Cast, Hostile
from .renewal import renew
from .scenario import manifest, prompt
from .test_access import segment
from .test_codec import WORKER

OTHERS_RESULT = ("1.0", "1.0", 0, -1.0, 1, "evil 1")


async def test_it_keeps_no_evaluation_sample_for_itself(cast: Cast, auditor: Auditor) -> None:
    """It renews the leases of all of them, but other workers get copies, and the learner sees no progress."""
    version, keep_s = WeightVersion(1, 0), 1.0
    await cast.worker.status.heartbeat(WORKER, 30)
    await cast.learner.evaluations.ask(cast.run.owner, version, [prompt(100), prompt(101)], 2, keep_s)
    held: list[Any] = []
    for _ in range(4):
        held += cast.hostile.call("evaluation_lease", "1.0", 9, 30, "abc", "evil 1", "")[2:]
    mine = tuple[EvaluationLease, ...]()
    async with asyncio.timeout(240):
        while len(mine) < 4:
            await asyncio.sleep(0.05)
            said = [part for sample, token, _ in held for part in (sample, token)]
            assert cast.hostile.call("evaluation_lease", "1.0", 9, 30, "abc", "evil 1", "", *said)[1] == []
            mine += (await cast.worker.evaluations.lease(WORKER.worker, version, 9, 30, mine)).leases
        while (await cast.learner.evaluations.progress(cast.run.owner, version)).quiet_s < 2 * keep_s:
            await asyncio.sleep(0.05)
            cast.hostile.call("evaluation_lease", "1.0", 9, 30, "abc", f"evil {random.getrandbits(32)}", "", *said)
    assert sorted(lease.sample for lease in mine) == [0, 1, 2, 3]
    assert not {lease.token for lease in mine} & {token.decode() for _, token, _ in held}
    (sample, token, _), *_ = held
    assert cast.hostile.call("evaluation_submit", "1.0", sample, mine[0].token, *OTHERS_RESULT) == b"fenced"
    for lease in mine:
        assert await cast.worker.evaluations.submit(lease, EvaluationResult(True, 1.0, 3), [version]) == "accepted"
        assert await cast.worker.evaluations.submit(lease, EvaluationResult(True, 1.0, 3), [version]) == "duplicate"
    assert cast.hostile.call("evaluation_submit", "1.0", sample, token, *OTHERS_RESULT) == b"fenced"
    auditor.look().check()
    progress = await cast.learner.evaluations.progress(cast.run.owner, version)
    assert [result.reward for result in progress.results] == [1.0] * 4


async def test_it_holds_no_lease_for_ever(server: EmbeddedServer, cast: Cast, auditor: Auditor) -> None:
    auditor.redis.hset(auditor.keys.hidden("meta"), "lease_hold_s", 1.0)
    (member, token, *_), *_ = cast.hostile.lease(1, ttl_s=1e9)
    lost: list[bytes] = []
    async with asyncio.timeout(240):
        while not lost:
            await asyncio.sleep(0.1)
            lost = cast.hostile.renew([member, token], 1e9)
        while member.decode() not in [str(lease.tid) for lease in await leases_of(cast)]:  # noqa: ASYNC110
            await asyncio.sleep(0.1)


async def leases_of(cast: Cast) -> tuple[Lease, ...]:
    return (await cast.honest.lease(8, 0, ttl_s=30)).leases


async def hoard(hostile: Hostile, names: Iterator[int], last_step: list[int], *, answers: bool) -> None:
    """Lease all samples under a new name each time, and let no lease expire.

    The worker reports progress by segments without tokens, or hands in samples that cannot be trained.
    """
    held: list[list[bytes]] = []
    while True:
        name = next(names)
        leased = await asyncio.to_thread(hostile.lease, 1000, 30, step=last_step[0], holder=f"evil{name} {name}")
        held += [one for one in leased if not one[1].startswith(b"copy")]
        for one in leased if answers else ():
            with suppress(ResponseError):
                await asyncio.to_thread(hostile.submit, one, last_step[0], last_step[0])
        for one in held[-100:] if not answers else ():
            with suppress(ResponseError):
                await asyncio.to_thread(hostile.append, one, last_step[0], last_step[0], tokens=0)
                await asyncio.to_thread(hostile.renew, one)
        await asyncio.sleep(0.02)


@pytest.mark.parametrize("answers", [False, True], ids=["nothing", "pills"])
async def test_it_may_lease_all_samples_under_ever_new_names_and_the_learner_goes_on(cast: Cast, answers: bool) -> None:
    """The honest worker also gets the samples that the hostile one holds, and the first trainable sample wins."""
    run, last_step = cast.run, [0]
    await cast.worker.status.heartbeat(replace(WORKER, worker="w"), 120)
    await cast.honest.generate(4, 0)  # trained samples give a worker standing
    assert await run.take(0) is not None
    await cast.learner.versions.announce(run.owner, manifest(1, 1))
    last_step[0] = 1
    attack = asyncio.create_task(hoard(cast.hostile, itertools.count(), last_step, answers=answers))
    try:
        async with asyncio.timeout(240):
            await asyncio.sleep(0.3)
            for step in (1, 2, 3):
                while await run.take(step) is None:
                    await asyncio.sleep(0.1)  # the hostile one is always faster
                    leases = (await cast.honest.lease(4, step)).leases
                    await asyncio.sleep(0.1)
                    for lease in leases:
                        await cast.honest.submit(lease, step)
                    assert not attack.done()
                last_step[0] = step + 1
                await cast.learner.versions.announce(run.owner, manifest(1, step + 1))
    finally:
        attack.cancel()
        with suppress(asyncio.CancelledError):
            await attack


async def test_a_worker_that_was_killed_bars_nobody_from_a_sample_that_was_refused(cast: Cast) -> None:
    """Otherwise the learner would wait for two minutes once all workers have been replaced by others."""
    run, honest = cast.run, cast.honest
    await cast.worker.status.heartbeat(replace(WORKER, worker="w"), 1.0)
    await honest.generate(4, 0)
    assert await run.take(0) is not None
    await cast.learner.versions.announce(run.owner, manifest(1, 1))
    (pill,) = cast.hostile.lease(1, step=1)
    assert cast.hostile.submit(pill, 1, 1) == b"accepted"
    await honest.generate(3, 1)
    assert await run.take(1) is None
    (lease,) = (await honest.lease(1, 1, "new")).leases
    assert await honest.submit(lease, 1) is SubmitOutcome.FENCED, "its holder has no standing, and one that has lives"
    await asyncio.sleep(1.1)
    (lease,) = (await honest.lease(1, 1, "new")).leases
    assert await honest.submit(lease, 1) is SubmitOutcome.ACCEPTED
    assert await run.take(1) is not None


async def test_a_copy_is_given_only_of_a_sample_that_does_not_get_on(cast: Cast) -> None:
    honest, run = cast.honest, cast.run
    mine = (await honest.lease(24, 0, "a")).leases
    assert len(mine) == 24  # the run has no others
    assert await run.take(0) is None
    await asyncio.sleep(1.2)  # the learner waits for longer than a lease lasts; a holder stores tokens
    await renew(cast.worker, mine)
    for lease in mine[1:]:
        assert (await cast.worker.leases.append(lease, segment(lease, 0), 30)).outcome is AppendOutcome.APPENDED
    (copy,) = (await honest.lease(4, 0, "b")).leases
    assert copy.tid == mine[0].tid
    assert (await honest.queues()).copied_leases == 1
    assert (await honest.lease(4, 0, "b")).leases == ()
    assert await honest.submit(copy, 0) is SubmitOutcome.ACCEPTED
    assert await renew(cast.worker, mine) == {mine[0].token}
    assert await honest.submit(mine[0], 0) is SubmitOutcome.FENCED


async def test_strikes_of_copies_end_their_holder(cast: Cast) -> None:
    mine = (await cast.honest.lease(24, 0, "a")).leases
    assert await cast.run.take(0) is None
    await asyncio.sleep(1.2)
    await renew(cast.worker, mine)
    copies = cast.hostile.lease(3)
    assert len(copies) == 3
    assert [cast.hostile.submit(one, 0, 1000) for one in copies] == [b"fenced"] * 3
    assert cast.hostile.call("lease", 1, 0, 1, 30, "a", "evil 1", "", 0)[1] == b"quarantined"
