"""Agents play over the real packages of others: TextArena, SkyRL-Gym, a server of OpenEnv, MCP servers."""

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from headway.broker.errors import CallDeadlineError, ConfigError
from headway.broker.installation import is_installed
from headway.broker.schema.agent_measures import is_reserved
from headway.broker.user_code.import_paths import ImportRoots
from headway.rollout_workers.agents.conversation import Message
from headway.rollout_workers.agents.episode import Outcome
from headway.rollout_workers.agents.kinds import Agent, open_agent
from headway.rollout_workers.agents.kinds.mcp import ServerFailedError
from headway.rollout_workers.agents.kinds.openenv import EnvironmentServerError

from .scripted_episodes import Model, Said, ScriptedEpisode, a_task, in_turn, of_role

PROGRAMS = Path(__file__).parent / "programs"
pytestmark = pytest.mark.skipif(
    not all(map(is_installed, ("textarena", "skyrl_gym", "openenv", "fastmcp"))),
    reason="TextArena, SkyRL-Gym and OpenEnv are in an environment of their own: make test-agents",
)
GAMES = [
    *("2048-v0-easy", "Bandit-v0", "Blackjack-v0", "Countdown-v0", "Cryptarithm-v0", "FifteenPuzzle-v0"),
    *("FrozenLake-v0", "GuessTheNumber-v0", "LightsOut-v0", "LogicPuzzle-v0", "Mastermind-v0", "Minesweeper-v0"),
    *("PegJump-v0", "RushHour-v0", "Secretary-v0", "Slitherlink-v0", "Sokoban-v0", "Sudoku-v0"),
    *("ThreeCardMonte-v0", "TowerOfHanoi-v0"),
]


def an_agent(kind: str, **options: Any) -> Agent:
    """Open an agent that may run python."""
    return open_agent(kind, options, ImportRoots(("tests", sys.executable), PROGRAMS))


async def play(agent: Agent, model: Model, **task: Any) -> tuple[dict[str, float], ScriptedEpisode]:
    """Play an episode; return its measures, and it."""
    episode = ScriptedEpisode(model)
    result: Outcome = await agent.rollout(episode, a_task(**task))
    assert isinstance(result, Mapping)
    assert not any(map(is_reserved, result))
    return dict(result), episode


def bisecting(most: int, form: str) -> Model:
    """Return a model that guesses numbers from 1 to `most` by what it is told."""
    low, high, guess = 1, most, 0

    def say(messages: list[Message]) -> Said:
        nonlocal low, high, guess
        said = messages[-1]["content"]
        low, high = guess + 1 if "higher" in said and guess else low, guess - 1 if "lower" in said and guess else high
        guess = (low + high) // 2
        return form.format(guess)

    return say


async def test_textarena_is_won_by_who_reads_what_it_says() -> None:
    agent = an_agent("textarena", game="GuessTheNumber-v0")
    result, episode = await play(agent, bisecting(20, "[{}]"))
    assert result["reward"] == 1.0
    assert result["ended"] == 1.0
    said = of_role(episode.conversation, "user")
    assert "between 1 and 20" in said[0]
    assert all(len(hint) < 60 for hint in said[1:])  # and not the whole history anew


@pytest.mark.parametrize("game", GAMES)
async def test_textarenas_games_are_the_same_for_all_samples_of_a_group(game: str) -> None:
    agent = an_agent("textarena", game="GuessTheNumber-v0", max_turns=6)
    moves = ["[up]", "[1]", "[left]", "[A 1]", "[0 1]", "[right]"]
    played = await asyncio.gather(*(play(agent, in_turn(*moves), game=game, seed=5) for _ in range(2)))
    (first, one), (second, other) = played
    assert first == second
    assert one.conversation == other.conversation


async def test_textarenas_games_for_several_players_are_refused() -> None:
    with pytest.raises(AssertionError, match="number of players"):
        await play(an_agent("textarena", game="TicTacToe-v0"), in_turn("[1]"))
    with pytest.raises(ConfigError, match=r"no game 'GuessTheNumbr-v0'; did you mean 'GuessTheNumber-v0'"):
        an_agent("textarena", game="GuessTheNumbr-v0")


