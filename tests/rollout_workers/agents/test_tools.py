"""The model calls typed functions: whatever becomes of a call, the model is told, it is counted, and the episode goes
on."""

import asyncio
import threading
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from headway.broker.errors import CallDeadlineError, ConfigError
from headway.broker.user_code.import_paths import ImportRoots
from headway.rollout_workers.agents.kinds import Agent, open_agent
from headway.rollout_workers.agents.tools.threads import EpisodeThread
from headway.rollout_workers.agents.tools.typed_functions import TypedFunction

from . import own_agents
from .scripted_episodes import Said, ScriptedEpisode, a_task, in_turn, of_role

UNREAD, BROKEN = "Error: the arguments of", "broken_arguments"
NAMES = (
    *("multiply", "where", "described", "fails", "exits", "exits_later", "exits_unsaid", "is_interrupted"),
    *("cancels_itself", "is_unsaid", "is_unheard", "stops", "hangs", "waits", "sleeps", "huge", "surrogate"),
)
HERE = "tests.rollout_workers.agents.own_agents"


def tools(*names: str, **options: Any) -> Agent:
    """Open an agent with functions of `own_agents`."""
    return open_agent("tools", {"tools": [f"{HERE}:{name}" for name in names], **options}, ImportRoots(("tests",)))


async def told(agent: Agent, *said: Said) -> tuple[list[str], Mapping[str, float]]:
    """Return what the model was told of its calls, and the measures."""
    episode = ScriptedEpisode(in_turn(*said, "done"))
    measures = await agent.rollout(episode, a_task())
    assert isinstance(measures, Mapping)
    return of_role(episode.conversation, "tool"), measures


def test_a_function_is_described_by_its_types_and_its_docstring() -> None:
    described = TypedFunction(own_agents.multiply, "tools").schema["function"]
    assert described == {
        "name": "multiply",
        "description": "Multiply two numbers.",
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"type": "integer", "description": "The first number."},
                "b": {"type": "integer", "description": "The second one."},
            },
            "required": ["a", "b"],
            "additionalProperties": False,
        },
    }


def test_types_of_ones_own_are_described_with_what_they_refer_to() -> None:
    parameters = TypedFunction(own_agents.where, "tools").schema["function"]["parameters"]
    assert parameters["required"] == ["point", "names"]
    assert parameters["properties"]["point"] == {"$ref": "#/$defs/Point"}
    assert parameters["$defs"]["Point"]["required"] == ["x"]
    assert parameters["properties"]["unit"] == {"enum": ["km", "m"]}


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("untyped", r"tools: untyped is no tool: the parameter a has no type; write a: str"),
        ("of_many", r"the parameter \*numbers: int has no single name"),
        ("of_object", r"its types cannot be written as JSON"),
    ],
)
def test_a_function_that_cannot_be_described_is_refused(name: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        tools(name)


def test_two_tools_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="2 tools have the name multiply"):
        tools("multiply", "multiply")


@pytest.mark.parametrize(
    ("name", "arguments", "said", "count"),
    [
        ("multiply", {"a": 6, "b": 7}, "42", None),
        ("where", {"point": {"x": 1}, "names": ["a"]}, '{"x":1,"y":0,"names":["a"],"unit":"m"}', None),
        ("multiplies", {}, "Error: there is no tool 'multiplies'; did you mean 'multiply'? Tools: ", "unknown_tools"),
        ("multiply", '{"a": 6, "b": ', f"{UNREAD} multiply cannot be read: Input data was truncated", BROKEN),
        (
            "multiply",
            {"a": "6", "b": 7},
            f"{UNREAD} multiply cannot be read: Expected `int`, got `str` - at `$.a`",
            BROKEN,
        ),
        ("multiply", {"a": 6}, f"{UNREAD} multiply cannot be read: Object missing required field `b`", BROKEN),
        ("multiply", {"a": 6, "b": 7, "c": 8}, f"{UNREAD} multiply cannot be read: Object contains unknown", BROKEN),
        ("multiply", "[" * 100_000, f"{UNREAD} multiply cannot be read: ", BROKEN),
        ("multiply", '"\ud800"', f"{UNREAD} multiply cannot be read: ", BROKEN),
        ("described", {"text": "long"}, f"{UNREAD} described cannot be read: Expected `str` of length <= 3", BROKEN),
        ("fails", {"reason": "x" * 5000}, "Error: fails raised KeyError: 'xxx", "tool_errors"),
        ("exits", "", "Error: exits called sys.exit(3)", "tool_errors"),
        ("exits_later", {}, "Error: exits_later called sys.exit(3)", "tool_errors"),
        ("exits_unsaid", {}, "Error: exits_unsaid called sys.exit()", "tool_errors"),
        ("is_interrupted", {}, "Error: is_interrupted raised KeyboardInterrupt", "tool_errors"),
        ("cancels_itself", {}, "Error: cancels_itself raised CancelledError", "tool_errors"),
        ("is_unsaid", {}, "Error: is_unsaid raised Unsaid", "tool_errors"),
        ("is_unheard", {}, "Error: is_unheard raised Unheard: no", "tool_errors"),
        ("stops", {}, "Error: stops raised StopIteration", "tool_errors"),
        ("hangs", {}, "Error: hangs ran past its deadline of 0.3 s", "tool_timeouts"),
        ("waits", {}, "Error: waits ran past its deadline of 0.3 s", "tool_timeouts"),
        ("sleeps", {"seconds": 30}, "Error: sleeps ran past its deadline of 0.3 s", "tool_timeouts"),
        ("huge", {"size": 10_000_000}, "x" * 2000 + "\n[cut: the first 2000 of 10000000 characters]", None),
        ("surrogate", {}, "?", None),
    ],
)
async def test_the_model_is_told_what_became_of_its_call(
    name: str, arguments: Any, said: str, count: str | None
) -> None:
    agent = tools(*NAMES, tool_s=0.3 if count == "tool_timeouts" else 600, max_tool_chars=2000)
    answers, measures = await told(agent, [(name, arguments), ("multiply", {"a": 2, "b": 3})])
    assert answers[0].startswith(said)
    assert len(answers[0]) < 2100
    assert answers[1] == "6"  # the episode goes on
    counts = ("tool_errors", "tool_timeouts", "unknown_tools", "broken_arguments")
    assert {one: measures[one] for one in counts} == {one: float(one == count) for one in counts}
    assert measures["tool_calls"] == 2


