"""A pool of real processes grows and shrinks while its supervisor runs, also when another process asks for it."""

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Literal

import msgspec
import pytest

from headway.broker import BlockingBroker, Broker
from headway.broker.schema import WeightVersion
from headway.broker.schema.status import PoolInfo
from headway.broker.server.embedded import EmbeddedServer
from headway.deploy.launch.base import Command
from headway.deploy.launch.local_launcher import Child, LocalLauncher
from headway.deploy.launch.pool_reports import death_reports, pool_reports
from headway.deploy.launch.process_pool import Pool
from headway.deploy.launch.supervisor import Supervisor
from headway.deploy.recipe.pools import SCORER
from tests.broker.scenario import FRESH, begin, rules
from tests.broker.test_codec import WORKER
from tests.broker.test_scoring import QUALITY, ask, lease
from tests.processes import children_left

from .test_supervisor import FOREVER, drains, role

DEADLINE_S = 240.0


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def workers(directory: Path, script: str | None = None) -> Callable[[int], Command]:
    return lambda number: role(f"w{number}", script or drains(f"w{number}"), directory)


def test_a_pool_grows_and_shrinks(tmp_path: Path) -> None:
    pool, said = Pool("big", 1, workers(tmp_path)), list[str]()
    over = tmp_path / "over"

    def scale() -> None:
        until((tmp_path / "w0.up").exists)
        pool.wanted = 3
        until(lambda: all((tmp_path / f"w{number}.up").exists() for number in range(3)))
        until(lambda: pool.info().running == 3)
        pool.wanted = 1
        until(lambda: set(pool.slots) == {0})
        (tmp_path / "w1.up").unlink()
        pool.wanted = 2
        until((tmp_path / "w1.up").exists)
        over.touch()

    thread = threading.Thread(target=scale)
    thread.start()
    learner = role("learner", f"import os, time\nwhile not os.path.exists({str(over)!r}): time.sleep(0.02)", tmp_path)
    assert Supervisor([pool], learner, say=said.append).run() == 0
    thread.join()
    assert (tmp_path / "w2.ended").exists()
    assert said[:3] == [
        "Pool big: 3 workers wanted, 1 before.",
        "Pool big: 1 worker wanted, 3 before.",
        "Pool big: 2 workers wanted, 1 before.",
    ]
    assert children_left() == []


def test_a_worker_without_a_place_does_not_count_as_running(tmp_path: Path) -> None:
    pool = Pool("big", 2, workers(tmp_path))
    pool.resize(Crowded(), print)
    try:
        assert [slot.is_running for slot in pool.slots.values()] == [True, True]
        assert pool.info().running == 1
    finally:
        for slot in pool.slots.values():
            assert slot.child is not None
            slot.child.kill()


class Crowded(LocalLauncher):
    """A launcher with room for one worker. It starts the others all the same, and reports that they wait."""

    def start(self, command: Command) -> Child:
        return super().start(command) if command.name == "w0" else Waiting(command)


class Waiting(Child):
    def has_place(self) -> bool:
        return False


def test_a_worker_that_left_by_itself_is_replaced_only_when_the_pool_is_scaled(tmp_path: Path) -> None:
    pool = Pool("big", 2, workers(tmp_path, "pass"))
    launcher, said = LocalLauncher(), list[str]()
    pool.resize(launcher, said.append)
    until(lambda: not any(slot.is_running for slot in pool.slots.values()))
    assert list(pool.reap(said.append)) == []
    pool.resize(launcher, said.append)
    assert (pool.has_left, pool.slots) == (True, {})
    pool.wanted = 1
    pool.resize(launcher, said.append)
    assert set(pool.slots) == {0}
    assert not pool.has_left
    until(lambda: not pool.slots[0].is_running)


def test_a_worker_that_does_not_leave_is_killed(tmp_path: Path) -> None:
    deaf = "import pathlib, signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\npathlib.Path('up').touch()\n"
    pool, launcher, said = Pool("big", 1, workers(tmp_path, deaf + FOREVER), 0.1), LocalLauncher(), list[str]()
    pool.resize(launcher, said.append)
    until((tmp_path / "up").exists)
    pool.wanted = 0
    pool.resize(launcher, said.append)

    def is_gone() -> bool:
        assert list(pool.reap(said.append)) == []
        return not pool.slots

    until(is_gone)
    assert said == ["Pool big: 0 workers wanted, 1 before.", "w0 did not leave within 0.1 s and is killed."]
    assert children_left() == []