async def test_skyrl_gyms_own_environments_score_an_answer() -> None:
    agent = an_agent("skyrl_gym", environment="gsm8k")
    _, episode = await play(agent, in_turn("#### 42"), ground_truth="42")
    assert episode.rewards == [1.0]
    _, episode = await play(agent, in_turn("#### 41"), ground_truth="42")
    assert episode.rewards == [0.0]
    several = an_agent("skyrl_gym", environment="gsm8k_multi_turn", max_turns=3)
    _, episode = await play(several, in_turn("no", "no", "#### 42"), ground_truth="42")
    assert len(episode.asked) == 3
    assert len(of_role(episode.conversation, "user")) == 3
    with pytest.raises(ConfigError, match=r"skyrl-gym has no 'gsm'. Known: aime, gsm8k"):
        an_agent("skyrl_gym", environment="gsm")


async def cancelled_while_the_model_thinks(agent: Agent) -> None:
    """Begin an episode, and cancel it at its first call of the model."""
    asked, episode = asyncio.Event(), ScriptedEpisode(in_turn())

    async def never(path: str, given: dict[str, Any]) -> Any:
        asked.set()
        await asyncio.Event().wait()

    episode._call = never
    playing = asyncio.create_task(agent.rollout(episode, a_task()))
    asking = asyncio.create_task(asked.wait())
    await asyncio.wait([asking, playing], return_when=asyncio.FIRST_COMPLETED)
    playing.cancel()
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing


