"""Each task that ships: an ideal player reaches reward 1, an empty or a random one about 0, and a replay is exact."""

import copy
import json
import random
import re
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from headway.broker.errors import ConfigError
from headway.broker.schema.agent_measures import is_reserved
from headway.broker.user_code.import_paths import ImportRoots
from headway.rollout_workers.agents.conversation import Message
from headway.rollout_workers.agents.episode import AgentEpisode, AgentTask
from headway.rollout_workers.agents.kinds import KINDS, open_agent
from headway.rollout_workers.agents.tasks import TASKS, task_parts
from headway.rollout_workers.agents.tasks.calculator import Calculator, CalculatorOptions, calculated
from headway.rollout_workers.agents.tasks.guess_number import GuessNumber, GuessNumberOptions
from headway.rollout_workers.agents.tasks.retail import RULES, Retail, RetailOptions
from headway.rollout_workers.agents.tasks.retail_desk import ITEMS, REASONS
from headway.rollout_workers.agents.tasks.retrieval import PassageIndex, Retrieval, RetrievalOptions
from headway.rollout_workers.agents.tasks.text_game import DIRECTIONS, TextGame, TextGameOptions
from headway.rollout_workers.agents.tools.toolbox import ToolError, ToolLimits

Says = str | tuple[str, dict[str, Any]] | list[tuple[str, dict[str, Any]]]
"""A text, or calls: (name, arguments)."""
Player = Callable[[list[Message]], Says]
SEEDS = range(12)
NAMES = {"find_customer", "get_order", "cancel_order", "change_address", "return_order", "exchange_order"}


class Stage:
    """Answers the calls of an episode as a player says, and keeps what it was asked."""

    def __init__(self, player: Player, finish_reason: str = "", turns: int = 10**9) -> None:
        self._player, self._finish_reason, self._turns = player, finish_reason, turns
        self.asked: list[dict[str, Any]] = []
        self.episode = AgentEpisode("", "", self._call)

    async def _call(self, path: str, asked: dict[str, Any]) -> Any:
        assert path == "turn"
        self.asked.append(copy.deepcopy(asked))
        is_over = len(self.asked) > self._turns
        says = "" if is_over else self._player(asked["messages"])
        made = [] if isinstance(says, str) else [says] if isinstance(says, tuple) else says
        calls = [
            {"id": f"c{len(self.asked)}-{number}", "name": name, "arguments": json.dumps(arguments)}
            for number, (name, arguments) in enumerate(made)
        ]
        return {
            "content": says if isinstance(says, str) else "",
            "tool_calls": calls,
            "message": {"role": "assistant", "content": says if isinstance(says, str) else None},
            "finish_reason": self._finish_reason or ("tool_calls" if calls else "stop"),
            "token_ids": [] if is_over else [1],
        }


async def play(agent: Any, player: Player, task: AgentTask, **stage: Any) -> Mapping[str, float]:
    """Return the outcome, none of whose measures has a name of the worker's own."""
    outcome = await agent.rollout(Stage(player, **stage).episode, task)
    assert isinstance(outcome, dict)
    assert 0 <= outcome["reward"] <= 1
    assert not any(map(is_reserved, outcome))
    return outcome


def opened(kind: Any, options: Any) -> Any:
    return kind(options, ImportRoots(), "agent.options")


def task_of(text: str = "go", truth: Any = None, seed: int = 0, **extra_info: Any) -> AgentTask:
    messages = [{"role": "user", "content": text}]
    return AgentTask(id="t", text=text, messages=messages, ground_truth=truth, seed=seed, extra_info=extra_info)


def said(messages: list[Message]) -> str:
    return str(messages[-1]["content"])


def silent(messages: list[Message]) -> str:
    return ""


# --- calculator


def works_out(messages: list[Message]) -> Says:
    """Call the calculator for the next operation, from left to right."""
    first, *steps = re.findall(r"([-+*]?)(\d+)", messages[0]["content"])
    results = [message["content"] for message in messages if message["role"] == "tool"]
    value = results[-1] if results else first[1]
    if len(results) == len(steps):
        return f"#{value}"
    sign, number = steps[len(results)]
    return "calculate", {"expression": f"{value}{sign}{number}"}