@pytest.fixture
def claimed(server: EmbeddedServer, run_name: str) -> Iterator[BlockingBroker]:
    """Yield a client of a run that a learner has claimed."""
    client = BlockingBroker(server.url, run_name)
    client.call(begin(client.broker, rules(0)))
    yield client
    client.close()


def test_a_pool_follows_what_is_asked_of_the_broker_and_reports(claimed: BlockingBroker, tmp_path: Path) -> None:
    pool = Pool("big", 1, workers(tmp_path))
    with pool_reports(claimed.broker.url, claimed.broker.run, [pool]):
        until(lambda: claimed.call(claimed.broker.pools.scale("big", "by", 2)) == (1, 3))
        until(lambda: pool.wanted == 3)
        (info,) = claimed.call(claimed.broker.status.snapshot()).pools
        assert (info.pool, info.wanted, info.running) == ("big", 3, 0)


def test_a_pool_tells_which_of_its_processes_work(claimed: BlockingBroker, tmp_path: Path) -> None:
    pool = Pool("big", 2, workers(tmp_path))
    pool.resize(LocalLauncher(), print)

    def report(number: int, state: Literal["starting", "paused", "idle", "generating"]) -> None:
        name = f"host-w{number}-{pool.slots[number].tag}"
        claimed.call(claimed.broker.status.heartbeat(msgspec.structs.replace(WORKER, worker=name, state=state), 60.0))

    def told() -> tuple[int, int]:
        pools = claimed.call(claimed.broker.status.snapshot()).pools
        return (pools[0].running, pools[0].working) if pools else (0, 0)

    with pool_reports(claimed.broker.url, claimed.broker.run, [pool]):
        report(0, "starting")
        report(1, "paused")
        until(lambda: told() == (2, 0))
        report(1, "idle")
        until(lambda: told() == (2, 1))
        report(0, "generating")
        until(lambda: told() == (2, 2))
        report(0, "paused")  # it has worked, and does again
        pool.slots[1].child.kill()  # type: ignore[union-attr]
        until(lambda: told() == (1, 1))
    pool.slots[0].child.kill()  # type: ignore[union-attr]


def test_a_killed_worker_hands_its_leases_back_before_they_expire_and_one_that_left_does_not(
    claimed: BlockingBroker, tmp_path: Path
) -> None:
    pool, launcher = Pool("big", 2, workers(tmp_path)), LocalLauncher()
    url, run = claimed.broker.url, claimed.broker.run
    pool.resize(launcher, print)
    until(lambda: all((tmp_path / f"w{number}.up").exists() for number in range(2)))
    held = [BlockingBroker(url, run, session=slot.session) for slot in pool.slots.values()]
    killed, left = (slot.child for slot in pool.slots.values())
    assert isinstance(killed, Child)
    assert isinstance(left, Child)
    for number, one in enumerate(held):
        assert len(one.call(one.broker.leases.lease(f"w{number}", WeightVersion(1, 0), 1, 1000)).leases) == 1
    with pool_reports(url, run, [pool]):
        os.kill(killed.pid, signal.SIGKILL)
        left.terminate()
        until(lambda: killed.exit_code() is not None and left.exit_code() is not None)
        assert list(pool.reap(print)) == [pool.slots[0]]
        until(lambda: claimed.call(claimed.broker.status.snapshot()).queues.leased == 1)
        until(lambda: not pool.dead)
    assert claimed.call(claimed.broker.leases.report_death(held[1].broker.session)) == 1
    for one in held:
        one.close()


@pytest.mark.parametrize("reporting_in", [pool_reports, death_reports])
def test_a_killed_scorers_requests_go_to_another_before_their_leases_expire(
    server: EmbeddedServer, run_name: str, tmp_path: Path, reporting_in: Callable[..., AbstractContextManager[None]]
) -> None:
    client = BlockingBroker(server.url, run_name)
    client.call(begin(client.broker, rules(0, scorers=QUALITY)))
    pool = Pool("quality", 1, lambda number: replace(workers(tmp_path)(number), role=SCORER))
    pool.resize(LocalLauncher(), print)
    until((tmp_path / "w0.up").exists)
    scorer = BlockingBroker(server.url, run_name, session=pool.slots[0].session)
    names = client.call(ask(client.broker, 2))
    assert len(scorer.call(lease(scorer.broker))) == 2
    assert client.call(lease(client.broker)) == []
    child = pool.slots[0].child
    assert isinstance(child, Child)
    with reporting_in(server.url, run_name, [pool]):
        os.kill(child.pid, signal.SIGKILL)
        until(lambda: child.exit_code() is not None)
        assert list(pool.reap(print)) == [pool.slots[0]]
        until(lambda: not pool.dead)
    assert [one.name for one in client.call(lease(client.broker))] == names
    scorer.close()
    client.close()


