"""Each kind of agent plays an episode to its end, ends in order without room, frees what it holds, and refuses what it
does not understand."""

import asyncio
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from headway.broker.errors import CallDeadlineError, ConfigError, HeadwayError
from headway.broker.schema.agent_measures import is_reserved
from headway.broker.user_code.import_paths import ImportRoots
from headway.rollout_workers.agents.episode import Outcome
from headway.rollout_workers.agents.kinds import (
    KINDS,
    Agent,
    ShapeError,
    check_agent,
    check_named,
    named_by,
    open_agent,
)
from headway.rollout_workers.agents.tasks import TASKS

from . import own_agents
from .scripted_episodes import Said, ScriptedEpisode, a_task, in_turn, of_role

HERE = "tests.rollout_workers.agents.own_agents"
PROGRAM = Path(__file__).parent / "programs" / "program.py"


@pytest.fixture(autouse=True)
def closed() -> Iterator[list[str]]:
    """Empty the list of what was closed."""
    own_agents.closed.clear()
    yield own_agents.closed
    own_agents.closed.clear()


def roots(*named: str) -> ImportRoots:
    """Return roots below which the tests' own modules lie."""
    return ImportRoots(("tests", *named), PROGRAM.parent)


def an_agent(kind: str, **options: Any) -> Agent:
    """Open an agent of these tests; `@name` stands for an import path of theirs."""
    paths = {name: f"{HERE}:{value[1:]}" for name, value in options.items() if str(value)[:1] == "@"}
    path = f"{HERE}:{kind[1:]}" if kind[0] == "@" else kind
    return open_agent(path, {**options, **paths}, roots("python"))


def tools(*names: str, **options: Any) -> Agent:
    """Open an agent with functions of `own_agents`."""
    return an_agent("tools", tools=[f"{HERE}:{name}" for name in names], **options)


async def play(agent: Agent, *said: Said, **task: Any) -> tuple[Outcome, ScriptedEpisode]:
    """Play an episode in which the model says these things."""
    episode = ScriptedEpisode(in_turn(*said))
    return await agent.rollout(episode, a_task(**task)), episode


Played = tuple[str, dict[str, Any], list[Said], dict[str, Any], float | None, dict[str, float], list[float]]
PLAYED: dict[str, Played] = {
    "function": ("@rollout", {"reward": 0.25}, ["yes"], {}, 0.25, {}, []),
    "measures": ("@measured", {}, ["four"], {}, 0.5, {"length": 4.0}, []),
    "class": ("@Player", {"reward": 2.0}, ["yes"], {}, 2.0, {}, []),
    "tools": (
        "tools",
        {"tools": [f"{HERE}:multiply"]},
        [[("multiply", {"a": 6, "b": 7})], "42"],
        {},
        None,
        {"tool_calls": 1.0, "tool_errors": 0.0},
        [],
    ),
    "factory": (
        "environment_factory",
        {"factory": "@Desk"},
        [[("note", {"number": 5}), ("count", {})], "done"],
        {"answer": 5},
        1.0,
        {"tool_calls": 2.0},
        [],
    ),
    "environment": ("environment", {"environment": "@Guess"}, ["3", "9", "7"], {}, 0.0, {"guesses": 3.0}, [0, 0, 1]),
    "gymnasium": ("environment", {"environment": "@Gymnasium"}, ["3", "9", "8"], {}, 0.0, {"steps": 3.0}, [0, 0, 0]),
    "with tools": (
        "environment",
        {"environment": "@WithTools"},
        [[("guess", {"number": 3}), ("guess", {"number": 7}), ("guess", {"number": 1})]],
        {},
        0.0,
        {"steps": 1.0},
        [1],
    ),
    "skyrl_gym": (
        "skyrl_gym",
        {"environment": "@Sum", "env_config": {"hint": "Again."}},
        ["41", "42"],
        {"ground_truth": "42"},
        0.0,
        {"tries": 2.0, "steps": 2.0},
        [0, 1],
    ),
    "verl_agent_loop": (
        "verl_agent_loop",
        {"loop": "@Loop", "trainer_config": {"actor": {"length": 5}}, "sampling_params": {"temperature": 1.0}},
        ["a", "b"],
        {},
        0.75,
        {"num_turns": 4.0, "tries": 2.0},
        [],
    ),
    "command": (
        "command",
        {"command": ["python", "./program.py", "reward"]},
        [],
        {},
        0.5,
        {"seed": 7.0},
        [],
    ),
}
NO_PEER = [name for name in PLAYED if name != "command"]


