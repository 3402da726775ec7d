"""A worker gets the newest versions only, in whichever way a transfer goes wrong."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from headway.broker import Broker
from headway.broker.errors import BrokerUnavailableError, FencedError, VersionRegressionError
from headway.broker.schema import WeightVersion
from headway.broker.schema.weights import BroadcastGroup, Probe, WeightManifest
from headway.weightsync import puller
from tests.weightsync.conftest import CONFIG, InProcessWorker, Learner, pull_then_receive, served_bytes, weights
from tests.weightsync.interruptions import damaged_bucket
from tests.weightsync.worker_process import HEARTBEAT_TTL_S, worker_info

StartInside = Callable[..., InProcessWorker]


async def test_a_newcomer_pulls_then_receives(learner: Learner, start_inside: StartInside) -> None:
    worker = start_inside("w")
    assert (await asyncio.to_thread(learner.publish)).members == ()
    assert await worker.next() == WeightVersion(1, 0)
    assert (await asyncio.to_thread(learner.publish)).members == ("w",)
    assert await worker.next() == WeightVersion(1, 1)
    assert worker.subscriber.epoch == learner.epoch() > 0


async def test_a_newcomer_whose_pull_outlasts_a_step_gets_a_version(
    learner: Learner, start_inside: StartInside, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(puller, "AT_ONCE", 1)  # otherwise all buckets would be on their way at once
    worker = start_inside("w", replace(CONFIG, pull_bytes_per_s=200_000))  # the pull takes more than a second
    await asyncio.to_thread(learner.publish)
    first = asyncio.create_task(worker.next())
    while not first.done():
        await asyncio.to_thread(learner.publish)
        await asyncio.sleep(0.1)
    assert await first < learner.version
    assert (await asyncio.to_thread(learner.publish)).members == ("w",)


async def test_receiving_does_not_wait_for_the_engine(learner: Learner, start_inside: StartInside) -> None:
    worker = start_inside("w")
    await asyncio.to_thread(learner.publish)
    await worker.next()
    for _ in range(3):  # the worker is busy with its engine all the while
        assert (await asyncio.to_thread(learner.publish)).members == ("w",)
    assert await worker.next() == WeightVersion(1, 3)


async def test_a_cancelled_wait_loses_nothing(learner: Learner, start_inside: StartInside) -> None:
    worker = start_inside("w")
    for _ in range(2):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(worker.subscriber.wait_for_version(None), 0.1)
    await asyncio.to_thread(learner.publish)
    assert await worker.next() == WeightVersion(1, 0)


async def test_a_version_that_the_engine_did_not_take_comes_again(learner: Learner, start_inside: StartInside) -> None:
    worker = start_inside("w")
    await asyncio.to_thread(learner.publish)
    await worker.next()
    worker.version = None
    assert await worker.next() == WeightVersion(1, 0)


async def test_a_version_that_the_engine_has_lost_is_not_pulled_again(
    learner: Learner, start_inside: StartInside
) -> None:
    worker = start_inside("w")
    for step in range(3):
        await asyncio.to_thread(learner.publish)
        assert await worker.next() == WeightVersion(1, step)
        served = served_bytes(learner)
        for _ in range(2):
            await lose(worker)
            assert await worker.next() == WeightVersion(1, step)
        assert served == []


async def test_it_is_once_another_one_was_received_in_its_place(
    learner: Learner, start_inside: StartInside, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, served = start_inside("w"), served_bytes(learner)
    await asyncio.to_thread(learner.publish)
    await worker.next()
    once = sum(served)
    waiting = asyncio.create_task(worker.next())

    async def fail(manifest: WeightManifest) -> None:
        raise BrokerUnavailableError("away")

    monkeypatch.setattr(learner.publisher._versions, "announce", lambda owner, manifest: fail(manifest))
    with damaged_bucket(1), pytest.raises(BrokerUnavailableError):
        await asyncio.to_thread(learner.publish)
    await worker.until_error("broadcast of 1.1")
    waiting.cancel()
    worker.version = None
    assert await worker.next() == WeightVersion(1, 0)
    assert sum(served) == 2 * once


async def lose(worker: InProcessWorker) -> None:
    """Lose the held version: the worker reports this when it waits for the next one."""
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(worker.subscriber.wait_for_version(worker.version), 0.1)
    worker.version = None


async def test_regressions_are_refused(learner: Learner, start_inside: StartInside) -> None:
    worker = start_inside("w")
    await asyncio.to_thread(learner.publish_as, WeightVersion(1, 5))
    assert await worker.next() == WeightVersion(1, 5)
    for step in (4, 5):
        with pytest.raises(VersionRegressionError):
            await asyncio.to_thread(learner.publish_as, WeightVersion(1, step))
    await asyncio.to_thread(learner.publish_as, WeightVersion(1, 6))
    assert await worker.next() == WeightVersion(1, 6)


async def test_a_superseded_version_is_looked_up_again(
    learner: Learner, broker: Broker, start_inside: StartInside
) -> None:
    await asyncio.to_thread(learner.publish)
    served = await broker.versions.announced()
    assert served is not None
    gone = msgspec.structs.replace(served, version=WeightVersion(1, 1))
    announce = learner.blocking.broker.versions.announce(learner.owner, gone)
    await asyncio.to_thread(learner.blocking.call, announce)
    worker = start_inside("w")
    waiting = asyncio.create_task(worker.next())
    await asyncio.sleep(0.3)
    assert not waiting.done()
    assert worker.subscriber.last_error == ""
    await asyncio.to_thread(learner.publish_as, WeightVersion(1, 2))
    assert await waiting == WeightVersion(1, 2)


async def test_damaged_bytes_are_never_delivered(learner: Learner, start_inside: StartInside) -> None:
    await asyncio.to_thread(learner.publish)
    found = learner.publisher._pull_server.find("/1/0/1")
    assert found is not None
    found.data[5] ^= 64
    worker = start_inside("w")
    waiting = asyncio.create_task(worker.next())
    await worker.until_error("bucket 1 arrived damaged")
    assert not waiting.done()
    found.data[5] ^= 64
    assert await waiting == WeightVersion(1, 0)
    assert worker.subscriber.last_error == ""


async def test_a_joiner_does_not_wait_for_a_running_publication(
    learner: Learner, broker: Broker, start_inside: StartInside
) -> None:
    await asyncio.to_thread(learner.publish)
    ghost = worker_info("ghost", learner.version, 0)  # alive by its heartbeat, but it will not answer
    await broker.status.heartbeat(ghost, HEARTBEAT_TTL_S)
    publishing = asyncio.create_task(asyncio.to_thread(learner.publish))
    await asyncio.sleep(0.2)
    assert await start_inside("w").next() == WeightVersion(1, 0)
    assert not publishing.done()
    report = await publishing
    assert "absent after 2 s: ghost" in report.failed


async def test_a_new_learner_takes_over_running_workers(
    learner: Learner, url: str, run_name: str, start_inside: StartInside
) -> None:
    worker = start_inside("w")
    await pull_then_receive(learner, worker)
    old_epoch = learner.epoch()
    successor = await asyncio.to_thread(Learner, url, run_name, resume=True)
    try:
        # The broadcast group of the first one still stands in the broker, and its workers still listen there.
        report = await asyncio.to_thread(successor.publish)
        assert (report.members, report.failed) == (("w",), "")
        assert successor.epoch() == old_epoch + 1
        assert await worker.next() == WeightVersion(2, 0)
        with pytest.raises((FencedError, VersionRegressionError)):
            await asyncio.to_thread(learner.publish)
        await asyncio.to_thread(successor.publish)
        assert await worker.next() == WeightVersion(2, 1)
    finally:
        await asyncio.to_thread(successor.close)


async def test_the_group_of_a_dead_learner_is_ignored(
    learner: Learner, url: str, run_name: str, start_inside: StartInside
) -> None:
    worker = start_inside("w")
    await pull_then_receive(learner, worker)
    await worker.subscriber.close()
    await asyncio.to_thread(learner.publisher.close)  # its store and its pull server are gone, its records are not
    restarted = start_inside("w")
    waiting = asyncio.create_task(restarted.next())
    await restarted.until_error("pull of 1.1")
    successor = await asyncio.to_thread(Learner, url, run_name, resume=True)
    try:
        await asyncio.to_thread(successor.publish)
        assert await waiting == WeightVersion(2, 0)
        assert (await asyncio.to_thread(successor.publish)).members == ("w",)
    finally:
        await asyncio.to_thread(successor.close)


async def test_closing_leaves_no_threads(learner: Learner, start_inside: StartInside) -> None:
    worker = start_inside("w")
    await pull_then_receive(learner, worker)
    waiting = asyncio.create_task(worker.next())
    await asyncio.sleep(0.1)
    waiting.cancel()
    await worker.subscriber.close()
    await worker.subscriber.close()
    await asyncio.to_thread(learner.publisher.close)
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("weights")] == []


async def test_a_broker_that_fails_once_does_not_end_the_pulls(
    learner: Learner, start_inside: StartInside, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = start_inside("w")
    versions = worker._broker.versions
    announced, failures = versions.announced, [BrokerUnavailableError("away")]

    async def fail_once() -> WeightManifest | None:
        if failures:
            raise failures.pop()
        return await announced()

    monkeypatch.setattr(versions, "announced", fail_once)
    await asyncio.to_thread(learner.publish)
    with pytest.raises(BrokerUnavailableError):
        await worker.next()
    assert await worker.next() == WeightVersion(1, 0)


@pytest.mark.parametrize("verb", ["offer", "announce"])
async def test_a_publication_that_the_broker_did_not_answer_is_repeated(
    learner: Learner, start_inside: StartInside, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    worker = start_inside("w")
    await pull_then_receive(learner, worker)
    versions, version, probe = (
        learner.publisher._versions,
        WeightVersion(1, 2),
        Probe(token_ids=[1], logprobs=[], tolerance=0.0),
    )
    act, failures = getattr(versions, verb), [BrokerUnavailableError("away")]

    async def fail_once(*arguments: Any) -> None:
        if failures:
            raise failures.pop()
        await act(*arguments)

    monkeypatch.setattr(versions, verb, fail_once)
    tensors = iter(weights(2))
    gathering = learner.publisher.gather(tensors)
    with pytest.raises(BrokerUnavailableError):
        await asyncio.to_thread(learner.publisher.publish, version, gathering, probe)
    assert next(tensors, None) is None  # other ranks do not wait for the broker
    report = await asyncio.to_thread(learner.publisher.publish, version, gathering, probe)
    assert (report.members, report.failed) == ((("w",), "") if verb == "offer" else ((), "repeated"))
    assert await worker.next() == version


@pytest.mark.parametrize("has_forgotten", [False, True])
async def test_an_offer_does_not_repeat_what_the_announced_version_says(
    learner: Learner, broker: Broker, start_inside: StartInside, has_forgotten: bool
) -> None:
    worker = start_inside("w")
    await pull_then_receive(learner, worker)
    if has_forgotten:
        worker.subscriber._last_manifest = None
    assert (await asyncio.to_thread(learner.publish)).members == ("w",)
    assert await worker.next() == WeightVersion(1, 2)
    offer, announced = await broker.versions.offered(), await broker.versions.announced()
    assert offer is not None
    assert announced is not None
    assert (offer.tensors, offer.buckets, offer.fingerprints, offer.like) == ((), (), (), WeightVersion(1, 1))
    assert announced.like is None
    assert len(announced.tensors) == len(announced.fingerprints) == len(weights(2))


async def test_a_worker_is_told_of_versions_and_groups(
    learner: Learner, start_inside: StartInside, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker does not poll, and reads the group of many members only where there is a new one."""
    worker, read = start_inside("w", replace(CONFIG, poll_s=3600)), list[int]()
    versions = worker.subscriber._broker.versions
    group = versions.group

    async def noted() -> BroadcastGroup | None:
        read.append(1)
        return await group()

    monkeypatch.setattr(versions, "group", noted)
    await pull_then_receive(learner, worker)
    waiting = asyncio.create_task(worker.next())
    for step in (2, 3):
        assert (await asyncio.to_thread(learner.publish)).members == ("w",)
        assert await waiting == WeightVersion(1, step)
        waiting = asyncio.create_task(worker.next())
    waiting.cancel()
    assert len(read) == 1
