"""Agents that no worker starts: they claim a task, play it over HTTP, and go on where another worker took it over."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from headway.broker.client.broker import Broker
from headway.broker.errors import ConfigError
from headway.broker.wire.rows import rows_of
from headway.rollout_workers.agents import external
from headway.rollout_workers.agents.endpoint.server import Endpoint
from headway.rollout_workers.agents.episode import AgentTask
from headway.rollout_workers.agents.external import ExternalAgents
from headway.rollout_workers.agents.player import AgentPlayer, OpenSessions
from headway.rollout_workers.config import AgentConfig
from tests.rollout_workers.loop import (
    CAPACITY,
    Deliveries,
    Learner,
    OneReward,
    decoding,
    make_engine,
    make_worker,
    running,
)

from .numbers import NumberFormat
from .test_player import check

KEY = "the key of the gateway"
LONG = 400


async def gateway(port: int = 0, absent_s: float = external.ABSENT_S) -> AgentPlayer:
    """Return a player whose agents come from outside."""
    agents = ExternalAgents(KEY, absent_s)
    sessions = OpenSessions(agents)
    endpoint = await Endpoint.start(sessions, port=port, claims=agents)
    config = AgentConfig(kind="external")
    return AgentPlayer(config, agents, endpoint, sessions, OneReward(), NumberFormat(), decoding(()), model="m")


@pytest.fixture
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    """Yield the client of agents."""
    async with aiohttp.ClientSession() as session:
        yield session


async def posted(client: aiohttp.ClientSession, url: str, body: dict[str, Any], key: str = KEY) -> Any:
    """Return the answer's JSON, once the endpoint is there; an agent repeats a call that was turned away."""
    while True:
        try:
            async with client.post(url, json=body, headers={"Authorization": f"Bearer {key}"}) as response:
                if response.status == 200:
                    return await response.json()
                if response.status not in (204, 503):
                    return response.status
        except aiohttp.ClientError:
            pass  # the gateway is away
        await asyncio.sleep(0.02)


async def claimed(client: aiohttp.ClientSession, player: AgentPlayer) -> Any:
    return await posted(client, f"http://127.0.0.1:{player._endpoint.port}/sessions", {})


async def turn(client: aiohttp.ClientSession, task: Any, *messages: str, status: bool = False) -> Any:
    """Ask the model on; every second message is its own. Return its answer, or the status of a refusal."""
    roles = ("user", "assistant")
    body = {"messages": [{"role": roles[at % 2], "content": text} for at, text in enumerate(messages)]}
    answer = await posted(client, f"{task['base_url']}/chat/completions", body)
    return answer if status else answer["choices"][0]["message"]["content"]


async def play(client: aiohttp.ClientSession, player: AgentPlayer) -> None:
    """Play one episode of two turns."""
    task = await claimed(client, player)
    first = await turn(client, task, "5 6")
    await turn(client, task, "5 6", first, "7")
    url = task["base_url"].removesuffix("/v1")
    await posted(client, f"{url}/finish", {"reward": 0.5, "measures": {"steps": 2}})


async def test_agents_from_outside_play_whole_groups(
    brokers: tuple[Broker, Broker], client: aiohttp.ClientSession, tmp_path: Path
) -> None:
    learner = await Learner.start(brokers[0], groups=2)
    deliveries = Deliveries()
    await learner.publish(0, deliveries)
    player = await gateway()
    worker = make_worker(brokers[1], make_engine(tmp_path), deliveries, player=player, max_new_tokens=LONG)
    async with running(worker):
        await asyncio.gather(*(play(client, player) for _ in range(CAPACITY)))
        groups = await learner.take(0)
    for trajectory in (trajectory for group in groups for trajectory in group.trajectories):
        check(learner, trajectory)
        assert len(trajectory.turns) == 2
        assert (trajectory.reward, trajectory.rewards["agent/steps"]) == (0.5, 2.0)


async def test_an_agent_goes_on_at_the_gateway_that_takes_its_episode_over(
    three_brokers: tuple[Broker, Broker, Broker], client: aiohttp.ClientSession, tmp_path: Path
) -> None:
    learner = await Learner.start(three_brokers[0], groups=2)
    first, second = Deliveries(), Deliveries()
    await learner.publish(0, first)
    options: dict[str, Any] = {"max_new_tokens": LONG, "lease_ttl_s": 1.0}
    player = await gateway()
    port = player._endpoint.port
    killed = make_worker(three_brokers[1], make_engine(tmp_path / "1"), first, player=player, **options)

    async def vanish() -> None:
        """Leave without a word."""

    killed._leave = vanish  # type: ignore[method-assign]
    task = asyncio.create_task(killed.run())
    tasks = [await claimed(client, player) for _ in range(CAPACITY)]
    answers = [await turn(client, one, "5 6") for one in tasks]
    task.cancel()
    await asyncio.wait([task])
    await killed._engine.close()
    await player.close()
    going_on = [
        asyncio.create_task(turn(client, one, "5 6", answer, "7")) for one, answer in zip(tasks, answers, strict=True)
    ]
    await learner.publish(1, second)
    heirs = await gateway(port)
    heir = make_worker(three_brokers[2], make_engine(tmp_path / "2"), second, name="worker-2", player=heirs, **options)
    async with running(heir):
        await asyncio.gather(*going_on)
        for one in tasks:
            await posted(client, f"{one['base_url']}/finish", {"reward": 1.0})
        groups = await learner.take(1)
    texts = set()
    for trajectory in (trajectory for group in groups for trajectory in group.trajectories):
        check(learner, trajectory)
        assert len(trajectory.turns) == 2
        assert len(rows_of(trajectory)) == 1
        assert len({span.version for span in trajectory.spans}) == 2
        texts.add(" ".join(map(str, trajectory.response_tokens[trajectory.turns[0].start : trajectory.turns[0].end])))
    assert texts == set(answers)


