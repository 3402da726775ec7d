"""Hostile agents in host processes: a typed outcome for each, other episodes play on, and nothing is left behind."""

import asyncio
import re
import tempfile
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import pytest_asyncio

from headway.broker.user_code import pool
from headway.rollout_workers.agents.hosted import AgentHosts
from headway.rollout_workers.rewards.base import UnscoredError

from .stage import MARK, Stage, held, remains, staged, until

pytestmark = pytest.mark.asyncio(loop_scope="module")
ACTS = "tests.rollout_workers.agents.hostile_agents:rollout"

FAILED = {
    "silent": "ended without a turn",
    "exit": r"called sys.exit\(3\)",
    "interrupt": "raised KeyboardInterrupt",
    "odd": "raised OddError: odd",
    "mute": "raised MuteError",
    "cancelled": "was cancelled",
    "vast_error": "raised ValueError: xxx",
    "vast_result": "returned 'xxx.*number",
    "many_results": "returned 100000 measures",
    "broken_result": "raised RuntimeError: no",
    "memory": "raised MemoryError",
    "recursion": "raised RecursionError",
    "end": "ended its process with exit code 7",
    "crash": "ended its process with SIGSEGV",
    "close": "ended its process|closed its process's channel",
    "exit_in_task": "ended its process with exit code 4",
}
"""How the worker words what became of an agent."""
DONE = ("print", "signals", "thread", "fork", "bomb", "children", "late")


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    directory = tmp_path_factory.mktemp("temporary")
    notes = tmp_path_factory.mktemp("notes")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(directory))
        patch.setenv("TMPDIR", str(directory))
        patch.setenv(MARK, uuid.uuid4().hex)
        patch.setenv("AGENT_NOTES", str(notes))
        yield notes


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stage(environment: Path) -> AsyncIterator[Stage]:
    async with leaving_nothing(), staged(ACTS) as opened:
        yield opened


@asynccontextmanager
async def leaving_nothing() -> AsyncIterator[None]:
    """Assert that this process holds at the end of the block what it held at its beginning."""
    before = held()
    yield
    try:
        await until(lambda: all(now <= then for now, then in zip(held(), before, strict=True)))
    except TimeoutError:
        raise AssertionError(f"{held()} is held, and was {before} before: {remains()}") from None


@pytest.mark.parametrize("act", FAILED)
async def test_an_agent_that_fails_is_told_apart(stage: Stage, act: str) -> None:
    beside = [asyncio.create_task(stage.play("good")) for _ in range(3)]
    with pytest.raises(UnscoredError) as failed:
        await stage.play(act)
    assert re.search(FAILED[act], str(failed.value)), failed.value
    assert len(str(failed.value)) < 2000
    assert [(await one).reward for one in beside] == [1.0] * 3


@pytest.mark.parametrize("act", DONE)
async def test_an_agent_that_leaves_things_behind_has_its_reward(stage: Stage, act: str, environment: Path) -> None:
    beside = [asyncio.create_task(stage.play("good")) for _ in range(3)]
    assert (await stage.play(act)).reward == 1.0
    assert [(await one).reward for one in beside] == [1.0] * 3
    if act == "late":
        await until((environment / "late").exists)
        await until(lambda: "410" in (environment / "late").read_text())


async def test_a_process_of_an_agent_ends_before_its_worker_where_memory_is_short(stage: Stage) -> None:
    assert (await stage.play("oom")).components["agent/score"] == 1000.0


async def test_an_agent_that_takes_no_cancelling_loses_its_process(
    stage: Stage, environment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "ABANDONED_S", 0.1)
    playing = asyncio.create_task(stage.play("deaf"))
    await until((environment / "deaf").exists)
    assert isinstance(stage.player._agents, AgentHosts)
    host = stage.player._agents._pool._shared[0]._process
    assert host is not None
    playing.cancel()
    await asyncio.wait([playing])
    await until(lambda: host.is_lost)
    assert (await stage.play("good")).reward == 1.0


@pytest.mark.parametrize(
    "act", ["wait", "spin", pytest.param("deaf", marks=pytest.mark.slow), pytest.param("stop", marks=pytest.mark.slow)]
)
async def test_an_agent_that_never_ends_is_ended_at_its_deadline(
    environment: Path, monkeypatch: pytest.MonkeyPatch, act: str
) -> None:
    monkeypatch.setattr(pool, "CANCEL_S", 0.1)
    async with leaving_nothing(), staged(ACTS, episode_s=0.5) as opened:
        with pytest.raises(UnscoredError, match=r"ran past its deadline of 0.5 s"):
            await opened.play(act)


async def test_nonsense_is_refused_and_what_follows_is_answered(stage: Stage) -> None:
    assert (await stage.play("nonsense")).reward == 1.0


async def test_keys_of_other_episodes_open_nothing(stage: Stage, environment: Path) -> None:
    assert (await stage.play("key")).reward == 1.0
    beside = asyncio.create_task(stage.play("wait"))
    await until(lambda: stage.player._sessions.open)
    (other,) = stage.player._sessions.open
    found = (await stage.play(f"keys {other}")).components
    assert list(stage.player._sessions.open) == [other]
    beside.cancel()
    await asyncio.wait([beside])
    assert (found["agent/guessed"], found["agent/ended"], found["agent/none"]) == (410.0, 410.0, 401.0)
    assert found["agent/both"] == 400.0
    assert found["agent/odd"] == 410.0
    assert found["agent/above"] in (401.0, 404.0, 410.0)
