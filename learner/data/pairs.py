"""Pairs of worked chains, one right and one wrong, for stages on preferences: the demonstration's own data."""

import random
from collections.abc import Mapping
from typing import Annotated, Any

from msgspec import Meta

from .examples import ArithmeticExampleOptions, work_out
from .prompts.arithmetic import Chain, chain_options, draw_chain
from .records.base import Preference


class ArithmeticPairOptions(ArithmeticExampleOptions, frozen=True, kw_only=True):
    """The chains, how careless the rejected responses are, and how many pairs there are."""

    pairs: Annotated[int, Meta(ge=1)] = 4096
    error_rate: Annotated[float, Meta(ge=0, le=1)] = 0.2
    skip_rate: Annotated[float, Meta(ge=0, le=1)] = 0.4


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
