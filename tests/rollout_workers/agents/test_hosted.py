"""Agents in a real process of the worker: what they return is checked once, and they end cleanly, or are killed."""

import asyncio
import math
import socket
from collections.abc import Awaitable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headway.broker.errors import ConfigError, UserCodeError
from headway.broker.user_code.import_paths import ImportRoots
from headway.rollout_workers.agents import hosted
from headway.rollout_workers.agents.episode import AgentTask
from headway.rollout_workers.agents.hosted import AgentHosts
from headway.rollout_workers.config import AgentConfig
from tests.rollout_workers.loop import until

HERE = "tests.rollout_workers.agents.held"
TASK = AgentTask(id="0-0", text="go", messages=[{"role": "user", "content": "go"}])
URL = "http://127.0.0.1:9/s/name/v1"


async def opened(agent: str, **options: Any) -> AgentHosts:
    config = AgentConfig(kind=f"{HERE}:{agent}", options=options)
    return await AgentHosts.open(config, ImportRoots(("tests",), Path.cwd()))


def play(hosts: AgentHosts, **settings: Any) -> Awaitable[hosted.Played]:
    return hosts.play(TASK, URL, "name", deadline_s=600.0, on_lost=lambda: None, **settings)


@pytest.mark.parametrize(
    ("returns", "played"),
    [
        (0.5, (0.5, {}, [])),
        (True, (1.0, {}, [])),
        (None, (None, {}, [])),
        ({"reward": 1, "steps": 3}, (1.0, {"steps": 3.0}, [])),
        ({"steps": 3}, (None, {"steps": 3.0}, [])),
        ({"reward": 1, "steps": math.nan}, (1.0, {}, ["steps"])),
    ],
)
async def test_an_outcome_is_a_number_a_mapping_or_none(returns: Any, played: hosted.Played) -> None:
    assert hosted._played(returns) == played


@pytest.mark.parametrize("returns", ["1.0", math.inf, {"reward": "x"}, {"reward": math.nan}, [1.0]])
async def test_what_is_no_outcome_is_refused(returns: Any) -> None:
    with pytest.raises(TypeError, match=r"rollout returned .*, which is no reward"):
        hosted._played(returns)


async def test_what_is_no_outcome_fails_the_episode() -> None:
    hosts = await opened("says_text")
    with pytest.raises(UserCodeError, match=r"rollout returned '1\.0', which is no reward: a finite number, a mapping"):
        await play(hosts)
    await hosts.close()


@pytest.mark.parametrize("is_cancelled", [True, False])
async def test_agents_free_what_they_hold_before_their_process_ends(tmp_path: Path, is_cancelled: bool) -> None:
    hosts = await opened("Held", directory=str(tmp_path))
    playing = asyncio.ensure_future(play(hosts))
    await until(lambda: (tmp_path / "begun").exists())
    if is_cancelled:
        playing.cancel()
    await hosts.close()
    await asyncio.wait([playing])
    assert (tmp_path / "ends").read_text().split() == ["episode", "agent"]
    await hosts.close()


async def test_an_agent_that_does_not_end_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosted, "AGENTS_CLOSE_S", 0.5)
    hosts = await opened("Held", directory=str(tmp_path), hangs=True)
    playing = asyncio.ensure_future(play(hosts))
    await until(lambda: (tmp_path / "begun").exists())
    await hosts.close()
    with pytest.raises(UserCodeError, match=r"ran past its deadline of 0\.5 s"):
        await playing
    assert not (tmp_path / "ends").exists()


@pytest.fixture
def nobody() -> Iterator[str]:
    """Yield an address at which nothing answers, as of a server that is restarted."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"


@pytest.mark.parametrize(
    ("kind", "options", "told"),
    [
        ("openenv", {"base_url": "ADDRESS"}, "ws://127.0.0.1:[0-9]+/ws cannot be reached"),
        ("mcp", {"servers": {"far": {"url": "ADDRESS/mcp"}}, "tools": ["look"]}, "The MCP server far cannot be opened"),
    ],
)
async def test_a_server_that_is_away_ends_no_worker_at_its_opening(
    nobody: str, kind: str, options: dict[str, Any], told: str
) -> None:
    """Before a run it is refused."""
    addressed = msgspec.json.decode(msgspec.json.encode(options).replace(b"ADDRESS", nobody.encode()))
    config = AgentConfig(kind=kind, options=addressed)
    with pytest.raises(ConfigError, match=f"agent.kind={kind}: {told}"):
        await AgentHosts.open(config, ImportRoots(), checks_servers=True)
    hosts = await AgentHosts.open(config, ImportRoots())
    with pytest.raises(UserCodeError, match=told):
        await play(hosts)
    await hosts.close()
