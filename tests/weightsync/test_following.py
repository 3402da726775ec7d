"""Workers that follow by pull take deltas where there are some, and whole versions where anything is wrong."""

import asyncio
import math
import threading
from collections.abc import Callable

import pytest
import torch
from msgspec.structs import replace

from headway.broker import Broker
from headway.broker.errors import WeightSyncError
from headway.broker.schema import WeightVersion
from headway.broker.schema.weights import WeightManifest
from headway.weightsync.limits import Deadline
from headway.weightsync.puller import Puller, PullResult
from headway.weightsync.tensors import deltas as deltas_module
from headway.weightsync.tensors.buckets import views
from headway.weightsync.tensors.staging import stage
from headway.weightsync.transports.http_pull import HttpPull
from tests.weightsync.conftest import (
    CONFIG,
    TIMEOUT_S,
    InProcessWorker,
    Learner,
    WorkerProcess,
    announced,
    served_bytes,
    weights,
)
from tests.weightsync.worker_process import HEARTBEAT_TTL_S, fingerprint, worker_info

PULLING = replace(CONFIG, follow="pull")
WHOLE_BYTES = stage(weights(0), CONFIG.bucket_bytes).nbytes
BUCKETS = len(stage(weights(0), CONFIG.bucket_bytes).buckets)
DELTA_BYTES = WHOLE_BYTES // 5
"""More bytes than any delta between neighbours has."""


class Follower:
    """Pulls when the test says so, so that it can miss versions."""

    def __init__(self, broker: Broker, learner: Learner) -> None:
        self._broker = broker
        self._served = served_bytes(learner)
        self._puller = Puller(HttpPull(TIMEOUT_S), keeps_base=True)
        self.nbytes = 0
        """The bytes that the last pull got from the learner."""

    async def pull(self) -> PullResult:
        """Pull the announced version, and assert that its tensors are right."""
        manifest = await announced(self._broker)
        self._served.clear()
        pulled = await asyncio.to_thread(self._puller.pull, manifest, Deadline(math.inf))
        self.nbytes = sum(self._served)
        found = views(manifest.tensors, pulled.buckets)
        assert fingerprint(found) == fingerprint(weights(manifest.version.step))
        info = worker_info("far", manifest.version, 0, joins_groups=False)
        await self._broker.status.heartbeat(info, HEARTBEAT_TTL_S)
        return pulled


async def publish(learner: Learner, count: int = 1) -> None:
    for _ in range(count):
        await asyncio.to_thread(learner.publish)


@pytest.fixture
async def follower(learner: Learner, broker: Broker) -> Follower:
    """Return a follower that holds the learner's first two versions, the second by a delta."""
    started = Follower(broker, learner)
    for deltas in (0, 1):
        await publish(learner)
        assert (await started.pull()).deltas == deltas
    assert started.nbytes < DELTA_BYTES
    return started


@pytest.mark.slow
def test_a_process_follows_twenty_versions(learner: Learner, start_worker: Callable[..., WorkerProcess]) -> None:
    sizes = served_bytes(learner)
    near, far = start_worker("near"), start_worker("far", "pull")
    learner.publish()
    for worker in (near, far):
        worker.expect(learner.version)
    assert sum(sizes) == 2 * WHOLE_BYTES
    learner.until_held("near", "far")
    for _ in range(20):
        sizes.clear()
        report = learner.publish()
        assert (report.members, report.failed) == (("near",), "")
        near.expect(learner.version)
        (event,) = far.events(learner.version)
        assert event["last_error"] == ""
        assert 0 < sum(sizes) < DELTA_BYTES
        learner.until_held("near", "far")


async def test_a_worker_that_joins_groups_costs_the_learner_no_deltas(
    learner: Learner, broker: Broker, start_inside: Callable[..., InProcessWorker]
) -> None:
    worker = start_inside("near")
    for _ in range(3):
        await publish(learner)
        await worker.next()
    assert (await announced(broker)).deltas == ()


