"""A broadcast supersedes pulls that are under way."""

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from headway.broker.schema import WeightVersion
from headway.broker.schema.weights import WeightManifest
from headway.weightsync.deliveries import Delivery
from headway.weightsync.limits import Deadline
from tests.weightsync.conftest import CONFIG, PATIENCE_S, InProcessWorker, Learner, pull_then_receive

StartInside = Callable[[str], InProcessWorker]
HOLD_S = 0.3


@pytest.fixture
def patient_learner(url: str, run_name: str) -> Iterator[Learner]:
    started = Learner(url, run_name, replace(CONFIG, broadcast_timeout_s=20))
    yield started
    started.close()


async def pulling_again(
    learner: Learner, worker: InProcessWorker, pull: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bring a group's member to the point where its engine has lost the version and is to pull it by `pull`."""
    await pull_then_receive(learner, worker)
    monkeypatch.setattr(worker.subscriber._background_puller._puller, "pull", pull)
    worker.version = None


async def test_a_broadcast_lands_in_the_memory_of_the_pull_that_it_supersedes(
    patient_learner: Learner, start_inside: StartInside, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner, worker = patient_learner, start_inside("w")
    landing = worker.subscriber._landing
    take, has_begun, receive_takes, pulled_into = landing.take, threading.Event(), threading.Event(), list[int]()

    def pull_until_stopped(manifest: WeightManifest, deadline: Deadline, buckets: Sequence[torch.Tensor]) -> None:
        pulled_into.extend(bucket.data_ptr() for bucket in buckets)
        has_begun.set()
        while not deadline.is_over():
            deadline.pause(PATIENCE_S)
        receive_takes.wait(HOLD_S)  # the pull is in the middle of a chunk
        deadline.check("pull")

    def noted_take(sizes: Sequence[int]) -> Any:
        if threading.current_thread().name == "weights-receive":
            receive_takes.set()
        return take(sizes)

    await pulling_again(learner, worker, pull_until_stopped, monkeypatch)
    monkeypatch.setattr(landing, "take", noted_take)
    waiting = asyncio.create_task(worker.next())
    assert await asyncio.to_thread(has_begun.wait, PATIENCE_S)
    assert (await asyncio.to_thread(learner.publish)).members == ("w",)
    assert await waiting == WeightVersion(1, 2)
    lent = worker.subscriber._inbox._lent
    assert isinstance(lent, Delivery)
    assert [bucket.data_ptr() for bucket in lent.landed.buckets] == pulled_into


async def test_a_pull_that_hangs_holds_up_no_broadcast_and_is_not_joined_by_another(
    learner: Learner, start_inside: StartInside, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = start_inside("w")
    puller = worker.subscriber._background_puller._puller
    pull, hangs, may_end, under_way = puller.pull, threading.Event(), threading.Event(), list[int]()

    def pull_late(*arguments: Any) -> Any:
        under_way.append(1)
        assert len(under_way) == 1
        try:
            hangs.set()
            assert may_end.wait(PATIENCE_S)
            return pull(*arguments)
        finally:
            under_way.pop()

    await pulling_again(learner, worker, pull_late, monkeypatch)
    waiting = asyncio.create_task(worker.next())
    try:
        assert await asyncio.to_thread(hangs.wait, PATIENCE_S)
        assert (await asyncio.to_thread(learner.publish)).members == ("w",)
        assert await waiting == WeightVersion(1, 2)
        worker.version = None
        waiting = asyncio.create_task(worker.next())
        await asyncio.sleep(3 * CONFIG.poll_s)  # the worker has looked, and would pull
    finally:
        may_end.set()
    assert await waiting == WeightVersion(1, 2)
    assert not worker.subscriber.last_error
