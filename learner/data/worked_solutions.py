"""Answers to reasoning-gym entries with the work written down, for supervised training.

chain_sum     55 + 98 - 93       ->  55 + 98 = 153⏎153 - 93 = 60⏎<answer>60</answer>
leg_counting  8 tigers, 1 crab   ->  tiger 8 * 4 = 32 -> 32⏎crab 1 * 10 = 10 -> 42⏎<answer>42</answer>
"""

import random
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from headway.broker.errors import ConfigError
from headway.broker.user_code.kinds import did_you_mean

from .prompts.base import Item

SLIPS = (-10, -2, -1, 1, 2, 10)
"""The errors of a careless result, one of which is added to it."""
GUESSED = 0.7
"""The share of wrong answers among those without work."""


class WorkedOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The entries, and how carelessly they are worked out."""

    task_options: dict[str, Any] = {}
    """The same options as `prompts.options` of these tasks."""
    error_rate: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """The probability that a written result is slightly wrong; the work goes on from the written result."""
    skip_rate: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """The share of responses without any work, whose answer is slightly wrong in 7 cases of 10."""


Slip = Callable[[int], int]
"""(result) -> the number that is written for it."""
Steps = Iterator[tuple[str, int]]
"""Lines of work, each with the total that it leaves."""


def check_tasks(path: str) -> None:
    """Raises ConfigError if `path` (names separated by commas) has a task that this module cannot work out."""
    for name in (part.strip() for part in path.split(",")):
        if name not in WORKED:
            raise ConfigError(
                f"sft.phases.path: there are no worked solutions of {name!r}{did_you_mean(name, WORKED)}. "
                f"Known: {', '.join(WORKED)}; give others as a jsonl file of query and response."
            )


def worked_solution(item: Item, rng: random.Random, options: WorkedOptions) -> str:
    """Returns a response to the reasoning-gym item, as careful as the options say; `rng` draws the errors."""
    if rng.random() < options.skip_rate:
        answer = int(item.ground_truth)
        return _answered(answer + rng.choice(SLIPS) if rng.random() < GUESSED else answer)

    def written(result: int) -> int:
        return result + rng.choice(SLIPS) if rng.random() < options.error_rate else result

    steps = list(WORKED[item.extra_info["task"]](item.extra_info["entry"]["metadata"], written))
    return "".join(f"{line}\n" for line, _ in steps) + _answered(steps[-1][1])


def chain_sum(metadata: Mapping[str, Any], written: Slip) -> Steps:
    """Yields a running total, `total + term = total`; a chain of one term is written as it is."""
    first, *rest = metadata["expression"].split()
    total = int(first)
    if not rest:
        yield first, total
    for operator, term in zip(rest[::2], rest[1::2], strict=True):
        before, total = total, written(total + int(term) if operator == "+" else total - int(term))
        yield f"{before} {operator} {term} = {total}", total


def leg_counting(metadata: Mapping[str, Any], written: Slip) -> Steps:
    """Yields each animal's number times its legs, and the running total."""
    from reasoning_gym.arithmetic.leg_counting import ANIMALS

    total = 0
    for animal, number in metadata["animals"].items():
        legs = number * ANIMALS[animal]
        total = written(total + legs)
        yield f"{animal} {number} * {ANIMALS[animal]} = {legs} -> {total}", total


WORKED: dict[str, Callable[[Mapping[str, Any], Slip], Steps]] = {"chain_sum": chain_sum, "leg_counting": leg_counting}


def _answered(answer: int) -> str:
    return f"<answer>{answer}</answer>"