def test_a_worker_that_does_not_leave_in_time_hands_back_what_it_held_as_its_supervisor_ends(
    claimed: BlockingBroker, tmp_path: Path
) -> None:
    deaf = "import pathlib, signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\npathlib.Path('up').touch()\n"
    pool = Pool("big", 1, workers(tmp_path, deaf + FOREVER), 0.1)
    url, run = claimed.broker.url, claimed.broker.run

    def stop() -> None:
        until((tmp_path / "up").exists)
        held = BlockingBroker(url, run, session=pool.slots[0].session)
        held.call(held.broker.leases.lease("w0", WeightVersion(1, 0), 1, 1000))
        held.close()
        os.kill(os.getpid(), signal.SIGTERM)

    stopper = threading.Thread(target=stop)
    with pool_reports(url, run, [pool]):
        until(lambda: bool(claimed.call(claimed.broker.status.snapshot()).pools))
        stopper.start()
        Supervisor([pool], say=print).run()
    stopper.join()
    queues = claimed.call(claimed.broker.status.snapshot()).queues
    assert (queues.leased, queues.expired_leases) == (0, 1)


def test_a_pool_whose_name_another_supervisor_has_reports_once_it_is_free(
    claimed: BlockingBroker, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headway.deploy.launch.pool_reports.TTL_S", 1.0)
    info, broker = PoolInfo(pool="big", host="other", pid=1, running=1), claimed.broker
    assert claimed.call(broker.pools.report(info, 5, 6.0)) == 5
    pool = Pool("big", 1, workers(tmp_path))
    with pool_reports(broker.url, broker.run, [pool]):
        until(lambda: "Another supervisor runs a pool 'big'" in caplog.text)
        until(lambda: [one.host for one in claimed.call(broker.status.snapshot()).pools] == [socket.gethostname()])
        assert claimed.call(broker.pools.scale("big", "to", 2)) == (1, 2)
        until(lambda: pool.wanted == 2)
    assert caplog.text.count("Another supervisor") == 1


def test_a_name_that_a_supervisor_which_has_ended_still_has_is_waited_for_without_a_word(
    claimed: BlockingBroker, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    info, broker = PoolInfo(pool="big", host="other", pid=1, running=1), claimed.broker
    assert claimed.call(broker.pools.report(info, 5, 1.5)) == 5
    with pool_reports(broker.url, broker.run, [Pool("big", 1, workers(tmp_path))]):
        until(lambda: [one.host for one in claimed.call(broker.status.snapshot()).pools] == [socket.gethostname()])
    assert "Another supervisor" not in caplog.text


def test_workers_alone_end_with_their_run_though_none_is_wanted(claimed: BlockingBroker, tmp_path: Path) -> None:
    pool = Pool("big", 1, workers(tmp_path))
    pool.wanted = 0
    with pool_reports(claimed.broker.url, claimed.broker.run, [pool]):
        until(lambda: bool(claimed.call(claimed.broker.status.snapshot()).pools))
        assert not pool.has_left
        claimed.call(finish(claimed.broker))
        until(lambda: pool.has_left)


def test_a_pool_that_begins_without_workers_waits_to_be_scaled(tmp_path: Path) -> None:
    pool, said = Pool("big", 0, workers(tmp_path, "pass")), list[str]()
    assert not pool.has_left
    pool.wanted = 1
    assert Supervisor([pool], say=said.append).run() == 0
    assert said == ["Pool big: 1 worker wanted, 0 before."]


async def finish(broker: Broker) -> None:
    claim = await broker.batches.claim(checkpoint=FRESH, rules=rules(0), config=b"recipe", resume=True)
    await broker.status.set_state(claim.owner, "finished")