def free_port() -> int:
    """Return a port that nothing listens on."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port: int = listening.getsockname()[1]
        return port


def served(port: int, *command: str) -> Iterator[str]:
    """Run a server until the test ends; yield its address once it listens."""
    process = subprocess.Popen([sys.executable, *command], env={**os.environ, "NO_PROXY": "127.0.0.1"})
    try:
        while True:
            assert process.poll() is None, "the server ended"
            with socket.socket() as connecting:
                if connecting.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def openenv(tmp_path: Path) -> Iterator[str]:
    """Serve the environment of `openenv_server.py`, one at a time."""
    port = free_port()
    yield from served(port, str(PROGRAMS / "openenv_server.py"), str(port), str(tmp_path / "log"))


async def test_openenvs_environments_play_one_after_another_where_there_is_room_for_one(
    openenv: str, tmp_path: Path
) -> None:
    agent = an_agent("openenv", base_url=openenv, observation_field="said")
    played = await asyncio.gather(*(play(agent, bisecting(20, "{}"), hint=" Up to 20.") for _ in range(3)))
    for result, episode in played:
        assert result["reward"] == 0.0
        assert episode.rewards[-1] == 1.0
        assert of_role(episode.conversation, "user")[0] == "Guess. Up to 20."
    assert (tmp_path / "log").read_text().count("opened") >= 3


async def test_openenvs_observations_are_read_as_a_whole_or_by_a_field(openenv: str) -> None:
    _, episode = await play(an_agent("openenv", base_url=openenv), in_turn("7"))
    assert '"said":"Guess."' in episode.conversation[0]["content"]
    with pytest.raises(EnvironmentServerError, match="failed at step: 'it is broken'"):
        await play(an_agent("openenv", base_url=openenv), in_turn("break"))
    with pytest.raises(EnvironmentServerError, match=r"failed at step"):
        await play(an_agent("openenv", base_url=openenv, action_field="text"), in_turn("7"))
    with pytest.raises(EnvironmentServerError, match=r"cannot be reached"):
        await play(an_agent("openenv", base_url=f"http://127.0.0.1:{free_port()}"), in_turn("7"))


async def test_a_cancelled_episode_closes_its_environment_at_openenvs_server(openenv: str, tmp_path: Path) -> None:
    await cancelled_while_the_model_thinks(an_agent("openenv", base_url=openenv))
    log = tmp_path / "log"
    while log.read_text().count("closed") < log.read_text().count("opened"):  # noqa: ASYNC110 - a server makes it so
        await asyncio.sleep(0.01)


def counting(**options: Any) -> Agent:
    """Open an agent with the server of `mcp_server.py` as a program."""
    server = {"command": [sys.executable, str(PROGRAMS / "mcp_server.py")], "environment": {"MINE": "1"}}
    return an_agent("mcp", servers={"counting": server}, **options)


async def test_an_mcp_server_plays_each_episode_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWAY_BROKER", "secret")
    agent = counting()
    assert agent.resume == "restart"
    said: list[Said] = [[("add", {"number": 2}), ("add", {"number": 3})], [("process", {})], "done"]
    played = await asyncio.gather(*(play(agent, in_turn(*said)) for _ in range(2)))
    told = [of_role(episode.conversation, "tool") for _, episode in played]
    assert [one[:2] for one in told] == [["2", "5"]] * 2
    processes = [one[2].split("\n") for one in told]
    assert [one[1:] for one in processes] == [["MINE"]] * 2
    assert not any(psutil.pid_exists(int(one[0])) for one in processes)


async def test_the_model_is_told_what_became_of_its_calls_of_mcp_tools() -> None:
    calls = [
        ("fail", {"reason": "no"}),
        ("add", {"number": "x"}),
        ("add", "{"),
        ("subtract", {}),
        ("sleep", {"seconds": 9}),
    ]
    result, episode = await play(counting(tool_s=2.0), in_turn(calls, "done"))
    told = of_role(episode.conversation, "tool")
    assert told[0].startswith("Error: fail failed: ")
    assert told[1].startswith("Error: add failed: ")
    assert told[2].startswith("Error: the arguments of add cannot be read: ")
    assert told[3].startswith("Error: there is no tool 'subtract'")
    assert told[4] == "Error: sleep ran past its deadline of 2 s"
    counts = ("tool_errors", "tool_timeouts", "unknown_tools", "broken_arguments")
    assert [result[name] for name in counts] == [2, 1, 1, 1]


async def test_tools_of_an_mcp_server_are_chosen_by_name() -> None:
    _, episode = await play(counting(tools=["add"]), in_turn("done"))
    assert [tool["function"]["name"] for tool in episode.asked[0]["tools"]] == ["add"]
    assert episode.asked[0]["tools"][0]["function"]["parameters"]["required"] == ["number"]
    with pytest.raises(ServerFailedError, match="no MCP server offers subtract"):
        await play(counting(tools=["subtract"]), in_turn("done"))


async def test_an_mcp_server_that_cannot_be_opened_is_named() -> None:
    broken = {"command": [sys.executable, "-c", "raise SystemExit(3)"]}
    with pytest.raises(ServerFailedError, match="The MCP server broken cannot be opened"):
        await play(an_agent("mcp", servers={"broken": broken}), in_turn("done"))
    far = {"url": f"http://127.0.0.1:{free_port()}/mcp"}
    with pytest.raises(ServerFailedError, match="The MCP server far cannot be opened"):
        await play(an_agent("mcp", servers={"far": far}), in_turn("done"))


async def test_an_error_of_the_episode_passes_through_the_sessions_of_mcp() -> None:
    def fails(messages: list[Message]) -> Said:
        raise CallDeadlineError("the endpoint's own")

    with pytest.raises(CallDeadlineError, match="the endpoint's own"):
        await play(counting(), fails)


@pytest.fixture
def mcp_address() -> Iterator[str]:
    """Serve `mcp_server.py` over HTTP."""
    port = free_port()
    yield from served(port, str(PROGRAMS / "mcp_server.py"), str(port))


async def test_an_mcp_server_is_reached_over_http(mcp_address: str) -> None:
    agent = an_agent("mcp", servers={"far": {"url": f"{mcp_address}/mcp", "headers": {"X-Key": "1"}}})
    _, episode = await play(agent, in_turn([("add", {"number": 4})], "done"))
    assert of_role(episode.conversation, "tool") == ["4"]


async def test_a_cancelled_episode_ends_its_mcp_servers() -> None:
    before = {process.pid for process in psutil.Process().children()}
    await cancelled_while_the_model_thinks(counting())
    assert {process.pid for process in psutil.Process().children()} <= before
