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
    "vast_result": "returned 'xxx.*must return a number",
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
DONE = ("print", "signals", "thread", "fork", "late")


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
