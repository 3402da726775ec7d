"""Worked examples of reasoning-gym tasks are right by default, and careless at the rates that a recipe asks for."""

import operator
import re
import zlib
from itertools import islice
from statistics import fmean
from typing import Any

import pytest

from headway.learner.config import PromptsConfig, SftPhaseConfig
from headway.learner.data.examples import Example, open_examples
from headway.learner.data.prompts import open_source
from headway.learner.data.prompts.base import Item
from headway.learner.data.prompts.reasoning_gym import open_tasks
from headway.rollout_workers.rewards.reasoning_gym_reward import Verifiers

TASKS = "chain_sum, leg_counting"
TASK_OPTIONS = {"chain_sum": {"min_digits": 2}, "leg_counting": {"min_animals": 1, "max_animals": 4}}
EQUATION = re.compile(r"(-?\d+) ([-+*]) (-?\d+) = (-?\d+)(?: -> (-?\d+))?")
OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


def examples_of(count: int, path: str, **options: Any) -> list[Example]:
    return list(islice(open_examples(SftPhaseConfig(kind="reasoning_gym", path=path, options=options), 0), count))


def worked_examples(count: int, **careless: float) -> list[tuple[Example, Item]]:
    """Return examples of both tasks, each with the item that has the same question."""
    examples = examples_of(count, TASKS, task_options=TASK_OPTIONS, **careless)
    assert examples == examples_of(count, TASKS, task_options=TASK_OPTIONS, **careless)
    source = open_tasks(TASKS, TASK_OPTIONS, seed=zlib.crc32(b"examples:0"))
    items = [source.train(0, position) for position in range(count)]
    assert [example.query for example in examples] == [item.content for item in items]
    return list(zip(examples, items, strict=True))


def reward_of(item: Item, response: str) -> float:
    return Verifiers().score("g", item.extra_info, response)[0]


def test_worked_reasoning_gym_examples_are_right_and_show_it() -> None:
    """Every line is true, each total goes on from the one before, and the reward is the whole one."""
    for example, item in worked_examples(200):
        assert reward_of(item, example.response) == 1.0
        *lines, answer = example.response.splitlines()
        total = 0
        for line in lines:
            left, sign, right, result, after = EQUATION.search(line).groups()  # type: ignore[union-attr]
            assert OPERATORS[sign](int(left), int(right)) == int(result)
            assert after is None or int(after) == total + int(result)
            assert after is not None or line == lines[0] or int(left) == total
            total = int(after or result)
        assert answer == f"<answer>{total}</answer>"
        metadata = item.extra_info["entry"]["metadata"]
        assert len(lines) == metadata.get("num_animals", metadata.get("num_terms", 0) - 1)


def test_a_sum_of_one_term_is_worked_out_too() -> None:
    (example,) = examples_of(1, "chain_sum", task_options={"min_terms": 1, "max_terms": 1, "max_digits": 1})
    assert re.fullmatch(r"(\d)\n<answer>\1</answer>", example.response)


def test_careless_reasoning_gym_examples_err_and_skip_at_their_rates() -> None:
    pairs = worked_examples(2000, error_rate=0.2, skip_rate=0.4)
    skipped = [(example, item) for example, item in pairs if "\n" not in example.response]
    assert len(skipped) / len(pairs) == pytest.approx(0.4, abs=0.04)
    assert fmean(reward_of(item, e.response) == 1.0 for e, item in skipped) == pytest.approx(0.3, abs=0.06)
    slips = []
    for example, _ in pairs:
        total = 0
        for left, sign, right, result, after in EQUATION.findall(example.response):
            right_total = total + int(result) if after else OPERATORS[sign](int(left), int(right))
            total = int(after or result)
            slips.append(total != right_total)
    assert fmean(slips) == pytest.approx(0.2, abs=0.03)


def test_held_out_reasoning_gym_tasks_have_no_worked_example() -> None:
    options = {"max_terms": 2, "max_digits": 1}
    examples = examples_of(1000, "chain_sum", task_options=options)
    source = open_source(PromptsConfig(kind="reasoning_gym", path="chain_sum", options=options), seed=0)
    assert not {item.content for item in source.held_out(10)} & {example.query for example in examples}
