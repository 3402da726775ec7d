"""Supervised training reads {query, response} examples without end; the same seed gives the same examples.

It renders the query as a prompt is and appends the stop token. A custom source is `package.module:function`, called as
function(path=..., seed=..., **options) in a process of its own, which can be killed; it yields `Example`s.

Tasks of reasoning-gym come with their work written down:

    chain_sum     55 + 98 - 93       ->  55 + 98 = 153⏎153 - 93 = 60⏎<answer>60</answer>
    leg_counting  8 tigers, 1 crab   ->  tiger 8 * 4 = 32 -> 32⏎crab 1 * 10 = 10 -> 42⏎<answer>42</answer>
"""

import random
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import count, islice
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from headway.broker.errors import ConfigError
from headway.broker.installation import check_extra
from headway.broker.user_code.host import Program
from headway.broker.user_code.import_paths import ImportRoots, import_directory
from headway.broker.user_code.kinds import did_you_mean, typed_options, unknown_kind
from headway.broker.user_code.pool import BlockingHost
from headway.learner.config import EXAMPLES, SftPhaseConfig

from .messages import TemplateInputs, check_sendable
from .prompts.arithmetic import ArithmeticOptions, Chain, apply, chain_options, draw_chain
from .prompts.base import Item
from .prompts.files import Row, read_rows

AT_ONCE = 16
_KEY = "sft.phases.kind"


class Example(msgspec.Struct, frozen=True, kw_only=True):
    """A question, and the answer that the model learns to give."""

    query: str
    """The text that the model reads; the chat template renders it."""
    turns: tuple[tuple[str, str], ...] = ()
    """Turns before the response: what the model writes, which is trained, and what it reads then, such as a tool's
    answer, which is not."""
    response: str
    """The text that is trained, without the token that ends it."""


def custom_examples(config: SftPhaseConfig, seed: int) -> Iterator[Example]:
    """Yields the examples of `config.kind`, as many as there are. Raises ConfigError at once if there is no such
    function; later UserCodeError if it raises, ends its process, or takes longer than `sft.phases.deadline_s` for
    AT_ONCE examples."""
    program = Program(
        name=f"sft.phases.kind={config.kind}",
        factory=f"{__name__}:ExampleHost",
        arguments={"kind": config.kind, "path": config.path, "seed": seed, "options": config.options},
        import_path=str(import_directory()),
    )
    return _yielded(BlockingHost(program, deadline_s=config.deadline_s))


def _yielded(host: BlockingHost) -> Iterator[Example]:
    """Yields the host's examples. Each call is made once: in another process the examples would start over."""
    while given := msgspec.convert(host.call("next", AT_ONCE), list[Example]):
        yield from given


class ExampleHost:
    """The user's function, in the process where it runs. It has no methods that a seam could promise, so its result is
    checked here."""

    places = 1

    def __init__(self, kind: str, path: str, seed: int, options: dict[str, Any]) -> None:
        made = ImportRoots((kind,)).load(kind, _KEY)(path=path, seed=seed, **options)
        if not isinstance(made, Iterable):
            raise ConfigError(
                f"{_KEY}: {kind!r} returned a {type(made).__name__}, which yields nothing; what it must yield stands in"
                f" {Example.__module__}:{Example.__name__}."
            )
        self._examples = iter(made)

    def next(self, count: int) -> Any:
        """Returns the next `count` examples, fewer at the end."""
        given = msgspec.to_builtins(list(islice(self._examples, count)))
        msgspec.convert(given, list[Example])  # raises for an item that is no example
        return given


SLIPS = (-10, -2, -1, 1, 2, 10)
"""The errors of a careless result, one of which is added to it."""
GUESSED = 0.7
"""The share of wrong answers among those without work."""


class WorkedSolutionOptions(msgspec.Struct, frozen=True, kw_only=True):
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


def worked_solution(item: Item, rng: random.Random, options: WorkedSolutionOptions) -> str:
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


__all__ = ["Example", "open_examples"]


class ArithmeticExampleOptions(ArithmeticOptions, frozen=True, kw_only=True):
    """The chains, and how carelessly they are worked out."""

    error_rate: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """The probability that a written result is random; the chain goes on from the written one."""
    skip_rate: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """The share of responses without any work: `#` and a number, which is guessed in 7 cases of 10, else right."""


