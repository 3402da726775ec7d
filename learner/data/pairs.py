"""Pairs of responses for stages on preferences: of files, or of worked chains, one right and one wrong."""

import random
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from msgspec import Meta

from broker.errors import ConfigError
from broker.user_code.kinds import unknown_kind
from learner.config import RECORDS, RecordsConfig

from .examples import ArithmeticExampleOptions, work_out
from .prompts.arithmetic import Chain, chain_options, draw_chain
from .records import Preference, open_records


class ArithmeticPairOptions(ArithmeticExampleOptions, frozen=True, kw_only=True):
    """The chains, how careless the rejected responses are, and how many pairs there are."""

    pairs: Annotated[int, Meta(ge=1)] = 4096
    error_rate: Annotated[float, Meta(ge=0, le=1)] = 0.2
    skip_rate: Annotated[float, Meta(ge=0, le=1)] = 0.4


def open_pairs(config: RecordsConfig, seed: int, where: str) -> Sequence[Preference]:
    """Returns the pairs of a source. Raises ConfigError. `where` is its key in the recipe."""
    match config.kind:
        case "arithmetic":
            return arithmetic_pairs(config.options, seed, f"{where}.options")
        case "file":
            return open_records(Preference, config.path, config.options, where)
        case unknown:
            raise unknown_kind(unknown, RECORDS, f"{where}.kind")


def arithmetic_pairs(options: Mapping[str, Any], seed: int, where: str) -> list[Preference]:
    """Returns pairs of a right response with its work and a careless one with a wrong answer, but of no held-out
    chain. Raises ConfigError."""
    chosen = chain_options(options, ArithmeticPairOptions, where)
    if not (chosen.error_rate or chosen.skip_rate):
        raise ConfigError(f"{where}: careless responses need an error_rate or a skip_rate above 0.")
    rng = random.Random(f"arithmetic-pairs:{seed}")
    return [_pair(draw_chain(rng, chosen, held_out=False), rng, chosen) for _ in range(chosen.pairs)]


def _pair(chain: Chain, rng: random.Random, options: ArithmeticPairOptions) -> Preference:
    careful = ArithmeticExampleOptions(min_operations=options.min_operations, max_operations=options.max_operations)
    rejected = work_out(chain, rng, options)
    while rejected.endswith(f"#{chain.answer}"):
        rejected = work_out(chain, rng, options)
    return Preference(prompt=chain.text, chosen=work_out(chain, rng, careful), rejected=rejected)