async def test_a_chain_worked_out_by_the_calculator_is_right() -> None:
    outcome = await play(opened(Calculator, CalculatorOptions()), works_out, task_of("^47*12+83=", "47", modulus=100))
    assert (outcome["reward"], outcome["tool_calls"]) == (1.0, 2.0)
    assert (await play(opened(Calculator, CalculatorOptions()), works_out, task_of("47*12+83", 647)))["reward"] == 1.0


@pytest.mark.parametrize("answer", ["", "47", "#48", "#", "#47 or 48"])
async def test_a_wrong_or_unmarked_result_is_worth_nothing(answer: str) -> None:
    agent = opened(Calculator, CalculatorOptions())
    assert (await play(agent, lambda _: answer, task_of("^47*12+83=", "47", modulus=100)))["reward"] == 0.0


async def test_a_cut_or_late_answer_is_worth_nothing() -> None:
    agent, task = opened(Calculator, CalculatorOptions(max_turns=3)), task_of("1+1=", "2")
    assert (await play(agent, lambda _: "#2", task))["reward"] == 1.0
    assert (await play(agent, lambda _: "#2", task, finish_reason="length"))["reward"] == 0.0
    assert (await play(agent, lambda _: "#2", task, turns=0))["reward"] == 0.0
    assert (await play(agent, lambda _: ("calculate", {"expression": "1"}), task))["tool_calls"] == 3.0


@pytest.mark.parametrize(
    ("expression", "value"),
    [("12*(3+4)", "84"), ("-2--3", "1"), ("1/8", "0.125"), ("0.1+0.2", "0.3"), (" 7 ", "7"), ("10/5", "2")],
)
def test_the_calculator_is_exact(expression: str, value: str) -> None:
    assert calculated(expression) == value


@pytest.mark.parametrize(
    "expression",
    ["", "1+", "2**9", "x", "True", "1/0", "'a'*9", "__import__('os')", "9" * 201, "(" * 150, "9" * 61, "1;2", "1j",
     "*".join(["9" * 40] * 2), "1,2", "\x00"],
)  # fmt: skip
def test_the_calculator_refuses_all_else(expression: str) -> None:
    with pytest.raises(ToolError):
        calculated(expression)


def test_a_modulus_wraps_whole_numbers_alone() -> None:
    assert calculated("3-5", 100) == "98"
    with pytest.raises(ToolError, match="whole numbers below 100"):
        calculated("1/2", 100)


async def test_a_broken_call_is_answered_and_counted() -> None:
    broken: Says = [("calculate", {}), ("calculat", {"expression": "1"}), ("calculate", {"expression": [1]})]
    stage = Stage(lambda messages: broken if len(messages) == 1 else "#2")
    outcome = await opened(Calculator, CalculatorOptions()).rollout(stage.episode, task_of("1+1=", "2"))
    assert isinstance(outcome, dict)
    assert (outcome["broken_arguments"], outcome["unknown_tools"], outcome["reward"]) == (2.0, 1.0, 1.0)
    answers = [message["content"] for message in stage.asked[1]["messages"][2:]]
    assert [answer.startswith("Error: ") for answer in answers] == [True] * 3
    assert [message["tool_call_id"] for message in stage.asked[1]["messages"][2:]] == ["c1-0", "c1-1", "c1-2"]


async def test_a_model_of_few_characters_reads_a_short_error() -> None:
    stage = Stage(lambda messages: ("calculate", {"expression": "1/0"}) if len(messages) == 1 else "#2")
    await opened(Calculator, CalculatorOptions(error_text="?")).rollout(stage.episode, task_of("1+1=", "2"))
    assert said(stage.asked[1]["messages"]) == "?"


async def test_only_so_many_calls_of_a_turn_are_carried_out() -> None:
    many = [("calculate", {"expression": "1"})] * (ToolLimits().max_calls + 2)
    outcome = await play(
        opened(Calculator, CalculatorOptions()),
        lambda messages: many if len(messages) == 1 else "#2",
        task_of("1+1=", "2"),
    )
    assert outcome["tool_errors"] == 2.0


# --- guess a number


