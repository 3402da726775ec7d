"""Each evaluation sample gets one result, of the wanted version alone, whichever worker dies; none of it is trained."""

import asyncio
from collections.abc import Sequence

import msgspec
import pytest

from headway.broker import Broker
from headway.broker.client.evaluations import EvaluationLease, EvaluationOutcome, EvaluationProgress, EvaluationResult
from headway.broker.client.learner import CheckpointMark
from headway.broker.errors import FencedError, QuarantinedError
from headway.broker.schema import WeightVersion

from .audit import Auditor
from .scenario import Scenario, begin, prompt, rules
from .test_codec import WORKER

LONG_S, A_MOMENT_S = 1000.0, 0.05
V0, V1 = WeightVersion(1, 0), WeightVersion(1, 1)
HELD_OUT = [prompt(900 + n) for n in range(3)]
PASSED = EvaluationResult(True, 1.25, 7, {"exact": 1.25, "a b/\u00e9": -0.5})


@pytest.fixture
async def run(broker: Broker) -> Scenario:
    return await begin(broker, rules(1), fed=4)


async def leased(
    broker: Broker, count: int, worker: str = "w", version: WeightVersion = V0, ttl_s: float = LONG_S
) -> tuple[EvaluationLease, ...]:
    return (await broker.evaluations.lease(worker, version, count, ttl_s)).leases


async def submit_all(broker: Broker, leases: Sequence[EvaluationLease], result: EvaluationResult = PASSED) -> None:
    for lease in leases:
        assert await broker.evaluations.submit(lease, result, [lease.version]) is EvaluationOutcome.ACCEPTED


async def look(run: Scenario, version: WeightVersion = V0) -> EvaluationProgress:
    progress = await run.broker.evaluations.progress(run.owner, version)
    assert progress is not None
    return progress


async def test_every_sample_is_sampled_once_and_told_once_all_are_done(
    broker: Broker, run: Scenario, auditor: Auditor
) -> None:
    await broker.evaluations.ask(run.owner, V0, HELD_OUT, 2)
    leases = await leased(broker, 9)
    assert [lease.sample for lease in leases] == [0, 1, 2, 3, 4, 5]
    assert [lease.prompt for lease in leases] == [prompt for prompt in HELD_OUT for _ in range(2)]
    assert await leased(broker, 9, "other") == ()
    await submit_all(broker, leases[:5])
    progress = await look(run)
    assert (progress.samples, progress.done, progress.results) == (6, 5, ())
    failed = EvaluationResult(passed=False, reward=-0.1, response_tokens=3)
    await submit_all(broker, leases[5:], failed)
    auditor.look().check()
    progress = await look(run)
    assert (progress.done, progress.mixed, progress.results) == (6, 0, (*[PASSED] * 5, failed))
    assert (await broker.evaluations.lease("w", V0, 9, LONG_S)).left == 0
    await broker.evaluations.end(run.owner, V0)
    await broker.evaluations.end(run.owner, V0)
    assert await broker.evaluations.progress(run.owner, V0) is None
    assert (await broker.evaluations.lease("w", V0, 9, LONG_S)).left is None
    assert auditor.look().evaluations == {}
    auditor.look().check()


async def test_one_without_a_result_is_counted_once_and_one_with_a_result_never(broker: Broker, run: Scenario) -> None:
    for version in (V0, V1):
        await broker.evaluations.ask(run.owner, version, HELD_OUT, 1)
    for _ in range(2):  # a learner whose first call got no reply asks twice
        await broker.evaluations.end(run.owner, V0, is_skipped=True)
    assert (await broker.evaluations.lease("w", V0, 9, LONG_S)).left is None
    await broker.evaluations.end(run.owner, V1)
    assert (await run.queues()).skipped_evaluations == 1


async def test_training_counts_nothing_of_it(broker: Broker, run: Scenario) -> None:
    before, tallies = await run.queues(), (await broker.status.snapshot()).tallies
    await broker.evaluations.ask(run.owner, V0, HELD_OUT, 1)
    leases = await leased(broker, 2)
    assert await run.queues() == before
    await submit_all(broker, leases)
    assert await run.queues() == before
    assert (await broker.status.snapshot()).tallies == tallies
    assert len((await run.lease(99, 0)).leases) == 8


