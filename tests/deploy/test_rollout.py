"""A worker notices that a learner has taken its run over with another configuration."""

import asyncio
from typing import Any

import pytest

from headway.broker import Broker
from headway.broker.client.learner import CheckpointMark
from headway.broker.client.leases import NoMoreLeases
from headway.broker.errors import ConfigError
from headway.broker.schema import RunRules
from headway.deploy.recipe.recipe import Recipe, RunConfig
from headway.deploy.recipe.resolve import recipe_to_bytes
from headway.deploy.roles import config_watch
from headway.deploy.roles import worker as rollout
from headway.learner.algorithm_config import AlgorithmConfig
from headway.learner.config import LearnerConfig, PromptsConfig
from headway.rollout_workers.config import RewardConfig, SamplingConfig
from tests.broker.scenario import begin, rules

A_MOMENT_S = 0.02


def stored(*, steps: int = 4, max_new_tokens: int = 8, router_replay: bool = False) -> bytes:
    return recipe_to_bytes(
        Recipe(
            run=RunConfig(name="r"),
            prompts=PromptsConfig(kind="arithmetic"),
            rewards=(RewardConfig(kind="arithmetic"),),
            learner=LearnerConfig(steps=steps),
            sampling=SamplingConfig(max_new_tokens=max_new_tokens),
            algorithm=AlgorithmConfig(router_replay=router_replay),
        )
    )


async def claim(broker: Broker, config: bytes) -> None:
    rules = RunRules(max_lag=1, groups_per_step=1)
    await broker.batches.claim(checkpoint=CheckpointMark(0, 0), rules=rules, config=config, resume=True)


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_watch, "CONFIG_CHECK_S", A_MOMENT_S)


async def work(broker: Broker) -> None:
    """Work as a worker that began with the default configuration, until it is asked to drain."""
    drain = asyncio.Event()
    async with config_watch.drained_when_changed(broker, stored(), drain, rollout._workers_part), asyncio.timeout(240):
        await drain.wait()


@pytest.mark.parametrize("change", [{"max_new_tokens": 9}, {"router_replay": True}])
async def test_a_worker_of_another_configuration_is_drained_and_fails(broker: Broker, change: dict[str, Any]) -> None:
    await claim(broker, stored())
    working = asyncio.create_task(work(broker))
    await claim(broker, stored(steps=9))  # this key does not concern workers
    await asyncio.sleep(5 * A_MOMENT_S)
    assert not working.done()
    await claim(broker, stored(**change))
    with pytest.raises(config_watch.ConfigChangedError, match=f"configuration of run {broker.run} has changed"):
        await working


@pytest.mark.parametrize("change", [{"max_new_tokens": 9}, {"steps": 9}])
async def test_no_sample_is_leased_by_the_recipe_of_before_a_claim(
    broker: Broker, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]
) -> None:
    monkeypatch.setattr(config_watch, "CONFIG_CHECK_S", 3600.0)  # the refused worker looks at once
    run = await begin(broker, rules(1), config=stored())
    working = asyncio.create_task(work(broker))
    assert len((await run.lease(1, 0)).leases) == 1
    await claim(broker, stored(**change))
    reply = await run.lease(1, 0)
    assert (reply.leases, reply.reason) == ((), NoMoreLeases.RECIPE)
    if "steps" not in change:
        with pytest.raises(config_watch.ConfigChangedError):
            await working
        return
    async with asyncio.timeout(240):
        while not (await run.lease(1, 0)).leases:  # noqa: ASYNC110 - the change is none of a worker's business
            await asyncio.sleep(A_MOMENT_S)
    assert not working.done()
    working.cancel()


async def test_a_scorer_that_is_refused_requests_looks_at_once(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_watch, "CONFIG_CHECK_S", 3600.0)
    await claim(broker, stored())
    working = asyncio.create_task(work(broker))
    await asyncio.sleep(A_MOMENT_S)
    await claim(broker, stored(max_new_tokens=9))
    assert (await broker.scoring.lease("quality", ttl_s=30, most=9, most_bytes=1 << 20)).leases == ()
    with pytest.raises(config_watch.ConfigChangedError):
        await working


async def test_a_configuration_that_cannot_be_read_ends_the_worker_too(broker: Broker) -> None:
    await claim(broker, b"{}")
    with pytest.raises(ConfigError, match="this version of Headway cannot read"):
        await work(broker)


async def test_a_worker_that_is_done_is_not_watched_any_more(broker: Broker) -> None:
    await claim(broker, stored())
    async with config_watch.drained_when_changed(broker, stored(), asyncio.Event(), rollout._workers_part):
        await asyncio.sleep(3 * A_MOMENT_S)