@pytest.mark.parametrize("name", PLAYED)
async def test_an_episode_is_played_to_its_end(name: str) -> None:
    kind, options, said, task, reward, measures, rewards = PLAYED[name]
    agent = an_agent(kind, **options)
    result, episode = await play(agent, *said, **task)
    await agent.close()
    await agent.close()
    told = dict(result) if isinstance(result, Mapping) else {} if result is None else {"reward": result}
    assert told.get("reward") == reward
    assert {name: told[name] for name in measures} == measures
    assert not any(map(is_reserved, told))
    assert episode.rewards == rewards
    assert len(episode.asked) == len(said)
    assert agent.resume in ("replay", "restart")


@pytest.mark.parametrize("name", [name for name in NO_PEER if name not in ("verl_agent_loop",)])
async def test_an_answer_without_room_ends_an_episode_in_order(name: str) -> None:
    kind, options, _, task, _, _, _ = PLAYED[name]
    _, episode = await play(an_agent(kind, **options), **task)
    assert len(episode.asked) == 1
    assert episode.rewards == []


@pytest.mark.parametrize(
    "name", [name for name in NO_PEER if PLAYED[name][0] in ("environment", "environment_factory")]
)
async def test_what_an_episode_made_is_closed_in_its_thread(name: str, closed: list[str]) -> None:
    kind, options, said, task, _, _, _ = PLAYED[name]
    await play(an_agent(kind, **options), *said, **task)
    assert len(closed) == 1


@pytest.mark.parametrize("name", NO_PEER)
async def test_episodes_play_side_by_side(name: str) -> None:
    kind, options, said, task, _, _, rewards = PLAYED[name]
    agent = an_agent(kind, **options)
    played = await asyncio.gather(*(play(agent, *said, **task) for _ in range(5)))
    assert [episode.rewards for _, episode in played] == [rewards] * 5


@pytest.mark.parametrize("name", NO_PEER)
async def test_a_cancelled_episode_is_freed(name: str, closed: list[str]) -> None:
    kind, options, _, task, _, _, _ = PLAYED[name]
    episode = ScriptedEpisode(in_turn())
    asked = asyncio.Event()

    async def never(path: str, given: dict[str, Any]) -> Any:
        asked.set()
        await asyncio.Event().wait()

    episode._call = never
    playing = asyncio.create_task(an_agent(kind, **options).rollout(episode, a_task(**task)))
    await asked.wait()
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing
    assert len(closed) == (kind in ("environment", "environment_factory", "skyrl_gym"))


def test_every_kind_is_opened_and_an_unknown_one_is_named() -> None:
    played = {kind for kind, *_ in PLAYED.values()}
    assert set(KINDS) - set(TASKS) - played == {"external", "mcp", "openenv", "textarena"}  # which need their packages
    with pytest.raises(
        ConfigError, match=r"agent.kind: there is no 'tool'; did you mean 'tools'\? Known: .*command, .*"
    ):
        open_agent("tool", {}, roots())


