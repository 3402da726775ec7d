"""Agents in host processes play samples of a real worker: tokens, logprobs and turns are the engine's own, whatever is
killed."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from headway.broker.client.broker import Broker
from headway.broker.schema import Trajectory
from headway.broker.user_code.import_paths import ImportRoots
from headway.broker.wire.rows import rows_of
from headway.rollout_workers.agents.endpoint.server import Endpoint
from headway.rollout_workers.agents.hosted import AgentHosts
from headway.rollout_workers.agents.player import AgentPlayer, OpenSessions
from headway.rollout_workers.config import AgentConfig, SamplingConfig
from headway.rollout_workers.evaluation import evaluate
from headway.rollout_workers.rewards.base import RewardError, UnscoredError
from headway.rollout_workers.rewards.built_in import ZeroReward
from headway.rollout_workers.worker import Worker
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
from tests.rollout_workers.models import forward_logprobs, make_model

from .numbers import TURNS, NumberFormat

AGENTS = "tests.rollout_workers.agents.numbers"
LONG = 400
Opener = Callable[..., Awaitable[AgentPlayer]]


@pytest.fixture
async def open_player() -> AsyncIterator[Opener]:
    """Yield what opens players; they are closed at the end."""
    opened: list[AgentPlayer] = []

    async def open_one(agent: str, reward: Any = None, **settings: Any) -> AgentPlayer:
        config = AgentConfig(kind=f"{AGENTS}:{agent}", **settings)
        sessions = OpenSessions()
        endpoint = await Endpoint.start(sessions)
        hosts = await AgentHosts.open(config, ImportRoots(("tests",), Path.cwd()))
        player = AgentPlayer(
            config, hosts, endpoint, sessions, reward or OneReward(), NumberFormat(), decoding(()), model="m"
        )
        opened.append(player)
        return player

    yield open_one
    for player in opened:
        await player.close()


def check(learner: Learner, trajectory: Trajectory) -> None:
    """Assert that every trained token has the logprob that the model of its version gives it in its row."""
    versions = [span.version for span in trajectory.spans for _ in range(span.start, span.end)]
    trained = 0
    for row in rows_of(trajectory):
        tokens, first = row.token_ids.tolist(), row.context_length
        for version in set(versions):
            expected = forward_logprobs(learner.models[version], tokens[:first], tokens[first:]).detach().numpy()
            for place, position in enumerate(row.positions.tolist()):
                if trajectory.loss_mask[position] and versions[position] == version:
                    assert abs(expected[place] - trajectory.behavior_logprobs[position]) < 1e-4
                    trained += 1
    assert trained == trajectory.loss_mask.sum() > 0


class Run(NamedTuple):
    learner: Learner
    trajectories: list[Trajectory]
    worker: Worker


async def opened(
    brokers: tuple[Broker, Broker], player: AgentPlayer, directory: Path, groups: int = 2
) -> tuple[Learner, Worker, Deliveries]:
    """Return a learner that has announced version 0, a worker that has yet to run, and its way to the learner."""
    learner, deliveries = await Learner.start(brokers[0], groups=groups), Deliveries()
    await learner.publish(0, deliveries)
    worker = make_worker(brokers[1], make_engine(directory / "m"), deliveries, player=player, max_new_tokens=LONG)
    return learner, worker, deliveries


async def played(brokers: tuple[Broker, Broker], player: AgentPlayer, directory: Path, groups: int = 2) -> Run:
    """Have the player play two groups of each version: of version 0, and of version 1 where there are four."""
    learner, worker, deliveries = await opened(brokers, player, directory, groups)
    async with running(worker):
        found = [*await learner.take(0)]
        if groups > 2:
            await learner.publish(1, deliveries)
            found += await learner.take(1)
    return Run(learner, [trajectory for group in found for trajectory in group.trajectories], worker)


async def test_every_trained_token_is_one_that_the_engine_sampled(
    brokers: tuple[Broker, Broker], open_player: Opener, tmp_path: Path
) -> None:
    run = await played(brokers, await open_player("talk"), tmp_path, groups=4)
    for trajectory in run.trajectories:
        check(run.learner, trajectory)
        assert len(rows_of(trajectory)) == 1
        turns = len(trajectory.turns)
        assert trajectory.reward == 1.25 * turns
        assert trajectory.rewards["agent/asked"] == trajectory.rewards["agent/turns"] == turns
        assert "agent/forks" not in trajectory.rewards


async def test_branches_are_rows_and_titles_are_none(
    brokers: tuple[Broker, Broker], open_player: Opener, tmp_path: Path
) -> None:
    run = await played(brokers, await open_player("explore", max_turn_tokens=12), tmp_path)
    for trajectory in run.trajectories:
        check(run.learner, trajectory)
        assert len(rows_of(trajectory)) == 2
        assert trajectory.rewards["agent/auxiliary_turns"] == 1.0
        assert [turn.call.role for turn in trajectory.turns if turn.call] == ["main", "main", "auxiliary", "main"]


@pytest.mark.parametrize("agent", ["Slow", "SlowAndRestarted"])
async def test_an_episode_goes_on_at_its_last_turn_after_its_worker_was_killed_or_begins_anew(
    three_brokers: tuple[Broker, Broker, Broker],
    open_player: Opener,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    agent: str,
) -> None:
    go = tmp_path / "go"
    monkeypatch.setenv("AGENT_GO", str(go))
    learner = await Learner.start(three_brokers[0], groups=2)
    first, second = Deliveries(), Deliveries()
    await learner.publish(0, first)
    options: dict[str, Any] = {"max_new_tokens": LONG, "lease_ttl_s": 1.0}
    player = await open_player(agent)
    killed = make_worker(three_brokers[1], make_engine(tmp_path / "1"), first, player=player, **options)

    async def vanish() -> None:
        """Leave without a word."""

    killed._leave = vanish  # type: ignore[method-assign]
    task = asyncio.create_task(killed.run())
    await until(lambda: [len(one._recorder.turns) for one in _sessions(player)] == [2] * CAPACITY)
    await until(lambda: player.waiting_for_tools == CAPACITY)
    kept = {tuple(one._recorder.tokens) for one in _sessions(player)}
    task.cancel()
    await asyncio.wait([task])
    await killed._engine.close()
    go.touch()
    await learner.publish(1, second)
    heirs = await open_player(agent)
    heir = make_worker(three_brokers[2], make_engine(tmp_path / "2"), second, name="worker-2", player=heirs, **options)
    async with running(heir):
        groups = await learner.take(1)
    for trajectory in (trajectory for group in groups for trajectory in group.trajectories):
        check(learner, trajectory)
        assert len(trajectory.turns) == TURNS
        if agent == "Slow":
            assert tuple(trajectory.response_tokens[: trajectory.turns[1].end].tolist()) in kept
        names = ("resumed", "restarted", "versions")
        found = [trajectory.rewards.get(f"agent/{name}", 0.0) for name in names]
        assert found == ([2.0, 0.0, 2.0] if agent == "Slow" else [0.0, 1.0, 1.0])


def _sessions(player: AgentPlayer) -> Any:
    return player._sessions.open.values()


@pytest.mark.parametrize("agent", ["die", "die_and_restart"])
async def test_an_agent_that_ends_its_process_plays_on(
    brokers: tuple[Broker, Broker], open_player: Opener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, agent: str
) -> None:
    monkeypatch.setenv("AGENT_MARKS", str(tmp_path))
    run = await played(brokers, await open_player(agent), tmp_path)
    for trajectory in run.trajectories:
        check(run.learner, trajectory)
        assert len(rows_of(trajectory)) == 1
        assert agent == "die_and_restart" or "agent/restarted" not in trajectory.rewards


@pytest.mark.parametrize("agent", ["forget", "hang"])
async def test_an_episode_that_came_to_nothing_begins_anew(
    brokers: tuple[Broker, Broker], open_player: Opener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, agent: str
) -> None:
    monkeypatch.setenv("AGENT_MARKS", str(tmp_path))
    player = await open_player(agent, episode_s=5.0 if agent == "hang" else 600.0)
    run = await played(brokers, player, tmp_path)
    for trajectory in run.trajectories:
        check(run.learner, trajectory)
        assert len(trajectory.turns) == 1
    assert run.worker.unscored >= 2
    if agent == "hang" and isinstance(player._agents, AgentHosts):
        assert player._agents._pool.repeated == 0, "the other episodes of the process play on"


async def test_a_failed_episode_is_trained_with_nothing_where_the_recipe_says_so(
    brokers: tuple[Broker, Broker], open_player: Opener, tmp_path: Path
) -> None:
    run = await played(brokers, await open_player("fail", on_failure="zero"), tmp_path)
    for trajectory in run.trajectories:
        assert trajectory.reward == 0.0
        assert trajectory.rewards["agent/failed/raised"] == 1.0


async def measured(player: AgentPlayer, directory: Path) -> Any:
    engine = make_engine(directory)
    await hold(engine, make_model("dense", 0))
    try:
        return await evaluate(engine, prompts(3), player, decoding(()), SamplingConfig(max_new_tokens=LONG), 1.0)
    finally:
        await engine.close()


async def test_an_evaluation_plays_whole_episodes(open_player: Opener, tmp_path: Path) -> None:
    found = await measured(await open_player("talk"), tmp_path)
    assert (found.pass_rate, found.reward["agent/turns"]) == (1.0, float(TURNS))
    assert found.reward_mean == 1.25 * TURNS


async def test_no_agent_reads_tokens_that_the_model_does_not_have(open_player: Opener, tmp_path: Path) -> None:
    player = await open_player("stray")
    player._decoding = player._decoding._replace(vocabulary=64)
    found = await measured(player, tmp_path)
    assert (found.reward_mean, found.reward["agent/turns"]) == (1.0, 1.0)


async def test_the_runs_rewards_score_an_agent_without_one(open_player: Opener, tmp_path: Path) -> None:
    found = await measured(await open_player("leave"), tmp_path)
    assert (found.reward_mean, found.reward["one"]) == (1.0, 1.0)


async def test_a_reward_that_nobody_gives_is_an_error(open_player: Opener, tmp_path: Path) -> None:
    with pytest.raises(UnscoredError, match="returned no reward, and the recipe has no rewards"):
        await measured(await open_player("leave", ZeroReward()), tmp_path)


async def test_a_worker_whose_agent_fails_again_and_again_ends(
    brokers: tuple[Broker, Broker], open_player: Opener, tmp_path: Path
) -> None:
    _, worker, _ = await opened(brokers, await open_player("fail"), tmp_path)
    with pytest.raises(RewardError, match=r"agent .*:fail failed on prompt .*raised KeyError"):
        await worker.run()
