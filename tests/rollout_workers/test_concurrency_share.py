"""Workers share what a run has under way where their recipe leaves the number of requests open."""

import logging
from pathlib import Path

import pytest

from headway.broker.client.broker import Broker
from headway.deploy.roles.autoscaler import busy_share
from headway.rollout_workers.samples.leased_samples import LEAST_SHARE, ConcurrencyShare

from .loop import GROUP_SIZE, LONG, Deliveries, Learner, make_engine, make_worker, running, until

MAX_LAG, GROUPS_PER_STEP = 8, 2
UNDER_WAY = (MAX_LAG + 1) * GROUPS_PER_STEP * GROUP_SIZE


@pytest.mark.parametrize(
    ("batched", "under_way", "serving", "places"),
    [
        (512, 768, 1, 512),
        (512, 768, 2, 384),
        (512, 768, 5, 154),
        (64, 768, 5, 64),
        (512, 20, 9, LEAST_SHARE),
        (4, 20, 9, 4),
    ],
)
def test_a_worker_takes_its_share(batched: int, under_way: int, serving: int, places: int) -> None:
    shared, unshared = ConcurrencyShare("w", batched, under_way), ConcurrencyShare("w", batched)
    for one in (shared, unshared):
        one.note_workers(serving)
    assert (shared.limit, unshared.limit) == (places, batched)


async def test_a_worker_that_joins_gets_samples_of_one_that_has_them_all(
    brokers: tuple[Broker, Broker], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="headway.rollout_workers.samples.leased_samples")
    learner = await Learner.start(brokers[0], groups=2 * UNDER_WAY, max_lag=MAX_LAG)
    deliveries = Deliveries(), Deliveries()
    first, second = (
        make_worker(
            brokers[1],
            make_engine(tmp_path / str(number), capacity=2 * UNDER_WAY),
            deliveries[number],
            name=f"worker-{number}",
            max_new_tokens=LONG,
            under_way=UNDER_WAY,
        )
        for number in range(2)
    )
    await learner.publish(0, deliveries[0])
    async with running(first):
        await until(lambda: first.info().active == UNDER_WAY)
        assert busy_share([first.info()]) == 0.5, "autoscaling looks at the engine, which has room for as many more"
        async with running(second):
            await learner.publish(1, deliveries[1])
            await until(lambda: second.info().active == GROUPS_PER_STEP * GROUP_SIZE)  # the first has its share
            share = (
                f"takes up to {UNDER_WAY // 2} samples at a time: its engine batches {2 * UNDER_WAY}, and the run has"
            )
            await until(
                lambda: caplog.text.count(f"{share} at most {UNDER_WAY} under way; workers that share them: 2") == 2
            )