def halves(messages: list[Message]) -> str:
    low, high = 1, 1000
    for before, after in zip(messages[1::2], messages[2::2], strict=True):
        guess = int(before["content"])
        low, high = (guess + 1, high) if after["content"] == "Higher." else (low, guess - 1)
    return str((low + high) // 2)


@pytest.mark.parametrize("seed", SEEDS)
async def test_halving_finds_the_number(seed: int) -> None:
    assert (await play(opened(GuessNumber, GuessNumberOptions()), halves, task_of(seed=seed)))["reward"] == 1.0


async def test_unclear_and_random_guesses_do_not() -> None:
    agent, rng = opened(GuessNumber, GuessNumberOptions()), random.Random(0)
    assert await play(agent, silent, task_of()) == {"reward": 0.0, "guesses": 10.0}
    rewards = [
        (await play(agent, lambda _: str(rng.randint(1, 1000)), task_of(seed=seed)))["reward"] for seed in range(50)
    ]
    assert sum(rewards) <= 5
    assert await play(agent, silent, task_of(), turns=2) == {"reward": 0.0, "guesses": 2.0}
    with pytest.raises(ConfigError, match="low 5 must be below high 5"):
        opened(GuessNumber, GuessNumberOptions(low=5, high=5))


# --- text game


def explores(messages: list[Message]) -> str:
    """Walk through all rooms, and keep in mind the map, the note and the place of the chest."""
    here, seen, chest, number = (0, 0), dict[Any, list[str]](), None, ""
    for answer, world in zip([None, *messages[1::2]], messages[0::2], strict=True):
        command, text = str(answer["content"]) if answer else "", str(world["content"])
        if command.startswith("go "):
            here = (here[0] + DIRECTIONS[command[3:]][0], here[1] + DIRECTIONS[command[3:]][1])
        if found := re.search(r"Exits: ([a-z, ]+)\.", text):
            seen[here] = found[1].split(", ")
        chest = here if "A chest" in text else chest
        number = (re.findall(r"The note says (\d+)", text) or [number])[0]
    if "A note lies here" in said(messages):
        return "read note"
    if number and here == chest:
        return f"I remember.\nopen chest {number}"
    goal = chest if number and chest else None
    return f"go {way(here, seen, goal)}"


def way(here: tuple[int, int], seen: Mapping[Any, list[str]], goal: Any) -> str:
    """Return the first step to the goal, or to the nearest room that was not seen."""
    ways = deque[tuple[tuple[int, int], str]]([(here, "")])
    been = {here}
    while ways:
        place, first = ways.popleft()
        if place == goal or (goal is None and place not in seen):
            return first
        for name in seen.get(place, []):
            beyond = (place[0] + DIRECTIONS[name][0], place[1] + DIRECTIONS[name][1])
            if beyond not in been:
                been.add(beyond)
                ways.append((beyond, first or name))
    raise AssertionError("no way")


@pytest.mark.parametrize("seed", SEEDS)
async def test_a_player_with_memory_opens_the_chest(seed: int) -> None:
    stage = Stage(explores)
    outcome = await opened(TextGame, TextGameOptions()).rollout(stage.episode, task_of(seed=seed))
    assert isinstance(outcome, dict)
    assert outcome["reward"] == 1.0
    assert len(stage.asked) <= 25


async def test_a_wrong_number_and_empty_commands_open_nothing() -> None:
    def guesses(messages: list[Message]) -> str:
        command = explores(messages)
        return "open chest 1" if "open chest" in command else command

    agent = opened(TextGame, TextGameOptions())
    stage = Stage(guesses)
    wrong = await agent.rollout(stage.episode, task_of())
    assert isinstance(wrong, dict)
    assert wrong["reward"] == 0.0
    assert len(stage.asked) < 30
    assert await play(agent, silent, task_of()) == {"reward": 0.0, "rooms_seen": 1.0}
    partial = opened(TextGame, TextGameOptions(found_note_reward=0.25))
    assert (await play(partial, guesses, task_of()))["reward"] == 0.25
    assert (await play(partial, silent, task_of()))["reward"] == 0.0


async def test_a_random_walk_opens_nothing() -> None:
    rng = random.Random(0)
    commands = [*(f"go {name}" for name in DIRECTIONS), "read note", "open chest 123"]
    agent = opened(TextGame, TextGameOptions())
    for seed in SEEDS:
        assert (await play(agent, lambda _: rng.choice(commands), task_of(seed=seed)))["reward"] == 0.0


async def test_a_note_is_shown_once() -> None:
    stage = Stage(explores)
    await opened(TextGame, TextGameOptions()).rollout(stage.episode, task_of(seed=3))
    texts = [str(message["content"]) for message in stage.asked[-1]["messages"][2::2]]
    assert len([text for text in texts if "The note says" in text]) == 1
    after = texts[[("The note says" in text) for text in texts].index(True) :]
    assert not any("A note lies here" in text for text in after)


# --- retail desk


def serves(messages: list[Message]) -> Says:
    """Serve the customer as the rules say."""
    if (email := re.search(r"address is (\S+)\.$", all_said(messages))) is None:
        return "What is your e-mail address?"
    tools = [(message["name"], message["content"]) for message in messages if message["role"] == "tool"]
    shown = [json.loads(text) for name, text in tools if name in ("find_customer", "get_order")]
    if not shown:
        return "find_customer", {"email": email[1]}
    if len(shown) == 1:
        return [("get_order", {"order": number}) for number in shown[0]["orders"]]
    wishes = [one for message in messages if message["role"] == "user" for one in wish_in(str(message["content"]))]
    wanted = [call for wish in wishes for call in granted(wish, shown[1:])]
    done = len([name for name, _ in tools if name not in ("find_customer", "get_order")])
    return wanted[done] if done < len(wanted) else "Done, as far as the rules allow it."


def all_said(messages: list[Message]) -> str:
    return next((str(one["content"]) for one in messages if "My e-mail" in str(one["content"])), "")


def all_of(messages: list[Message]) -> str:
    return " ".join(str(one["content"]) for one in messages)


def wish_in(text: str) -> list[str]:
    return [] if "My e-mail" in text else [text]


def granted(wish: str, orders: list[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    order = next(order for order in orders if f"the {order['item']}" in wish)
    number = {"order": order["order"]}
    untouched = {"pending": ("cancel", "instead"), "delivered": ("return", "exchange")}
    if not any(word in wish for word in untouched.get(order["status"], ())):
        return []
    if "cancel" in wish:
        return [("cancel_order", {**number, "reason": REASONS["mistake" in wish]})]
    if "instead" in wish:
        return [("change_address", {**number, "address": wish.split(" to ")[1].removesuffix(" instead.")})]
    if "return" in wish:
        return [("return_order", number)]
    return [("exchange_order", {**number, "colour": wish.split()[-2]})]


@pytest.mark.parametrize("seed", range(40))
async def test_a_desk_that_keeps_the_rules_is_right(seed: int) -> None:
    for wishes in (1, 2, 4):
        outcome = await play(opened(Retail, RetailOptions(wishes=wishes)), serves, task_of(seed=seed))
        assert outcome["reward"] == 1.0, seed
        assert outcome["tool_errors"] == 0.0


@pytest.mark.parametrize("seed", range(40))
async def test_a_desk_that_does_nothing_or_too_much_is_wrong(seed: int) -> None:
    def oversteps(messages: list[Message]) -> Says:
        says = serves(messages)
        if says != "Done, as far as the rules allow it." or len(messages) < 4 or "One more" not in all_of(messages):
            return says
        orders = [json.loads(one["content"])["order"] for one in messages if one.get("name") == "get_order"]
        both = [("return_order", {"order": one}) for one in orders]
        return [*both, *(("change_address", {"order": one, "address": "1 Wrong Way"}) for one in orders)]

    agent, task = opened(Retail, RetailOptions()), task_of(seed=seed)
    assert (await play(agent, silent, task))["reward"] == 0.0
    assert (await play(agent, lambda _: ("get_order", {"order": "W1000"}), task))["reward"] == 0.0
    outcome = await play(agent, oversteps, task)
    assert outcome["reward"] == 0.0 or outcome["tool_errors"] == outcome["tool_calls"] - 7


async def test_the_desk_has_six_tools_and_names_the_rules() -> None:
    stage = Stage(serves)
    await opened(Retail, RetailOptions()).rollout(stage.episode, task_of(seed=1))
    assert {tool["function"]["name"] for tool in stage.asked[0]["tools"]} == NAMES
    assert stage.asked[0]["messages"][0] == {"role": "system", "content": RULES}
    first = str(stage.asked[0]["messages"][1]["content"])
    assert any(item in first for item in ITEMS)
    assert "@" not in first


# --- retrieval

PASSAGES = [
    {"title": "Lund", "text": "Lund is a town in Sweden. Its university was founded in 1666."},
    {"title": "Uppsala", "text": "Uppsala is a town in Sweden. Its university was founded in 1477."},
    {"title": "Oslo", "text": "Oslo is the capital of Norway."},
]


@pytest.fixture
def passages(tmp_path: Path) -> str:
    path = tmp_path / "passages.jsonl"
    path.write_text("".join(json.dumps(passage) + "\n" for passage in PASSAGES))
    return str(path)


def searches(messages: list[Message]) -> Says:
    if messages[-1]["role"] != "tool":
        return "search", {"query": said(messages)}
    return f"I found it. Answer: the {re.findall(r'founded in ([0-9]+)', said(messages))[0]}."


async def test_a_searched_answer_is_right(passages: str) -> None:
    task = task_of("When was the university of Uppsala founded?", ["1477", "AD 1477"])
    outcome = await play(opened(Retrieval, RetrievalOptions(path=passages)), searches, task)
    assert (outcome["reward"], outcome["tool_calls"]) == (1.0, 1.0)


@pytest.mark.parametrize(
    ("answer", "whole", "partial"),
    [("", 0, 0), ("1477", 0, 0), ("Answer: 1666", 0, 0), ("Answer: in 1477", 0, 2 / 3), ("Answer: A 1477!", 1, 1)],
)
async def test_partial_credit_is_given_only_where_it_is_asked_for(
    passages: str, answer: str, whole: float, partial: float
) -> None:
    task = task_of("When?", "1477")
    assert (await play(opened(Retrieval, RetrievalOptions(path=passages)), lambda _: answer, task))["reward"] == whole
    asked = opened(Retrieval, RetrievalOptions(path=passages, partial_credit=True))
    assert (await play(asked, lambda _: answer, task))["reward"] == pytest.approx(partial)


def test_rare_words_decide_the_rank() -> None:
    index = PassageIndex([f"{one['title']}: {one['text']}" for one in PASSAGES])
    assert (
        index.found("a town: uppsala", 1)
        == "[1] Uppsala: Uppsala is a town in Sweden. Its university was founded in 1477."
    )
    assert index.found("capital", 5).count("\n") == 0
    assert index.found("zebra", 5) == ""
    assert index.found("town", 5).splitlines()[0].startswith("[1] Lund")


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"title": "x"}'])
def test_a_file_without_passages_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"bad\.jsonl"):
        opened(Retrieval, RetrievalOptions(path=str(path)))
    with pytest.raises(ConfigError, match="cannot be read"):
        opened(Retrieval, RetrievalOptions(path=str(tmp_path / "none.txt")))


# --- replay


@pytest.mark.parametrize(
    ("agent", "player", "task"),
    [
        (opened(Calculator, CalculatorOptions()), works_out, task_of("^47*12+83=", "47", modulus=100)),
        (opened(GuessNumber, GuessNumberOptions()), halves, task_of(seed=5)),
        (opened(TextGame, TextGameOptions()), explores, task_of(seed=5)),
        (opened(Retail, RetailOptions()), serves, task_of(seed=5)),
    ],
)
async def test_a_replayed_episode_asks_the_same(agent: Any, player: Player, task: AgentTask) -> None:
    first, again, other = Stage(player), Stage(player), Stage(player)
    assert agent.resume == "replay"
    assert await agent.rollout(first.episode, task) == await agent.rollout(again.episode, task)
    assert first.asked == again.asked
    if task.ground_truth is None:
        await agent.rollout(other.episode, task_of(seed=6))
        assert other.asked != first.asked


def test_the_table_of_tasks_is_whole() -> None:
    for kind in TASKS:
        options, task = task_parts(kind)
        assert task.__name__ == options.__name__.removesuffix("Options")


async def test_a_task_opens_as_an_agent_of_its_kind() -> None:
    agent = open_agent("calculator", {"max_turns": 2}, ImportRoots())
    assert (await play(agent, lambda _: "#2", task_of("1+1=", "2")))["reward"] == 1.0
    await agent.close()
    with pytest.raises(ConfigError, match=r"agent\.options\.turns: no such option; did you mean 'max_turns'"):
        open_agent("text_game", {"turns": 2}, ImportRoots())
    assert set(TASKS) < set(KINDS)
