"""The records of a stage by its recipe's source: read from a file, or worked chains of the demonstration."""

import hashlib
import random
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from msgspec import Meta

from headway.broker.errors import ConfigError
from headway.broker.user_code.kinds import unknown_kind
from headway.learner.config import RECORDS, RecordsConfig

from .examples import ArithmeticExampleOptions, work_out, worked_chains
from .prompts.arithmetic import Chain, chain_options, draw_chain
from .records import Conversation, Labelled, Preference, open_records
from .records.layouts import Record

R = TypeVar("R", bound=Record)


class ArithmeticRecordOptions(ArithmeticExampleOptions, frozen=True, kw_only=True):
    """The chains, how carelessly they are worked out, and how many there are."""

    records: Annotated[int, Meta(ge=1, le=1 << 24)] = 4096
    split: Literal["train", "held_out"] = "train"
    """held_out: the chains are among those on which runs evaluate, which no training record has."""


class ArithmeticPairOptions(ArithmeticRecordOptions, frozen=True, kw_only=True):
    """The chains, and how careless the rejected responses are."""

    error_rate: Annotated[float, Meta(ge=0, le=1)] = 0.2
    skip_rate: Annotated[float, Meta(ge=0, le=1)] = 0.4


def open_conversations(config: RecordsConfig, seed: int, where: str) -> Sequence[Conversation]:
    """Returns the conversations of a source. Raises ConfigError. `where` is its key in the recipe."""
    return _opened(Conversation, config, where, lambda options, key: arithmetic_conversations(options, seed, key))


def open_pairs(config: RecordsConfig, seed: int, where: str) -> Sequence[Preference]:
    """Returns the pairs of a source. Raises ConfigError. `where` is its key in the recipe."""
    return _opened(Preference, config, where, lambda options, key: arithmetic_pairs(options, seed, key))


def open_labelled(config: RecordsConfig, seed: int, where: str) -> Sequence[Labelled]:
    """Returns the responses of a source with their judgements. Raises ConfigError. `where` is its key in the recipe."""
    return _opened(Labelled, config, where, lambda options, key: arithmetic_labelled(options, seed, key))


def arithmetic_conversations(options: Mapping[str, Any], seed: int, where: str) -> list[Conversation]:
    """Returns chains of a split with their work. Raises ConfigError."""
    chosen = chain_options(options, ArithmeticRecordOptions, where)
    examples = islice(worked_chains(chosen, seed, held_out=chosen.split == "held_out"), chosen.records)
    return [Conversation(prompt=example.query, completion=example.response) for example in examples]


def arithmetic_pairs(options: Mapping[str, Any], seed: int, where: str) -> list[Preference]:
    """Returns pairs of a right response with its work and a careless one with a wrong answer, to chains of a split.
    Raises ConfigError."""
    chosen = chain_options(options, ArithmeticPairOptions, where)
    if not (chosen.error_rate or chosen.skip_rate):
        raise ConfigError(f"{where}: careless responses need an error_rate or a skip_rate above 0.")
    rng = random.Random(f"arithmetic-pairs:{seed}")
    held_out = chosen.split == "held_out"
    return [_pair(draw_chain(rng, chosen, held_out=held_out), rng, chosen) for _ in range(chosen.records)]


def arithmetic_labelled(options: Mapping[str, Any], seed: int, where: str) -> list[Labelled]:
    """Returns right and careless responses of `arithmetic_pairs`, each to a chain of its own. Raises ConfigError."""
    return [
        Labelled(prompt=pair.prompt, completion=pair.rejected if number % 2 else pair.chosen, label=not number % 2)
        for number, pair in enumerate(arithmetic_pairs(options, seed, where))
    ]


def digest_of(*sources: RecordsConfig | None) -> bytes:
    """Returns a digest of the sources' files and their names; it knows nothing of data sets on hubs."""
    digest = hashlib.blake2b(digest_size=16)
    for source in sources:
        path = Path(source.path if source is not None else "")
        files = sorted(path.rglob("*")) if path.is_dir() and path.name else [path]
        for file in files:
            if file.is_file():
                digest.update(f"{file.relative_to(path)}:{file.stat().st_size}:".encode())
                with file.open("rb") as opened:
                    digest.update(hashlib.file_digest(opened, "blake2b").digest())
    return digest.digest()


def _opened(
    kind: type[R], config: RecordsConfig, where: str, chains: Callable[[Mapping[str, Any], str], Sequence[R]]
) -> Sequence[R]:
    match config.kind:
        case "file":
            return open_records(kind, config.path, config.options, where)
        case "arithmetic":
            return chains(config.options, f"{where}.options")
        case unknown:
            raise unknown_kind(unknown, RECORDS, f"{where}.kind")


def _pair(chain: Chain, rng: random.Random, options: ArithmeticPairOptions) -> Preference:
    careful = ArithmeticExampleOptions(min_operations=options.min_operations, max_operations=options.max_operations)
    rejected = work_out(chain, rng, options)
    while rejected.endswith(f"#{chain.answer}"):
        rejected = work_out(chain, rng, options)
    return Preference(prompt=chain.text, chosen=work_out(chain, rng, careful), rejected=rejected)