async def test_a_function_that_kept_a_processor_busy_is_interrupted() -> None:
    before = threading.active_count()
    await told(tools("hangs", "multiply", tool_s=0.2), [("hangs", {})] * 3, [("multiply", {"a": 1, "b": 1})])
    while threading.active_count() > before:  # noqa: ASYNC110 - the threads end by themselves, or the test hangs
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("kind", ["tools", "environment"])
async def test_calls_of_an_answer_that_was_cut_are_not_carried_out(kind: str) -> None:
    calls = [("guess", {"number": 7})] if kind == "environment" else [("multiply", {"a": 6, "b": 7})]
    cut = ScriptedEpisode(in_turn(calls, "done"), finish_reason="length")
    options = {"environment": f"{HERE}:WithTools"} if kind == "environment" else {"tools": [f"{HERE}:multiply"]}
    result = await open_agent(kind, options, ImportRoots(("tests",))).rollout(cut, a_task())
    assert len(cut.asked) == 1
    assert isinstance(result, Mapping)
    assert (result.get("tool_calls", 0.0), cut.rewards) == (0.0, [0.0] if kind == "environment" else [])


async def test_turns_are_bounded() -> None:
    episode = ScriptedEpisode(lambda messages: [("multiply", {"a": 1, "b": len(messages)})])
    measures = await tools("multiply", max_turns=4).rollout(episode, a_task())
    assert len(episode.asked) == 4
    assert isinstance(measures, Mapping)
    assert measures["tool_calls"] == 4


async def test_a_system_prompt_precedes_the_tasks_own() -> None:
    task = a_task()
    task = msgspec.structs.replace(task, messages=[{"role": "system", "content": "You count."}, *task.messages])
    episode = ScriptedEpisode(in_turn("done"))
    await tools("multiply", system_prompt="Be brief.").rollout(episode, task)
    assert of_role(episode.conversation, "system") == ["Be brief.\n\nYou count."]


async def test_a_thread_outlives_its_cancelled_caller_to_close() -> None:
    thread, begun, may_end, order = EpisodeThread(), threading.Event(), threading.Event(), list[str]()

    def slow() -> None:
        begun.set()
        may_end.wait()
        order.append("ended")

    calling = asyncio.create_task(thread.call(slow, deadline_s=600))
    await asyncio.to_thread(begun.wait)
    calling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await calling
    closing = asyncio.create_task(thread.close(SimpleNamespace(close=lambda: order.append("closed"))))
    await asyncio.sleep(0)
    may_end.set()
    await closing
    assert order == ["ended", "closed"]


async def test_a_deadline_of_the_function_itself_is_its_own_error() -> None:
    async def late() -> None:
        raise TimeoutError("its own")

    thread = EpisodeThread()
    with pytest.raises(TimeoutError, match="its own"):
        await thread.call(late, deadline_s=600)
    with pytest.raises(CallDeadlineError):
        await thread.call(asyncio.Event().wait, deadline_s=0.01)
    await thread.close()


async def test_what_closing_raises_is_passed_over() -> None:
    for closing in (own_agents.exits, lambda: own_agents.fails("x")):
        await EpisodeThread().close(SimpleNamespace(close=closing))