@pytest.mark.parametrize(
    ("kind", "options", "says"),
    [
        (
            "tools",
            {"tools": [f"{HERE}:multiply"], "max_turn": 3},
            r"agent.options.max_turn: .*did you mean 'max_turns'",
        ),
        ("tools", {"tools": []}, r"length >= 1"),
        ("environment", {}, r"missing required field `environment`"),
        ("command", {"command": "ls"}, r"Expected `array`"),
    ],
)
def test_options_are_checked_without_importing_what_they_name(kind: str, options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        check_agent(kind, options)


@pytest.mark.parametrize(
    ("kind", "options", "says"),
    [
        ("@plain", {}, r"write async def rollout\(episode, task\)"),
        ("@of_one_argument", {}, r"too many positional arguments"),
        ("@rollout", {"rewards": 1.0}, r"rollout\(episode, task, rewards=...\): got an unexpected keyword argument"),
        ("@NoRollout", {}, r"is no agent"),
        ("@Player", {}, r"cannot be made: TypeError"),
        ("@BadResume", {"reward": 1.0}, r"its attribute resume is 'again'; it must be 'replay' or 'restart'"),
        ("@absent", {}, r"has no 'absent'"),
        ("os:system", {}, r"standard library"),
        ("environment", {"environment": "@NoRollout"}, r"NoRollout lacks reset, step\(\)"),
        ("environment_factory", {"factory": "@Toolless"}, r"Toolless has no public method"),
        ("skyrl_gym", {"environment": "@Guess"}, r"Guess lacks init\(\); an environment of SkyRL-Gym's shape"),
        ("verl_agent_loop", {"loop": "@Guess"}, r"Guess lacks run\(\)"),
        ("command", {"command": ["rm", "-r"]}, r"'rm' is not run: .* --allow-import rm"),
        ("command", {"command": ["../own_agents.py"]}, r"is not run"),
        ("openenv", {"base_url": "8000"}, r"is no address such as"),
        ("mcp", {"servers": {"one": {}}}, r"servers.one: give it either a command or a url"),
        ("mcp", {"servers": {"one": {"command": ["rm"]}}}, r"'rm' is not run"),
    ],
)
def test_an_agent_that_lacks_something_is_refused(kind: str, options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        an_agent(kind, **options)


@pytest.mark.parametrize(
    ("kind", "options", "says"),
    [
        (
            "environment",
            {"environment": "@Wrong", "arguments": {"returns": "no"}},
            r"Wrong: step returned 'no'; it must",
        ),
        (
            "environment",
            {"environment": "@Wrong", "arguments": {"returns": [1, 2]}},
            r"\(observation, reward, done, info\)",
        ),
        (
            "environment",
            {"environment": "@Wrong", "arguments": {"returns": ["", 0, 1, {}]}},
            r"done is 1; it must be True",
        ),
        ("environment", {"environment": "@Wrong", "arguments": {"returns": ["", "x", True, {}]}}, r"reward is 'x'"),
        ("environment", {"environment": "@Wrong", "arguments": {"returns": ["", 0, False, {}]}}, r"says nothing"),
        ("skyrl_gym", {"environment": "@WrongSum", "env_config": {"hint": ""}}, r"WrongSum: step returned \(\[\], 1.0"),
        (
            "verl_agent_loop",
            {"loop": "@HotLoop", "trainer_config": {"actor": {"length": 5}}},
            r"temperature unlike what run was given",
        ),
    ],
)
async def test_what_is_not_understood_is_an_error_that_names_it(kind: str, options: dict[str, Any], says: str) -> None:
    with pytest.raises(ShapeError, match=says):
        await play(an_agent(kind, **options), "one", "two")


async def test_an_environment_that_hangs_ends_its_episode_alone(closed: list[str]) -> None:
    agent = an_agent("environment", environment="@Hanging", step_s=0.2)
    with pytest.raises(CallDeadlineError, match=r"ran past its deadline of 0.2 s"):
        await play(agent, "one")
    assert closed == ["Hanging"]  # in its thread, which was interrupted


async def test_resuming_is_said_by_the_code_or_the_options() -> None:
    assert an_agent("@Player", reward=1.0).resume == "restart"
    assert an_agent("@rollout").resume == "replay"
    assert tools("multiply").resume == "replay"
    assert tools("multiply", resume="restart").resume == "restart"


async def test_what_an_agent_closes_is_closed(closed: list[str]) -> None:
    await an_agent("@Player", reward=1.0).close()
    assert closed == ["player"]


async def test_the_models_conversation_has_what_was_said() -> None:
    _, episode = await play(an_agent("environment_factory", factory="@Desk", system_prompt="Be brief."), "ok", answer=1)
    assert episode.conversation == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is 6 * 7? Note the answer."},
    ]
    assert [tool["function"]["name"] for tool in episode.asked[0]["tools"]] == ["note", "count"]
    _, episode = await play(an_agent("environment", environment="@Guess"), "3", "9", "7")
    assert of_role(episode.conversation, "user") == ["Guess.", "higher", "lower"]


async def test_a_row_that_lacks_an_argument_is_named() -> None:
    with pytest.raises(ShapeError, match=r"Desk: reset: missing a required .*'answer'. It can be given .*ground_truth"):
        await play(an_agent("environment_factory", factory="@Desk"), "ok")


def test_the_operator_is_asked_for_each_path_and_program() -> None:
    named = [
        *named_by("my:rollout", {}),
        *named_by("tools", {"tools": ["a:b", "a:c"]}),
        *named_by("skyrl_gym", {"environment": "gsm8k"}),
        *named_by("skyrl_gym", {"environment": "my:Env"}),
        *named_by("command", {"command": ["node", "agent.js"]}),
        *named_by("mcp", {"servers": {"files": {"command": ["npx", "x"]}, "far": {"url": "http://x"}}}),
    ]
    assert [name for _, name in named] == ["my:rollout", "a:b", "a:c", "my:Env", "node", "npx"]
    assert named[-1][0] == "agent.options.servers.files.command"
    check_named("python", roots("python"), "agent")
    check_named("./program.py", roots(), "agent")
    with pytest.raises(ConfigError, match="--allow-import node"):
        check_named("node", roots(), "agent")
    with pytest.raises(HeadwayError, match="belongs neither to Headway"):
        check_named("msgspec:Struct", roots(), "agent")
