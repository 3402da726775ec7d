"""Reports of workers' faults are bounded in number and size for any writer, and readable with fields added later."""

import msgspec
import pytest

from headway.broker import Broker
from headway.broker.client.supervision import PLACES

from .scenario import begin, rules


async def report(broker: Broker, worker: str, reason: str = "why") -> None:
    await broker.faults.report(worker=worker, host="h", rule="version", reason=reason)


async def test_the_newest_faults_of_workers_are_kept(broker: Broker) -> None:
    await begin(broker, rules(1))
    for number in range(len(PLACES) + 3):
        await report(broker, f"w{number}")
    await report(broker, "w7", "again")
    faults = (await broker.status.snapshot()).faults
    assert sorted(fault.worker for fault in faults) == sorted(f"w{number}" for number in range(3, len(PLACES) + 3))
    assert (faults[-1].worker, faults[-1].reason) == ("w7", "again")


@pytest.mark.parametrize(
    "said", [b"", b"\xff", b"[]", b'{"worker": "no name", "host": "", "rule": "", "reason": "", "at": 0}', b"[" * 9000]
)
async def test_what_cannot_be_read_is_passed_over_and_written_over(broker: Broker, said: bytes) -> None:
    await begin(broker, rules(1))
    keys = broker._connection.keys
    for place in PLACES:
        await broker._connection.execute("SET", keys(f"fault:{place}"), said)
    assert (await broker.status.snapshot()).faults == ()
    await report(broker, "w", "\udcff" * 5000)
    (fault,) = (await broker.status.snapshot()).faults
    assert fault.worker == "w"


async def test_a_fault_of_a_later_version_is_read(broker: Broker) -> None:
    await begin(broker, rules(1))
    later = {"worker": "w", "host": "h", "rule": "new", "reason": "why", "at": 1.0, "more": [1]}
    await broker._connection.execute("SET", broker._connection.keys("fault:0"), msgspec.json.encode(later))
    assert [fault.rule for fault in (await broker.status.snapshot()).faults] == ["new"]
