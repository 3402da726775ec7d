"""Prompts and examples for agents: numbered tasks, larger chains, and chains that a calculator works out."""

import re
from itertools import islice
from typing import Any

import pytest

from headway.broker.errors import ConfigError
from headway.learner.config import PromptsConfig, SftPhaseConfig
from headway.learner.data.examples import Example, open_examples
from headway.learner.data.prompts import open_source
from headway.learner.data.prompts.arithmetic import apply
from headway.learner.data.prompts.rendering import Renderer
from headway.learner.stages.sft import tokenize

from .test_prompts import character_tokenizer

LARGE = {"largest": 99, "modulus": 100, "max_operations": 4}


def calculator_examples(count: int, seed: int = 0, **options: object) -> list[Example]:
    config = SftPhaseConfig(kind="calculator", options={"task_options": LARGE, **options})
    return list(islice(open_examples(config, seed), count))


def test_numbered_prompts_never_repeat_and_hold_multiples_of_16_out() -> None:
    source = open_source(PromptsConfig(kind="numbered", options={"text": "Game {number}!"}), seed=3)
    trained = [source.train(0, position) for position in range(100)]
    numbers = [item.ground_truth for item in trained]
    assert (source.size, numbers[:3], len(set(numbers))) == (None, [1, 2, 3], 100)
    assert [item.ground_truth for item in source.held_out(3)] == [0, 16, 32]
    assert not set(numbers) & {item.ground_truth for item in source.held_out(100)}
    assert (trained[14].content, trained[15].content) == ("Game 15!", "Game 17!")
    with pytest.raises(ConfigError, match=r"prompts\.options\.txt: no such option; did you mean 'text'"):
        open_source(PromptsConfig(kind="numbered", options={"txt": ""}), seed=0)


def test_larger_chains_are_right_and_tell_their_modulus() -> None:
    source = open_source(PromptsConfig(kind="arithmetic", options=LARGE), seed=1)
    items = [source.train(0, position) for position in range(300)]
    for item in items:
        first, *steps = re.findall(r"([-+*]?)(\d+)", str(item.content))
        value = int(first[1])
        for sign, number in steps:
            value = eval(f"{value}{sign}{number}") % 100
        assert (item.ground_truth, item.extra_info) == (str(value), {"modulus": 100})
    assert max(int(number) for item in items for number in re.findall(r"\d+", str(item.content))) == 99


def test_a_calculator_works_examples_out() -> None:
    for example in calculator_examples(200):
        value, *rest = re.findall(r"[-+*]?\d+", example.query)
        for step, (call, result) in zip(rest, example.turns, strict=True):
            assert call == f"[{value}{step}]"
            assert result == str(apply(int(value), step[0], int(step[1:]), 100))
            value = result
        assert example.response == f"#{value}"


def test_careless_examples_call_wrongly_and_guess_at_their_rates() -> None:
    careless: dict[str, Any] = {"error_rate": 0.2, "skip_rate": 0.4}
    examples = calculator_examples(4000, **careless)
    assert examples == calculator_examples(4000, **careless)
    assert examples != calculator_examples(4000, seed=1, **careless)
    called = [example for example in examples if example.turns]
    assert len(called) / len(examples) == pytest.approx(0.6, abs=0.03)
    wrong = steps = 0
    for example in called:
        asked = re.findall(r"[-+*]\d+", example.query)
        made = [re.findall(r"[-+*]\d+", call)[0] for call, _ in example.turns]
        steps, wrong = steps + len(made), wrong + sum(one != other for one, other in zip(asked, made, strict=True))
    assert wrong / steps == pytest.approx(0.2 * 0.99, abs=0.02)


def test_held_out_chains_are_no_examples() -> None:
    few = {"largest": 9, "min_operations": 1, "max_operations": 1}
    held_out = {item.content for item in open_source(PromptsConfig(kind="arithmetic", options=few), 0).held_out(300)}
    examples = islice(open_examples(SftPhaseConfig(kind="calculator", options={"task_options": few}), 0), 2000)
    assert not held_out & {example.query for example in examples}


def test_what_the_model_reads_between_turns_is_not_trained() -> None:
    tokenizer = character_tokenizer()
    example = Example(query="^4*5+7=", turns=(("[4*5]", "<20>"), ("[20+7]", "")), response="#27")
    trained = tokenize(example, tokenizer, Renderer(tokenizer))
    assert "".join(tokenizer.convert_ids_to_tokens(trained.token_ids.tolist())) == "^4*5+7=[4*5]<20>[20+7]#27~"
    marked = "".join("x" if bit else "." for bit in trained.loss_mask)
    assert marked == "xxxxx....xxxxxxxxxx"
