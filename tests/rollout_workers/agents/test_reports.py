"""What a real worker reports of its agents, and where it is shown: the status, Prometheus, and a step's metrics."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from headway.broker.client.broker import Broker
from headway.broker.schema import Group
from headway.broker.schema.status import AgentInfo
from headway.broker.schema.step_metrics import AgentFigures
from headway.broker.user_code.import_paths import ImportRoots
from headway.deploy.observe.prometheus.worker_metrics import serve_worker_metrics
from headway.deploy.observe.status_tables import status_json
from headway.deploy.run.agent_figures import agent_figures
from headway.rollout_workers.agents.endpoint.server import Endpoint
from headway.rollout_workers.agents.hosted import AgentHosts
from headway.rollout_workers.agents.player import AgentPlayer, OpenSessions
from headway.rollout_workers.config import AgentConfig, SamplingConfig, WorkersConfig
from headway.rollout_workers.engines.base import GenerationRequest
from headway.rollout_workers.evaluation import evaluate
from headway.rollout_workers.rewards.base import UnscoredError
from headway.rollout_workers.worker import Worker
from tests.broker.topologies import free_port
from tests.deploy.sinks.scrapes import figure, scrape
from tests.rollout_workers.generation import hold
from tests.rollout_workers.loop import (
    CAPACITY,
    Deliveries,
    Learner,
    OneReward,
    decoding,
    make_engine,
    make_worker,
    prompts,
    running,
    until,
)
from tests.rollout_workers.models import make_model

from .numbers import NumberFormat

GROUPS = 2


@asynccontextmanager
async def playing(config: AgentConfig, **settings: Any) -> AsyncIterator[AgentPlayer]:
    sessions = OpenSessions()
    endpoint = await Endpoint.start(sessions)
    hosts = await AgentHosts.open(config, ImportRoots(("tests",), Path.cwd()))
    player = AgentPlayer(
        config, hosts, endpoint, sessions, OneReward(), NumberFormat(), decoding(()), model="m", **settings
    )
    try:
        yield player
    finally:
        await player.close()


def agent_of(worker: Worker) -> AgentInfo:
    found = worker.info().agent
    assert isinstance(found, AgentInfo)
    return found


async def shown_agents(broker: Broker) -> dict[str, Any]:
    """Return what `headway status --json` shows of agents."""
    found = status_json(await broker.status.snapshot())
    assert found["workers"][0]["agent"]["finished"] <= found["agents"]["finished"]
    return dict(found["agents"])


async def test_episodes_of_agents_are_reported(
    brokers: tuple[Broker, Broker], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("AGENT_GO", str(go := tmp_path / "go"))
    learner, deliveries = await Learner.start(brokers[0], groups=GROUPS), Deliveries()
    await learner.publish(0, deliveries)
    config = AgentConfig(kind="tests.rollout_workers.agents.reported:roam", on_failure="zero")
    async with playing(config) as player:
        worker = make_worker(brokers[1], make_engine(tmp_path), deliveries, player=player, max_new_tokens=200)
        with (
            serve_worker_metrics(worker, WorkersConfig(metrics_port=free_port())) as metrics,
            caplog.at_level(logging.WARNING),
        ):
            assert metrics is not None
            async with running(worker):
                await until(lambda: agent_of(worker).waiting_for_tools == CAPACITY)
                waiting = await shown_agents_when(brokers[0], waiting_for_tools=CAPACITY)
                during = await asyncio.to_thread(scrape, metrics.url)
                go.touch()
                groups = list(await learner.take(0))
                ended = await shown_agents_when(brokers[0], finished=CAPACITY, episodes=0)
            after = await asyncio.to_thread(scrape, metrics.url)
    assert (waiting["episodes"], waiting["running_requests"], waiting["finished"]) == (CAPACITY, 0, 0)
    assert figure(during, "headway_worker_agent_waiting_episodes") == CAPACITY
    check_ended(ended)
    assert figure(after, "headway_worker_agent_forks_total") == ended["forks"]
    assert figure(after, "headway_worker_agent_failed_episodes_total", reason="raised") == GROUPS
    assert figure(after, "headway_worker_agent_refused_calls_total", reason="temperature") == CAPACITY
    check_step(groups, ended)
    told = [record.message for record in caplog.records if "call yours otherwise" in record.message]
    assert len(told) == 1
    assert "turns" in told[0]


async def shown_agents_when(broker: Broker, **figures: int) -> dict[str, Any]:
    """Wait until heartbeats have told so, and return what is shown."""
    while True:
        shown = await shown_agents(broker)
        if all(shown[name] == value for name, value in figures.items()):
            return shown
        await asyncio.sleep(0.02)


def check_ended(shown: dict[str, Any]) -> None:
    """Half of the episodes failed after one turn; the others had two, of which the second is a fork."""
    assert (shown["turns"], shown["finished_turns"], shown["turns_per_episode"]) == (6, 6, 1.5)
    assert (shown["forks"], shown["fork_fraction"]) == (2, pytest.approx(1 / 3))
    assert 0 < shown["reread_tokens"] < shown["read_tokens"]
    assert shown["tool_s"] > 0
    assert shown["failures"] == {"raised": GROUPS}
    assert shown["refused_calls"] == {"temperature": CAPACITY}


def check_step(groups: list[Group], shown: dict[str, Any]) -> None:
    """The metrics of a step say the same."""
    trajectories = [one for group in groups for one in group.trajectories]
    found = agent_figures(trajectories)
    assert isinstance(found, AgentFigures)
    assert (found.episodes, found.turns_mean, found.turns_max) == (CAPACITY, 1.5, 2)
    assert found.fork_fraction == pytest.approx(shown["fork_fraction"])
    assert found.reread_fraction == pytest.approx(shown["reread_fraction"])
    assert found.tool_s_mean > 0
    assert (found.failures, found.refused_calls) == ({"raised": GROUPS}, {"temperature": CAPACITY})
    assert {one.rewards.get("agent/own") for one in trajectories} == {2.0, None}
    assert max(one.rewards["agent/turns"] for one in trajectories) == 2.0


async def test_without_an_agent_nothing_of_agents_is_reported(brokers: tuple[Broker, Broker], tmp_path: Path) -> None:
    learner, deliveries = await Learner.start(brokers[0], groups=GROUPS), Deliveries()
    await learner.publish(0, deliveries)
    worker = make_worker(brokers[1], make_engine(tmp_path), deliveries)
    async with running(worker):
        groups = await learner.take(0)
        found = status_json(await brokers[0].status.snapshot())
    assert not agent_figures([one for group in groups for one in group.trajectories])
    assert "agents" not in found
    assert all("agent" not in one for one in found["workers"])


@pytest.mark.parametrize("asked", [1.0, 0.0])
async def test_an_unchanged_agent_is_evaluated_at_the_temperature_of_evaluations(
    asked: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("AGENT_ASKS", str(asked))
    requests: list[GenerationRequest] = []
    engine = make_engine(tmp_path)
    sampled = engine.generate

    def generate(request: GenerationRequest) -> Any:
        requests.append(request)
        return sampled(request)

    monkeypatch.setattr(engine, "generate", generate)
    await hold(engine, make_model("dense", 0))
    config = AgentConfig(kind="tests.rollout_workers.agents.reported:insist")
    try:
        async with playing(config, trained_temperature=1.0) as player:
            held_out = SamplingConfig(max_new_tokens=200, temperature=0.0)
            found = await evaluate(engine, prompts(3), player, decoding(()), held_out, 1.0)
    finally:
        await engine.close()
    assert found.pass_rate == 1.0
    assert {request.temperature for request in requests} == {0.0}
    assert found.reward.get("agent/replaced_temperature") == (2.0 if asked else None)
    told = ["evaluation.temperature wins" in record.message for record in caplog.records]
    assert sum(told) == bool(asked)


async def test_a_temperature_of_neither_training_nor_evaluation_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGENT_ASKS", "0.5")
    engine = make_engine(tmp_path)
    await hold(engine, make_model("dense", 0))
    try:
        async with playing(
            AgentConfig(kind="tests.rollout_workers.agents.reported:insist"), trained_temperature=1.0
        ) as player:
            held_out = SamplingConfig(max_new_tokens=200, temperature=0.0)
            with pytest.raises(UnscoredError, match=r"'temperature' 0.5 is not supported: the run samples with 0"):
                await evaluate(engine, prompts(1), player, decoding(()), held_out, 1.0)
    finally:
        await engine.close()
