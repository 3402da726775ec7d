"""A supervisor compares the workers of its own pool by their reports; reports of other processes count for nothing."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from headway.broker import BlockingBroker, Broker
from headway.broker.schema import WeightVersion
from headway.deploy.launch.local_launcher import LocalLauncher
from headway.deploy.launch.pool_reports import PoolHealth
from headway.deploy.launch.process_pool import Pool, Slot
from headway.rollout_workers.config import WorkersConfig
from tests.broker.scenario import begin, rules

from .runs import worker
from .test_supervisor import FOREVER, role

WINDOW_S = 0.5


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    pool = Pool("workers", 3, lambda number: role(f"w-{number}", FOREVER, tmp_path))
    pool.resize(LocalLauncher(), print)
    yield pool
    for slot in pool.slots.values():
        assert slot.child is not None
        slot.child.kill()


@pytest.fixture
async def client(broker: Broker, url: str, run_name: str) -> BlockingBroker:
    await begin(broker, rules(1))
    return BlockingBroker(url, run_name)


def judge_of(**settings: float) -> PoolHealth:
    """Return a judge that has just read the run's configuration."""
    judge = PoolHealth()
    judge._config = WorkersConfig(slow_window_s=WINDOW_S, **settings)  # type: ignore[arg-type]
    judge._config_s = time.monotonic()
    return judge


def name_of(slot: Slot) -> str:
    return f"host-{slot.command.name}-{slot.tag}"


def report(client: BlockingBroker, name: str, tokens: int, busy_s: float) -> None:
    info = replace(worker(name, WeightVersion(1, 0)), generated_tokens=tokens, busy_s=busy_s, slot_s=4 * busy_s)
    client.call(client.broker.status.heartbeat(info, 60.0))


def judge_until(judge: PoolHealth, client: BlockingBroker, pool: Pool, reports: Callable[[int], None]) -> None:
    """Report and look until some slot has a verdict, or for three windows."""
    began, second = time.monotonic(), 0
    while time.monotonic() < began + 3 * WINDOW_S and not any(slot.verdict for slot in pool.slots.values()):
        second += 1
        reports(second)
        judge.look(client, [pool])
        time.sleep(0.02)


async def test_the_slow_worker_of_a_pool_is_named_with_its_figures(client: BlockingBroker, pool: Pool) -> None:
    paces = {name_of(slot): 100 if number != 1 else 10 for number, slot in pool.slots.items()}

    def reports(second: int) -> None:
        for name, pace in paces.items():
            report(client, name, pace * second, float(second))

    judge_until(judge_of(), client, pool, reports)
    verdicts = {number: slot.verdict.rule for number, slot in pool.slots.items() if slot.verdict is not None}
    assert verdicts == {1: "slow"}
    (fault,) = client.call(client.broker.status.snapshot()).faults
    assert (fault.worker, fault.rule) == (name_of(pool.slots[1]), "slow")
    assert "it generates 2.5 tokens/s and request, 10% of the median 25 of the 3 busy workers" in fault.reason
    client.close()


async def test_nobody_else_can_have_a_worker_set_aside(client: BlockingBroker, pool: Pool) -> None:
    """Another process reports as a worker of this pool that is slow, and as a fast one among its peers."""

    def reports(second: int) -> None:
        for number, slot in pool.slots.items():
            report(client, name_of(slot), 100 * second, float(second))
            report(client, f"zz-{slot.command.name}-{slot.tag}", second, float(second))
            report(client, f"aa-w-{number}-00000000", 10**6 * second, float(second))

    for slot in pool.slots.values():
        report(client, name_of(slot), 0, 0.0)
    judge = judge_of()
    judge.look(client, [pool])
    assert [slot.worker for slot in pool.slots.values()] == [name_of(slot) for slot in pool.slots.values()]
    judge_until(judge, client, pool, reports)
    assert not any(slot.verdict for slot in pool.slots.values())
    client.close()


async def test_a_worker_that_has_reported_and_does_not_any_more_is_silent(client: BlockingBroker, pool: Pool) -> None:
    silent = name_of(pool.slots[0])
    report(client, silent, 0, 0.0)
    judge = judge_of(stall_s=0.3)
    judge.look(client, [pool])
    client.call(client.broker.status.leave(silent))
    judge_until(judge, client, pool, lambda second: None)
    verdicts = {number: slot.verdict.rule for number, slot in pool.slots.items() if slot.verdict is not None}
    assert verdicts == {0: "silent"}, "those that have never reported still start"
    client.close()
