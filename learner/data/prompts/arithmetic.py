"""The arithmetic chain: `^4*5*8+7=` is computed from left to right modulo 10, so the answer is 7. Endless."""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from headway.broker.errors import ConfigError
from headway.broker.user_code.kinds import typed_options

from .base import Item, is_held_out

OPERATORS = "+-*"


class ArithmeticOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The lengths of chains."""

    min_operations: Annotated[int, Meta(ge=1, le=10_000)] = 2
    max_operations: Annotated[int, Meta(ge=1, le=10_000)] = 6


Options = TypeVar("Options", bound=ArithmeticOptions)


@dataclass(frozen=True)
class Chain:
    """A first digit, then operators and digits."""

    first: int
    steps: tuple[tuple[str, int], ...]

    @property
    def text(self) -> str:
        return f"^{self.first}" + "".join(f"{operator}{digit}" for operator, digit in self.steps) + "="

    @property
    def answer(self) -> int:
        value = self.first
        for operator, digit in self.steps:
            value = apply(value, operator, digit)
        return value


class ArithmeticPrompts:
    """A source with one chain for every position, made from the seed and the position."""

    def __init__(self, options: Mapping[str, Any], *, seed: int) -> None:
        self._options = chain_options(options, ArithmeticOptions, "prompts.options")
        self._seed = seed

    @property
    def size(self) -> None:
        return None

    def train(self, epoch: int, position: int) -> Item:
        rng = random.Random(f"arithmetic:{self._seed}:{epoch}:{position}")
        return _item(draw_chain(rng, self._options, held_out=False))

    def held_out(self, count: int) -> list[Item]:
        rng = random.Random("arithmetic:held-out")
        return [_item(draw_chain(rng, self._options, held_out=True)) for _ in range(count)]


def draw_chain(rng: random.Random, options: ArithmeticOptions, *, held_out: bool) -> Chain:
    """Draws chains until one is on the wanted side of the split."""
    while True:
        count = rng.randint(options.min_operations, options.max_operations)
        steps = tuple((rng.choice(OPERATORS), rng.randint(0, 9)) for _ in range(count))
        chain = Chain(rng.randint(0, 9), steps)
        if is_held_out(chain.text) == held_out:
            return chain


def chain_options(options: Mapping[str, Any], into: type[Options], where: str) -> Options:
    """Returns checked options. Raises ConfigError."""
    checked = typed_options(options, into, where)
    if checked.min_operations > checked.max_operations:
        raise ConfigError(
            f"{where}: min_operations {checked.min_operations} exceeds max_operations {checked.max_operations}."
        )
    return checked


def apply(value: int, operator: str, digit: int) -> int:
    """Computes one step of a chain, modulo 10."""
    match operator:
        case "+":
            return (value + digit) % 10
        case "-":
            return (value - digit) % 10
        case _:
            return (value * digit) % 10


def _item(chain: Chain) -> Item:
    return Item(content=chain.text, ground_truth=str(chain.answer), data_source="arithmetic")
