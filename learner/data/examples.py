"""Supervised training reads {query, response} examples without end; the same seed gives the same examples.

It renders the query as a prompt is and appends the stop token. A source of your own is `package.module:function`,
called as function(path=..., seed=..., **options) in a process of its own; it yields `Example`s.
"""

import random
import zlib
from collections.abc import Iterator
from itertools import count
from typing import Annotated

import msgspec
from msgspec import Meta

from headway.broker.errors import ConfigError
from headway.broker.user_code.kinds import typed_options, unknown_kind
from headway.learner.config import EXAMPLES, SftPhaseConfig

from .own_examples import Example, own_examples
from .prompts.arithmetic import ArithmeticOptions, Chain, apply, chain_options, draw_chain
from .prompts.rows import Row, read_rows
from .prompts.sendable import check_sendable
from .texts.base import Templated
from .worked_solutions import WorkedOptions, check_tasks, worked_solution

__all__ = ["Example", "open_examples"]


class ArithmeticExampleOptions(ArithmeticOptions, frozen=True, kw_only=True):
    """The chains, and how carelessly they are worked out."""

    error_rate: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """The probability that a written step is a random digit; the chain goes on from the written digit."""
    skip_rate: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """The share of responses without any work: `#` and a digit, which is guessed in 7 cases of 10, else right."""


_FOR_TEMPLATES = ("system", *Templated.__struct_fields__)


class NoOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Files take no options."""


def open_examples(config: SftPhaseConfig, seed: int) -> Iterator[Example]:
    """Returns the phase's examples. Files are repeated, in a new order each time. Raises ConfigError at once."""
    match config.kind:
        case "arithmetic":
            options = chain_options(config.options, ArithmeticExampleOptions, "sft.phases.options")
            return worked_chains(options, seed)
        case "reasoning_gym":
            return worked_tasks(config.path, typed_options(config.options, WorkedOptions, "sft.phases.options"), seed)
        case "jsonl" | "parquet":
            typed_options(config.options, NoOptions, "sft.phases.options")
            examples = [_example(row, place) for place, row in read_rows(config.kind, config.path, "sft.phases.path")]
            return _repeated(examples, config.path, seed)
        case own if ":" in own:
            return own_examples(config, seed)
        case unknown:
            raise unknown_kind(unknown, EXAMPLES, "sft.phases.kind")


def worked_chains(options: ArithmeticExampleOptions, seed: int, *, held_out: bool = False) -> Iterator[Example]:
    """Yields chains with their work, `^4*5+7=` -> `4*5=0+7=7#7`: only held-out chains, or none of them."""
    rng = random.Random(f"arithmetic-examples:{seed}")
    while True:
        chain = draw_chain(rng, options, held_out=held_out)
        yield Example(query=chain.text, response=work_out(chain, rng, options))


def worked_tasks(path: str, options: WorkedOptions, seed: int) -> Iterator[Example]:
    """Yields reasoning-gym tasks in turn with their work, but never held-out entries."""
    from .prompts.reasoning_gym import open_tasks

    check_tasks(path)
    source = open_tasks(path, options.task_options, seed=zlib.crc32(f"examples:{seed}".encode()))
    rng = random.Random(f"reasoning-gym-examples:{seed}")
    items = (source.train(0, position) for position in count())
    return (Example(query=str(item.content), response=worked_solution(item, rng, options)) for item in items)


def work_out(chain: Chain, rng: random.Random, options: ArithmeticExampleOptions) -> str:
    """Returns one response, as careful as the options say."""
    if rng.random() < options.skip_rate:
        return f"#{rng.randint(0, 9) if rng.random() < 0.7 else chain.answer}"
    written, value = str(chain.first), chain.first
    for operator, digit in chain.steps:
        value = rng.randint(0, 9) if rng.random() < options.error_rate else apply(value, operator, digit)
        written += f"{operator}{digit}={value}"
    return f"{written}#{value}"


def _example(row: Row, place: str) -> Example:
    for name in ("query", "response"):
        if not isinstance(row.get(name), str) or not row[name]:
            raise ConfigError(f"{place}: {name!r} must be text; the row has {', '.join(row) or 'nothing'}.")
    for name in _FOR_TEMPLATES:
        if row.get(name):
            raise ConfigError(
                f"{place}: the row has {name!r}, and sft.phases reads query and response alone, so the model would not"
                " be trained with it. Read the file by `stages: [{kind: sft, options: {data: {path: FILE}}}]`, or give"
                " the column another name."
            )
    example = Example(query=row["query"], response=row["response"])
    check_sendable(example, place)
    return example


def _repeated(examples: list[Example], path: str, seed: int) -> Iterator[Example]:
    if not examples:
        raise ConfigError(f"sft.phases.path: {path!r} has no examples.")
    return _shuffled_forever(examples, random.Random(f"examples:{seed}"))


def _shuffled_forever(examples: list[Example], rng: random.Random) -> Iterator[Example]:
    while True:
        order = examples.copy()
        rng.shuffle(order)
        yield from order
