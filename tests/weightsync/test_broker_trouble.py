"""A broker that does not answer one worker costs no broadcast, although the others of its group would wait for it."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from headway.broker.errors import BrokerError, BrokerUnavailableError
from headway.broker.schema import WeightVersion
from tests.weightsync.conftest import (
    CONFIG,
    PATIENCE_S,
    InProcessWorker,
    Learner,
    WorkerProcess,
    pull_then_receive,
    served_bytes,
    weights,
)

StartInside = Callable[[str], InProcessWorker]
StartWorker = Callable[[str], WorkerProcess]


class FailsOnce:
    """A verb of one worker's client, with one failure."""

    def __init__(
        self,
        worker: InProcessWorker,
        verb: str,
        error: BrokerError,
        monkeypatch: pytest.MonkeyPatch,
        is_due: Callable[[], bool] = lambda: True,
    ) -> None:
        versions = worker._broker.versions
        self._verb = getattr(versions, verb)
        self._failures = [error]
        self._is_due = is_due
        self.was_repeated = threading.Event()
        monkeypatch.setattr(versions, verb, self)

    async def __call__(self) -> Any:
        if self._failures and self._is_due():
            raise self._failures.pop()
        if not self._failures:
            self.was_repeated.set()
        return await self._verb()


@pytest.fixture
def patient_learner(url: str, run_name: str) -> Iterator[Learner]:
    started = Learner(url, run_name, replace(CONFIG, broadcast_timeout_s=20))
    yield started
    started.close()


def is_receiving() -> bool:
    return any(thread.name == "weights-receive" for thread in threading.enumerate())


async def test_a_broadcast_under_way_goes_on(
    patient_learner: Learner, start_inside: StartInside, start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner, worker, other = patient_learner, start_inside("w"), start_worker("other")
    for members in [(), ("other", "w")]:
        assert (await asyncio.to_thread(learner.publish)).members == members
        await worker.next()
        await asyncio.to_thread(learner.until_held, "other", "w")
    served = served_bytes(learner)
    look = FailsOnce(worker, "peek", BrokerUnavailableError("away"), monkeypatch, is_receiving)

    def interrupted(seed: int) -> Iterator[tuple[str, torch.Tensor]]:
        first, *rest = weights(seed)
        yield first
        assert look.was_repeated.wait(PATIENCE_S)
        yield from rest

    monkeypatch.setattr(learner, "weights", interrupted)
    publishing = asyncio.create_task(asyncio.to_thread(learner.publish))
    with pytest.raises(BrokerUnavailableError):
        await worker.next()
    waiting = asyncio.create_task(worker.next())
    report = await publishing
    assert (report.members, report.failed) == (("other", "w"), "")
    assert await waiting == WeightVersion(1, 2)
    assert served == []
    await asyncio.to_thread(other.expect, learner.version)


@pytest.mark.parametrize("verb", ["peek", "group"])
async def test_a_worker_that_is_busy_with_its_engine_goes_on_listening(
    learner: Learner, start_inside: StartInside, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    worker = start_inside("w")
    await pull_then_receive(learner, worker)
    failing = FailsOnce(worker, verb, BrokerUnavailableError("away"), monkeypatch)
    worker.subscriber._groups._read = None  # looks like a new group
    assert await asyncio.to_thread(failing.was_repeated.wait, PATIENCE_S)
    assert (await asyncio.to_thread(learner.publish)).members == ("w",)
    assert await worker.next() == WeightVersion(1, 2)  # the worker hears nothing of an outage that is over


@pytest.mark.parametrize("verb", ["offered", "announced"])
async def test_an_offer_that_could_not_be_read_is_read_again(
    learner: Learner, start_inside: StartInside, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    worker = start_inside("w")
    await pull_then_receive(learner, worker)
    worker.subscriber._last_manifest = None  # so it needs the announced version's manifest
    failing = FailsOnce(worker, verb, BrokerUnavailableError("away"), monkeypatch)
    assert (await asyncio.to_thread(learner.publish)).members == ("w",)
    assert failing.was_repeated.is_set()
    assert await worker.next() == WeightVersion(1, 2)


async def test_what_does_not_pass_by_itself_is_raised(
    learner: Learner, start_inside: StartInside, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = start_inside("w")
    await asyncio.to_thread(learner.publish)
    FailsOnce(worker, "peek", BrokerError("no server of ours"), monkeypatch)
    with pytest.raises(BrokerError, match="no server of ours"):
        await worker.next()
    assert await worker.next() == WeightVersion(1, 0)
