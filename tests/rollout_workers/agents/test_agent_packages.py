"""Agents' packages as they are play episodes in programs of their own: openai-agents, smolagents, mini-swe-agent.

`make test-agents` runs these, in an environment that has them.
"""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from headway.broker.installation import is_installed
from headway.broker.user_code.import_paths import ImportRoots
from headway.rollout_workers.agents.endpoint.server import Endpoint
from headway.rollout_workers.agents.episode import AgentEpisode, Outcome
from headway.rollout_workers.agents.kinds import open_agent

from .scripted import ScriptedSessions
from .scripted_episodes import a_task
from .sessions import Attempt, Engine

PROGRAMS = Path(__file__).parent / "programs"
pytestmark = pytest.mark.skipif(
    not all(map(is_installed, ("agents", "smolagents", "minisweagent"))),
    reason="agents' packages are in an environment of their own: make test-agents",
)
OFFLINE = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "MSWEA_COST_TRACKING": "ignore_errors",
    "MSWEA_GLOBAL_CONFIG_DIR": ".",
    "MSWEA_SILENT_STARTUP": "1",
}
"""The packages' own settings by which they ask nobody but the endpoint."""


async def never(path: str, asked: dict[str, Any]) -> Any:
    raise AssertionError("a program calls over HTTP")


async def play(program: list[str], *said: str) -> tuple[Outcome, Attempt, Engine]:
    """Have a program play an episode, whose model says these texts."""
    engine, sessions = Engine(*said), ScriptedSessions()
    attempt = Attempt(engine, most_tokens=200_000, max_model_len=100_000)
    sessions.by_name["lease"] = attempt.session
    endpoint = await Endpoint.start(sessions)
    name, *arguments = program
    options = {"command": [sys.executable, f"./{name}.py", *arguments], "environment": OFFLINE}
    agent = open_agent("command", options, ImportRoots((sys.executable,), PROGRAMS))
    try:
        episode = AgentEpisode(endpoint.url_of("lease"), "lease", never)
        return await agent.rollout(episode, a_task(ground_truth="42")), attempt, engine
    finally:
        await agent.close()
        await endpoint.close()


def called(name: str, **arguments: str) -> str:
    """Return what the model says to call a tool."""
    return f"!{name} {json.dumps(arguments)}"


def check(attempt: Attempt, engine: Engine, *said: str) -> None:
    """Assert that the record has the engine's own tokens, in their order, and each turn what the engine read."""
    assert len(engine.asked) == len(said) == attempt.session.counts["turns"]
    for number, (asked, text) in enumerate(zip(engine.asked, said, strict=True)):
        turn = attempt.recorder.turn(number)
        assert list(turn.context) == asked.prompt_tokens
        assert "".join(map(chr, turn.token_ids[:-1])) == text
        assert list(turn.logprobs) == [engine.logprob - place for place in range(len(turn.token_ids))]


def goes_on(attempt: Attempt, engine: Engine, number: int) -> bool:
    """Return whether a turn begins with all tokens of the turn before."""
    before = attempt.recorder.row(number - 1)
    return engine.asked[number].prompt_tokens[: len(before)] == before


@pytest.mark.parametrize("interface", ["chat_completions", "responses"])
async def test_openai_agents_go_on_with_the_tokens_that_were_sampled(interface: str) -> None:
    said = [called("calculate", expression="6*7"), '!calculate {"expression":"6 * 7" }', "so #42"]
    result, attempt, engine = await play(["with_openai_agents", interface], *said)
    assert result == {"reward": 1.0}
    check(attempt, engine, *said)
    assert attempt.session.counts["forks"] == 0
    assert all(goes_on(attempt, engine, number) for number in (1, 2))


async def test_mini_swe_agent_goes_on_with_the_tokens_that_were_sampled() -> None:
    submits = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
    said = [called("bash", command="echo $((6*7))"), called("bash", command=f"{submits}; echo 42")]
    result, attempt, engine = await play(["with_mini_swe_agent"], *said)
    assert result == {"reward": 1.0}
    check(attempt, engine, *said)
    assert attempt.session.counts["forks"] == 0
    assert goes_on(attempt, engine, 1)
    assert "42" in "".join(map(chr, engine.asked[1].prompt_tokens[len(attempt.recorder.row(0)) :]))


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("ToolCallingAgent", [called("calculate", expression="6*7"), called("final_answer", answer="42")]),
        ("CodeAgent", ["<code>\nprint(calculate('6*7'))\n</code>", "<code>\nfinal_answer(42)\n</code>"]),
    ],
)
async def test_smolagents_write_each_answer_anew_so_that_each_turn_is_a_branch(kind: str, said: list[str]) -> None:
    """An answer comes back with `Calling tools:` behind it, and not as it was sampled."""
    result, attempt, engine = await play(["with_smolagents", kind], *said)
    assert result == {"reward": 1.0}
    check(attempt, engine, *said)
    assert attempt.session.counts["forks"] == 1
    assert not goes_on(attempt, engine, 1)