async def test_another_agent_takes_an_episode_over_whose_agent_is_silent(
    three_brokers: tuple[Broker, Broker, Broker],
    client: aiohttp.ClientSession,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(external, "SILENT_S", 0.1)
    learner = await Learner.start(three_brokers[0], groups=2)
    first, second = Deliveries(), Deliveries()
    await learner.publish(0, first)
    player = await gateway()
    options: dict[str, Any] = {"max_new_tokens": LONG, "lease_ttl_s": 1.0}
    begun = make_worker(three_brokers[1], make_engine(tmp_path / "1"), first, player=player, **options)
    async with running(begun):
        tasks = [await claimed(client, player) for _ in range(CAPACITY)]
        answers = [await turn(client, one, "5 6") for one in tasks]
        for one, answer in zip(tasks, answers, strict=True):
            await turn(client, one, "5 6", answer, "7")
    await learner.publish(1, second)
    heirs = await gateway(player._endpoint.port)
    heir = make_worker(three_brokers[2], make_engine(tmp_path / "2"), second, name="worker-2", player=heirs, **options)
    async with running(heir):
        others = [await claimed(client, heirs) for _ in range(CAPACITY)]
        assert {one["session"] for one in others}.isdisjoint(one["session"] for one in tasks)
        for one, answer in zip(tasks, answers, strict=True):
            assert await turn(client, one, "5 6", answer, "8", status=True) == 410
        for one in others:
            answer = await turn(client, one, "5 6")
            assert answer in answers, "the recorded answer"
            await turn(client, one, "5 6", answer, "9")
            await posted(client, f"{one['base_url']}/finish", {"reward": 1.0})
        groups = await learner.take(1)
    for trajectory in (trajectory for group in groups for trajectory in group.trajectories):
        check(learner, trajectory)
        roles = [one.call.role for one in trajectory.turns if one.call is not None]
        assert roles == ["main", "auxiliary", "main"], "the answer that only the silent agent had is not trained"


class Clock:
    """Stands in for the module `time`."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s


async def test_a_session_that_no_worker_has_is_waited_for_no_longer_than_an_episode_lasts(
    client: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as that of an agent that has only repeated turns, which no record names, and whose worker was lost."""
    clock = Clock()
    monkeypatch.setattr(external, "time", clock)
    player = await gateway(absent_s=300.0)
    name = ExternalAgents(KEY).name_of("sample", "an attempt without a turn")
    url = player._endpoint.url_of(name)

    async def status() -> int:
        async with client.post(f"{url}/chat/completions", json={"messages": []}) as response:
            return response.status

    found = []
    for clock.now_s in (0.0, 100.0, 200.0, 300.0):
        found.append(await status())
    assert found == [503, 503, 503, 410]
    await player.close()


async def test_a_session_that_came_back_is_waited_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(external, "time", clock)
    monkeypatch.setattr(external, "REMEMBERED", 2)
    agents = ExternalAgents(KEY, absent_s=10.0)
    assert agents.may_come_back("a")
    playing = asyncio.create_task(
        agents.play(AgentTask(id="t", text="", messages=[]), "a", asyncio.Event(), deadline_s=600)
    )
    await asyncio.sleep(0)
    playing.cancel()
    await asyncio.wait([playing])
    clock.now_s = 10.0
    assert all(map(agents.may_come_back, ("a", "b", "c"))), "of more than are remembered, the first is forgotten"
    clock.now_s = 20.0
    assert not any(map(agents.may_come_back, ("b", "c")))
    clock.now_s += 2 * external.SILENT_S
    assert agents.may_come_back("b"), "meanwhile another gateway may have had it"


async def test_tasks_are_for_those_who_have_the_key(client: aiohttp.ClientSession) -> None:
    player = await gateway()
    url = f"http://127.0.0.1:{player._endpoint.port}/sessions"
    assert await posted(client, url, {}, key="another key") == 400
    await player.close()


def test_a_gateway_needs_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEADWAY_GATEWAY_KEY", raising=False)
    with pytest.raises(ConfigError, match="HEADWAY_GATEWAY_KEY"):
        ExternalAgents()