async def test_to_ask_again_changes_nothing(broker: Broker, run: Scenario, auditor: Auditor) -> None:
    await broker.evaluations.ask(run.owner, V0, HELD_OUT, 1)
    first, *others = await leased(broker, 2)
    await submit_all(broker, [first])
    await broker.evaluations.ask(run.owner, V0, HELD_OUT, 1)
    auditor.look().check()
    assert [lease.sample for lease in await leased(broker, 9)] == [2]
    await submit_all(broker, others)
    assert (await look(run)).done == 2


async def test_many_prompts_are_asked_for(broker: Broker, run: Scenario, auditor: Auditor) -> None:
    many = [prompt(1000 + n) for n in range(250)]
    await broker.evaluations.ask(run.owner, V0, many, 1)
    assert {lease.sample: lease.prompt for lease in await leased(broker, 1000)} == dict(enumerate(many))
    auditor.look().check()
    await broker.evaluations.end(run.owner, V0)
    auditor.look().check()


async def test_only_a_worker_with_the_version_gets_samples(broker: Broker, run: Scenario) -> None:
    await broker.evaluations.ask(run.owner, V1, HELD_OUT, 1)
    assert (await broker.evaluations.lease("w", V0, 9, LONG_S)).left is None
    assert len(await leased(broker, 9, version=V1)) == 3


async def test_two_versions_are_evaluated_beside_each_other(broker: Broker, run: Scenario, auditor: Auditor) -> None:
    for version in (V0, V1):
        await broker.evaluations.ask(run.owner, version, HELD_OUT, 1)
    await submit_all(broker, await leased(broker, 9, version=V1))
    assert ((await look(run, V0)).done, (await look(run, V1)).done) == (0, 3)
    await broker.evaluations.end(run.owner, V1)
    auditor.look().check()
    assert len(await leased(broker, 9)) == 3


async def test_a_sample_of_other_weights_does_not_count(broker: Broker, run: Scenario, auditor: Auditor) -> None:
    await broker.evaluations.ask(run.owner, V0, HELD_OUT, 1)
    for versions in ([V1], [V0, V1]):
        lease, *_ = await leased(broker, 1)
        assert await broker.evaluations.submit(lease, PASSED, versions) is EvaluationOutcome.OTHER_VERSION
        auditor.look().check()
        assert await broker.evaluations.submit(lease, PASSED, [V0]) is EvaluationOutcome.FENCED
    progress = await look(run)
    assert (progress.done, progress.mixed) == (0, 2)
    assert len(await leased(broker, 9)) == 3


async def test_a_lost_workers_samples_go_to_another(broker: Broker, other: Broker, run: Scenario) -> None:
    await broker.evaluations.ask(run.owner, V0, HELD_OUT, 1)
    lost = await leased(broker, 2, ttl_s=A_MOMENT_S)
    async with asyncio.timeout(240):
        while len(found := await leased(other, 9, "v")) < 2:  # noqa: ASYNC110 - the server announces nothing
            await asyncio.sleep(0.01)
    assert {lease.sample for lease in lost} <= {lease.sample for lease in found} | {2}
    reply = await broker.evaluations.lease("w", V0, 0, LONG_S, lost)
    assert reply.lost == {lease.sample for lease in lost}
    assert await broker.evaluations.submit(lost[0], PASSED, [V0]) is EvaluationOutcome.FENCED
    await broker.evaluations.release(lost)
    (mine,) = [lease for lease in found if lease.sample == lost[0].sample]
    await submit_all(other, [mine])
    assert await other.evaluations.submit(mine, PASSED, [V0]) is EvaluationOutcome.DUPLICATE
    assert (await look(run)).done == 1


async def test_a_dead_processs_samples_go_to_another_at_once(broker: Broker, other: Broker, run: Scenario) -> None:
    await broker.evaluations.ask(run.owner, V0, HELD_OUT, 2)
    dead, mine = await leased(other, 2, "dead"), await leased(broker, 1)
    assert await broker.leases.report_death(other.session) == 2
    assert {lease.sample for lease in await leased(broker, 2, "heir")} == {lease.sample for lease in dead}
    assert (await broker.evaluations.lease("w", V0, 0, LONG_S, mine)).lost == frozenset()
    assert (await look(run)).done == 0


async def test_a_late_result_counts_where_nobody_else_has_the_sample(broker: Broker, run: Scenario) -> None:
    await broker.evaluations.ask(run.owner, V0, HELD_OUT, 1)
    (late,) = await leased(broker, 1, ttl_s=0)
    await submit_all(broker, [late])
    assert [lease.sample for lease in await leased(broker, 9)] == [1, 2]


