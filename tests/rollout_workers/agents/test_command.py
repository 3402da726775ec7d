"""A program plays an episode: what it is told, what its output says, and that nothing of it is left behind."""

import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from headway.broker.user_code.import_paths import ImportRoots
from headway.rollout_workers.agents.episode import Outcome
from headway.rollout_workers.agents.kinds import Agent, ShapeError, open_agent
from headway.rollout_workers.agents.kinds.command import ProgramFailedError

from .scripted_episodes import ScriptedEpisode, a_task, in_turn

HERE = Path(__file__).parent / "programs"


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Have temporary directories made in one that is empty again after each test."""
    directory = tmp_path / "temporary"
    directory.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    yield directory
    assert list(directory.iterdir()) == []


def an_agent(*arguments: str, **options: Any) -> Agent:
    """Open an agent that runs `program.py` with these arguments."""
    roots = ImportRoots(("python",), HERE)
    return open_agent("command", {"command": ["python", "./program.py", *arguments], **options}, roots)


async def play(*arguments: str, **options: Any) -> Outcome:
    """Run the program for one episode."""
    agent = an_agent(*arguments, **options)
    try:
        return await agent.rollout(ScriptedEpisode(in_turn(), api_key="lease"), a_task())
    finally:
        await agent.close()


async def test_it_is_told_where_the_model_and_its_task_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HEADWAY_BROKER", "OPENAI_ORG_ID", "PYTHONSAFEPATH"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("NO_PROXY", "here")
    file = tmp_path / "environment"
    await play("environment", str(file), environment={"MINE": "2", "OPENAI_API_KEY": "another"})
    seen = json.loads(file.read_text())
    assert seen["OPENAI_BASE_URL"] == "http://127.0.0.1:9/s/lease/v1"
    assert seen["ANTHROPIC_BASE_URL"] == "http://127.0.0.1:9/s/lease"
    assert seen["OPENAI_API_KEY"] == seen["ANTHROPIC_API_KEY"] == "lease"
    assert seen["MINE"] == "2"
    assert seen["NO_PROXY"] == "here,127.0.0.1,localhost"
    assert not {"HEADWAY_BROKER", "OPENAI_ORG_ID", "PYTHONSAFEPATH"} & seen.keys()


@pytest.mark.parametrize(
    ("what", "options", "result"),
    [
        ("reward", {}, {"reward": 0.5, "seed": 7.0}),
        ("number", {}, None),
        ("number", {"number_is_reward": True}, 7.0),
        ("text", {"number_is_reward": True}, None),
        ("noise", {}, {"reward": 1.0}),
    ],
)
async def test_the_last_line_of_its_output_is_its_outcome(what: str, options: dict[str, Any], result: Outcome) -> None:
    assert await play(what, **options) == result


async def test_a_reward_that_is_no_number_is_an_error() -> None:
    with pytest.raises(ShapeError, match="the reward in its last line is 'much'"):
        await play("not finite")


async def test_a_program_that_fails_ends_its_episode_alone() -> None:
    with pytest.raises(ProgramFailedError, match=r"ended with exit code 3. The end of its errors: no luck"):
        await play("fails")


def has_ended(pid: int) -> bool:
    """Return whether a process is no more."""
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


async def until(is_true: Callable[[], object]) -> None:
    """Wait, for as long as the test may take, until something is so."""
    while not is_true():  # noqa: ASYNC110 - another process makes it so
        await asyncio.sleep(0.01)


async def test_what_it_left_running_is_killed(tmp_path: Path) -> None:
    assert await play("children", str(tmp_path / "child"), "ends") is None
    await until(lambda: has_ended(int((tmp_path / "child").read_text().split()[0])))


async def test_a_cancelled_episode_kills_it_and_its_children(tmp_path: Path) -> None:
    agent = an_agent("children", str(tmp_path / "child"), "waits")
    playing = asyncio.create_task(agent.rollout(ScriptedEpisode(in_turn()), a_task()))
    file = tmp_path / "child"
    await until(lambda: file.exists() and file.read_text())
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing
    await until(lambda: has_ended(int(file.read_text().split()[0])))
    await agent.close()


HOST = """
import asyncio, sys
from pathlib import Path
from tests.rollout_workers.agents import test_command
from tests.rollout_workers.agents.scripted_episodes import ScriptedEpisode, a_task, in_turn
agent = test_command.an_agent("children", sys.argv[1], "waits")
asyncio.run(agent.rollout(ScriptedEpisode(in_turn()), a_task()))
"""


async def test_a_killed_process_leaves_no_program_behind(tmp_path: Path, temporary: Path) -> None:
    file = tmp_path / "child"
    host = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", HOST, str(file)), cwd=HERE.parents[3], env={**os.environ, "TMPDIR": str(temporary)}
    )
    await until(lambda: file.exists() and file.read_text())
    host.kill()
    await host.wait()
    await until(lambda: has_ended(int(file.read_text().split()[0])))
    await until(lambda: not list(temporary.iterdir()))


async def test_a_process_that_left_its_group_is_killed(tmp_path: Path) -> None:
    file = tmp_path / "child"
    assert await play("escapes", str(file)) == {"reward": 0.25}
    await until(lambda: has_ended(int(file.read_text())))