async def test_the_group_has_its_buckets_before_deltas_are_encoded(
    learner: Learner,
    follower: Follower,
    start_inside: Callable[..., InProcessWorker],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    await start_inside("near").next()
    order: list[str] = []
    for owner, name in ((learner.publisher._sender, "send"), (deltas_module, "encode")):
        _note_calls(monkeypatch, owner, name, order)
    assert (await asyncio.to_thread(learner.publish)).members == ("near",)
    assert order == ["send", "encode"]


def _note_calls(monkeypatch: pytest.MonkeyPatch, owner: object, name: str, order: list[str]) -> None:
    call = getattr(owner, name)

    def noted(*arguments: object) -> object:
        order.append(name)
        return call(*arguments)

    monkeypatch.setattr(owner, name, noted)


async def test_deltas_are_served_by_the_time_they_are_announced(learner: Learner, follower: Follower) -> None:
    learner.publisher._pull_server.keep_only = lambda *_: None  # type: ignore[method-assign]  # it follows the announcement
    await publish(learner)
    assert (await follower.pull()).deltas == 1


async def test_who_missed_some_versions_takes_the_chain(learner: Learner, follower: Follower) -> None:
    await publish(learner, 3)
    assert (await follower.pull()).deltas == 3
    assert follower.nbytes < 3 * DELTA_BYTES


async def test_who_missed_more_than_the_chain_has_takes_all(
    url: str, run_name: str, broker: Broker, follower: Follower, learner: Learner
) -> None:
    await asyncio.to_thread(learner.publisher.close)
    short = await asyncio.to_thread(Learner, url, run_name, replace(CONFIG, delta_chain=2), resume=True)
    try:
        for deltas, missed in ((0, 0), (1, 0), (2, 1), (0, 2), (1, 0)):
            await publish(short, 1 + missed)
            pulled = await follower.pull()
            assert (pulled.deltas, pulled.failure) == (deltas, "")
        assert len((await announced(broker)).deltas) == 2
    finally:
        await asyncio.to_thread(short.close)


async def test_a_new_incarnation_starts_anew(
    learner: Learner, url: str, run_name: str, broker: Broker, follower: Follower
) -> None:
    successor = await asyncio.to_thread(Learner, url, run_name, resume=True)
    try:
        await publish(successor)
        assert (await announced(broker)).deltas == ()
        assert (await follower.pull()).deltas == 0
        await publish(successor)
        assert [delta.base for delta in (await announced(broker)).deltas] == [WeightVersion(2, 0)]
        assert (await follower.pull()).deltas == 1
    finally:
        await asyncio.to_thread(successor.close)


async def test_a_delta_that_was_not_ready_in_time_is_left_out(
    learner: Learner, broker: Broker, follower: Follower, monkeypatch: pytest.MonkeyPatch
) -> None:
    def late(*_: object) -> None:
        raise WeightSyncError("not done within 2 s")

    monkeypatch.setattr(deltas_module, "encode", late)
    await publish(learner)
    assert (await announced(broker)).deltas == ()
    assert (await follower.pull()).deltas == 0
    monkeypatch.undo()
    await publish(learner)
    assert (await follower.pull()).deltas == 1


async def test_a_damaged_delta_falls_back_to_the_whole_version(
    learner: Learner, start_inside: Callable[..., InProcessWorker], caplog: pytest.LogCaptureFixture
) -> None:
    worker = start_inside("far", PULLING)
    for _ in range(2):
        await publish(learner)
        await worker.next()
    damaged = _damage_next_delta(learner)
    await publish(learner)
    await worker.next()
    assert damaged.is_set()
    assert "deltas were of no use, all of it was fetched: the delta to" in worker.subscriber.last_error
    assert "arrived damaged" in caplog.text
    sizes = served_bytes(learner)
    await publish(learner)
    await worker.next()
    assert worker.subscriber.last_error == ""
    assert 0 < sum(sizes) < DELTA_BYTES


def _damage_next_delta(learner: Learner) -> threading.Event:
    """Flip one bit of the next delta, on the way into the server."""
    pulls, damaged = learner.publisher._pull_server, threading.Event()
    serve_deltas, keep_only = pulls.serve_deltas, pulls.keep_only

    def spoil(deltas: dict[WeightVersion, bytes]) -> dict[WeightVersion, bytes]:
        damaged.set()
        newest = max(deltas)
        return {**deltas, newest: bytes([deltas[newest][0] ^ 1]) + deltas[newest][1:]}

    def keep(version: WeightVersion, deltas: dict[WeightVersion, bytes]) -> None:
        keep_only(version, spoil(deltas))
        del pulls.serve_deltas, pulls.keep_only

    pulls.serve_deltas = lambda deltas: serve_deltas(spoil(dict(deltas)))  # type: ignore[method-assign]
    pulls.keep_only = keep  # type: ignore[method-assign,assignment]
    return damaged


async def test_a_spoilt_base_is_found_by_the_result(learner: Learner, follower: Follower) -> None:
    await publish(learner)
    held = await follower.pull()
    held.buckets[1][5] ^= 64  # stands for an engine that writes into its tensors
    await publish(learner)
    pulled = await follower.pull()
    assert pulled.deltas == 0
    assert "bucket 1 arrived damaged" in pulled.failure
    assert WHOLE_BYTES < follower.nbytes < WHOLE_BYTES + DELTA_BYTES
    await publish(learner)
    assert (await follower.pull()).deltas == 1


async def test_a_joiner_whose_line_is_slower_than_the_learner_arrives(learner: Learner, broker: Broker) -> None:
    class SlowPull(HttpPull):
        def pull_bucket(self, manifest: WeightManifest, index: int, bucket: torch.Tensor, deadline: Deadline) -> None:
            super().pull_bucket(manifest, index, bucket, deadline)
            learner.publish()

    sizes = served_bytes(learner)
    await publish(learner)
    await broker.status.heartbeat(worker_info("far", None, 0, joins_groups=False), HEARTBEAT_TTL_S)
    puller = Puller(SlowPull(TIMEOUT_S), keeps_base=True)
    for deltas in (0, BUCKETS):
        manifest = await announced(broker)
        pulled = await asyncio.to_thread(puller.pull, manifest, Deadline(math.inf))
        assert pulled.deltas == deltas
        assert fingerprint(views(manifest.tensors, pulled.buckets)) == fingerprint(weights(manifest.version.step))
    assert WHOLE_BYTES < sum(sizes) < WHOLE_BYTES + BUCKETS * DELTA_BYTES


async def test_deltas_of_a_superseded_version_are_still_served(
    learner: Learner, broker: Broker, follower: Follower
) -> None:
    await publish(learner)
    earlier = await announced(broker)
    await publish(learner)
    pulled = await asyncio.to_thread(follower._puller.pull, earlier, Deadline(math.inf))
    assert (pulled.deltas, pulled.failure) == (1, "")
    assert (await follower.pull()).deltas == 1