async def test_a_lease_that_is_renewed_stays(broker: Broker, other: Broker, run: Scenario) -> None:
    await broker.evaluations.ask(run.owner, V0, HELD_OUT, 1)
    held = await leased(broker, 3, ttl_s=0)
    assert (await broker.evaluations.lease("w", V0, 0, LONG_S, held)).lost == frozenset()
    assert await leased(other, 9, "v") == ()
    await broker.evaluations.release(held[:2])
    assert [lease.sample for lease in await leased(other, 9, "v")] == [0, 1]


async def test_each_of_the_serving_workers_gets_its_share(broker: Broker, run: Scenario) -> None:
    for worker in ("w", "v"):
        await broker.status.heartbeat(msgspec.structs.replace(WORKER, worker=worker), LONG_S)
    await broker.evaluations.ask(run.owner, V0, HELD_OUT, 1)
    mine = await leased(broker, 9)
    assert len(mine) == 2
    assert (await broker.evaluations.lease("w", V0, 9, LONG_S, mine)).leases == ()
    await submit_all(broker, mine)
    assert len(await leased(broker, 9)) == 1  # no other worker came


async def test_it_is_known_for_how_long_nobody_has_asked(broker: Broker, run: Scenario, auditor: Auditor) -> None:
    await broker.evaluations.ask(run.owner, V0, HELD_OUT, 1)
    auditor.redis.hset(auditor.keys.hidden("evaluation:1.0"), "seen", 1.0)
    assert (await look(run)).quiet_s > LONG_S
    await leased(broker, 1)
    assert (await look(run)).quiet_s < LONG_S


async def test_a_new_learner_finds_no_evaluation(broker: Broker, run: Scenario, auditor: Auditor) -> None:
    await broker.evaluations.ask(run.owner, V0, HELD_OUT, 2)
    held = await leased(broker, 2)
    claim = await broker.batches.claim(checkpoint=CheckpointMark(1, 0), rules=rules(1), config=b"", resume=True)
    assert (await broker.evaluations.lease("w", V0, 1, LONG_S, held)).left is None
    assert await broker.evaluations.submit(held[0], PASSED, [V0]) is EvaluationOutcome.FENCED
    with pytest.raises(FencedError):
        await broker.evaluations.ask(run.owner, V0, HELD_OUT, 2)
    assert await broker.evaluations.progress(claim.owner, V0) is None
    auditor.look().check()


async def test_a_quarantined_worker_gets_none(broker: Broker, run: Scenario) -> None:
    await broker.status.heartbeat(WORKER, LONG_S)
    assert await broker.status.exclude(WORKER.worker, "quarantine")
    with pytest.raises(QuarantinedError):
        await broker.leases.lease(WORKER.worker, V0, 1, LONG_S)
    await broker.evaluations.ask(run.owner, V0, HELD_OUT, 1)
    assert (await broker.evaluations.lease(WORKER.worker, V0, 9, LONG_S)).left is None


async def test_measures_that_are_too_many_or_no_numbers_cost_no_result(broker: Broker, run: Scenario) -> None:
    await broker.evaluations.ask(run.owner, V0, HELD_OUT, 1)
    first, second, third = await leased(broker, 9)
    many = EvaluationResult(True, 1.0, 7, {f"measure {n}": 1.0 for n in range(5000)})
    await submit_all(broker, (first,), many)
    await submit_all(broker, (second,))
    said = (str(V0), third.sample, third.token, str(V0), str(V0), 1, "1.0", 7)
    holder = broker.evaluations._holder("w")
    assert await broker._connection.script("evaluation_submit", *said, holder, b'{"x": "evil"}') == b"accepted"
    bounded, *others = [result.components for result in (await look(run)).results]
    assert others == [PASSED.components, {}]
    assert list(bounded) == list(many.components)[: len(bounded)]
    assert 500 < len(bounded) < 5000


async def test_there_is_none_before_a_learner_has_claimed_the_run(broker: Broker) -> None:
    assert (await broker.evaluations.lease("w", V0, 9, LONG_S)).left is None
    await broker.evaluations.release([EvaluationLease(V0, 0, "x", HELD_OUT[0], "w")])


async def test_a_worker_that_obeys_another_recipe_gets_no_samples(run: Scenario) -> None:
    await run.broker.evaluations.ask(run.owner, V0, HELD_OUT, 1)
    run.broker.leases.obey(b"another one")
    reply = await run.broker.evaluations.lease("w", V0, 9, LONG_S)
    assert (reply.left, reply.leases) == (3, ())
    run.broker.leases.obey(b"recipe")
    assert len(await leased(run.broker, 9)) == 3