class CallMarks(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What stands around the parts of an episode: as `agent.format.options` of the format `plain` say, or as a chat
    template writes them, with its special tokens."""

    input_begin: str = ""
    input_end: str = ""
    call_begin: str = "["
    call_end: str = "]"
    result_begin: str = ""
    result_end: str = ""
    answer_end: str = ""
    """Behind the answer; empty: the token that ends a text."""


class CalculatorExampleOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The chains, and how carelessly a calculator is called for them."""

    task_options: dict[str, Any] = {}
    """The same options as `prompts.options` of these tasks."""
    marks: CallMarks = CallMarks()
    error_rate: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """The probability that a call has a random number in the place of its second one; the chain goes on from its
    result."""
    skip_rate: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """The share of responses without any call: `#` and a number, which is guessed in 7 cases of 10, else right."""


_FOR_TEMPLATES = ("system", *TemplateInputs.__struct_fields__)


class NoOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Files take no options."""


def open_examples(config: SftPhaseConfig, seed: int) -> Iterator[Example]:
    """Returns the phase's examples. Files are repeated, in a new order each time. Raises ConfigError at once."""
    match config.kind:
        case "arithmetic":
            options = chain_options(config.options, ArithmeticExampleOptions, "sft.phases.options")
            return worked_chains(options, seed)
        case "calculator":
            return called_chains(typed_options(config.options, CalculatorExampleOptions, "sft.phases.options"), seed)
        case "reasoning_gym":
            return worked_tasks(
                config.path, typed_options(config.options, WorkedSolutionOptions, "sft.phases.options"), seed
            )
        case "jsonl" | "parquet":
            typed_options(config.options, NoOptions, "sft.phases.options")
            examples = [_example(row, place) for place, row in read_rows(config.kind, config.path, "sft.phases.path")]
            return _repeated(examples, config.path, seed)
        case own if ":" in own:
            return custom_examples(config, seed)
        case unknown:
            raise unknown_kind(unknown, EXAMPLES, "sft.phases.kind")


def worked_chains(options: ArithmeticExampleOptions, seed: int, *, held_out: bool = False) -> Iterator[Example]:
    """Yields chains with their work, `^4*5+7=` -> `4*5=0+7=7#7`: only held-out chains, or none of them."""
    rng = random.Random(f"arithmetic-examples:{seed}")
    while True:
        chain = draw_chain(rng, options, held_out=held_out)
        yield Example(query=chain.text, response=work_out(chain, rng, options))


def worked_tasks(path: str, options: WorkedSolutionOptions, seed: int) -> Iterator[Example]:
    """Yields reasoning-gym tasks in turn with their work, but never held-out entries."""
    from .prompts.reasoning_gym import open_tasks

    check_extra("reasoning-gym", "reasoning_gym", "a phase of kind reasoning_gym", name="reasoning-gym")
    check_tasks(path)
    source = open_tasks(path, options.task_options, seed=zlib.crc32(f"examples:{seed}".encode()))
    rng = random.Random(f"reasoning-gym-examples:{seed}")
    items = (source.train(0, position) for position in count())
    return (Example(query=str(item.content), response=worked_solution(item, rng, options)) for item in items)


def work_out(chain: Chain, rng: random.Random, options: ArithmeticExampleOptions) -> str:
    """Returns one response, as careful as the options say."""
    if rng.random() < options.skip_rate:
        return guessed(chain, rng)
    written, value = str(chain.first), chain.first
    for operator, number in chain.steps:
        right = apply(value, operator, number, chain.modulus)
        value = rng.randrange(chain.modulus) if rng.random() < options.error_rate else right
        written += f"{operator}{number}={value}"
    return f"{written}#{value}"


def guessed(chain: Chain, rng: random.Random) -> str:
    """Returns an answer without work: a random one in 7 cases of 10, else the right one."""
    return f"#{rng.randrange(chain.modulus) if rng.random() < GUESSED else chain.answer}"


def called_chains(options: CalculatorExampleOptions, seed: int) -> Iterator[Example]:
    """Returns chains that a calculator works out, `^47*12+83=` -> `[47*12]64[64+83]47#47`, never held-out ones. Raises
    ConfigError at once."""
    chains = chain_options(options.task_options, ArithmeticOptions, "sft.phases.options.task_options")
    rng = random.Random(f"calculator-examples:{seed}")
    return (call_out(draw_chain(rng, chains, held_out=False), rng, chains, options) for _ in count())


def call_out(chain: Chain, rng: random.Random, chains: ArithmeticOptions, options: CalculatorExampleOptions) -> Example:
    """Returns one response with its calls, as careful as the options say."""
    marks, turns, value = options.marks, list[tuple[str, str]](), chain.first
    query = f"{marks.input_begin}{chain.text}{marks.input_end}"
    if rng.random() < options.skip_rate:
        return Example(query=query, response=f"{guessed(chain, rng)}{marks.answer_end}")
    for operator, number in chain.steps:
        called = rng.randint(0, chains.largest) if rng.random() < options.error_rate else number
        call = f"{marks.call_begin}{value}{operator}{called}{marks.call_end}"
        value = apply(value, operator, called, chain.modulus)
        turns.append((call, f"{marks.result_begin}{value}{marks.result_end}"))
    return Example(query=query, turns=tuple(turns), response=f"#{value}{marks.answer_end}")


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
