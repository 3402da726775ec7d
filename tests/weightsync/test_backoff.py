"""The sender leaves members alone that are all there and do not connect."""

import types

import pytest

from headway.broker import BlockingBroker
from headway.broker.errors import WeightSyncError
from headway.broker.schema import WeightVersion
from headway.broker.schema.weights import BroadcastGroup
from headway.weightsync import limits, sender
from headway.weightsync.config import WeightsConfig
from headway.weightsync.sender import Sender
from headway.weightsync.transports.rendezvous import BlockingStore, Rendezvous
from tests.weightsync.worker_process import HEARTBEAT_TTL_S, worker_info

LOCAL = "127.0.0.1"
V0, V1 = WeightVersion(1, 0), WeightVersion(1, 1)


@pytest.mark.slow
def test_members_that_do_not_connect_are_left_alone_ever_longer(
    blocking_store: BlockingStore, blocking: BlockingBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This happens between hosts that the broker's network connects, and NCCL's does not."""
    now, attempts = [0], list[int]()
    monkeypatch.setattr(limits, "time", types.SimpleNamespace(monotonic=lambda: float(now[0])))

    def put_group(put: BroadcastGroup) -> None:
        for worker in put.members:
            assert Rendezvous(blocking_store, put, worker).check_in()

    def no_way(*_: object) -> None:
        attempts.append(now[0])
        raise WeightSyncError("no way there")

    monkeypatch.setattr(sender, "form_group", no_way)
    sending = Sender(blocking_store, 1, 0, LOCAL, WeightsConfig(broadcast_timeout_s=50), put_group)
    workers = [worker_info("w", V0, 0)]
    for now[0] in range(0, 2000, 10):
        epoch, why = sending.prepare(lambda: workers, V1)
        assert epoch == 0
    assert attempts == [0, 0, 100, 300, 700, 1300, 1900]
    assert why == "no way there; workers pull, and it is tried again in 510 s"
    workers.append(worker_info("another", V0, 0))
    blocking.call(blocking.broker.status.heartbeat(workers[-1], HEARTBEAT_TTL_S))
    assert sending.prepare(lambda: workers, V1)[1].startswith("no way there; no way there")
    assert attempts[-2:] == [1990, 1990]
    sending.close()
