"""The arithmetic chain: `^4*5*8+7=` is computed from left to right modulo 10, so the answer is 7. Endless.

Its numbers and its modulus may be larger: `^47*12+83=` modulo 100 is 47, which is work for a calculator.
"""

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
    """The lengths of chains, and their numbers."""

    min_operations: Annotated[int, Meta(ge=1, le=10_000)] = 2
    max_operations: Annotated[int, Meta(ge=1, le=10_000)] = 6
    largest: Annotated[int, Meta(ge=1, le=10**9)] = 9
    """The largest number in a chain."""
    modulus: Annotated[int, Meta(ge=2, le=10**9)] = 10
    """Each result is taken modulo this number, which agents find in `extra_info`."""


Options = TypeVar("Options", bound=ArithmeticOptions)


@dataclass(frozen=True)
class Chain:
    """A first number, then operators and numbers."""

    first: int
    steps: tuple[tuple[str, int], ...]
    modulus: int = 10

    @property
    def text(self) -> str:
        return f"^{self.first}" + "".join(f"{operator}{number}" for operator, number in self.steps) + "="

    @property
    def answer(self) -> int:
        value = self.first
        for operator, number in self.steps:
            value = apply(value, operator, number, self.modulus)
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
        steps = tuple((rng.choice(OPERATORS), rng.randint(0, options.largest)) for _ in range(count))
        chain = Chain(rng.randint(0, options.largest), steps, options.modulus)
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


def apply(value: int, operator: str, number: int, modulus: int = 10) -> int:
    """Computes one step of a chain."""
    match operator:
        case "+":
            return (value + number) % modulus
        case "-":
            return (value - number) % modulus
        case _:
            return (value * number) % modulus


def _item(chain: Chain) -> Item:
    return Item(
        content=chain.text,
        ground_truth=str(chain.answer),
        data_source="arithmetic",
        extra_info={"modulus": chain.modulus},
    )
