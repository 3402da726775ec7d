"""Rewards score responses: built-in scorers, your own function by import path, or a weighted sum of several.

     RewardConfig(kind, weight) ──open_reward──► WeightedSum ─┬─ arithmetic, math_verify, reasoning_gym
                                                              └─ package.module:function (verl, TRL)

The invariant: nothing is ever trained on a score that no function returned. A call of your own function that raises,
hangs or ends its process is made once more. If that fails too, the worker gives the sample up, to be generated anew. A
worker that could score none of several samples in a row ends with an error that names function and prompt.
"""

from collections.abc import Sequence

from broker.errors import ConfigError
from broker.user_code.kinds import unknown_kind
from broker.user_code.roots import ImportRoots
from rollout_workers.config import REWARDS, RewardConfig

from .base import Score, Scorer
from .unjudged import Unjudged


async def open_reward(configs: Sequence[RewardConfig], roots: ImportRoots | None = None) -> Scorer:
    """Open the weighted sum of `configs`. Raises ConfigError for a kind that does not exist, may not be imported
    (`roots`, by default Headway's own modules and the working directory's) or cannot be called."""
    from .weighted import WeightedScorer, WeightedSum

    if not configs:
        raise ConfigError(f"rewards: none given; name at least one of {', '.join(REWARDS)} or package.module:function")
    roots = roots or ImportRoots()
    names = _names([config.kind for config in configs])
    return WeightedSum(
        [WeightedScorer(n, c.weight, await _open(c, roots)) for n, c in zip(names, configs, strict=True)]
    )


async def _open(config: RewardConfig, roots: ImportRoots) -> Scorer:
    match config.kind:
        case "arithmetic":
            from .arithmetic import ArithmeticScorer

            return ArithmeticScorer()
        case "math_verify":
            from .math_verify import MathVerifyScorer

            return MathVerifyScorer(config.deadline_s, config.processes)
        case "reasoning_gym":
            from .reasoning_gym import ReasoningGymScorer

            return ReasoningGymScorer(config.deadline_s, config.processes)
        case path if ":" in path:
            from .functions import open_function

            return await open_function(config, roots)
        case unknown:
            raise unknown_kind(unknown, REWARDS, "rewards.kind")


def _names(kinds: Sequence[str]) -> list[str]:
    """Return short names for metrics. The second function of a name gets `_2`."""
    short = [kind.rsplit(":", 1)[-1] for kind in kinds]
    counts = [short[: index + 1].count(name) for index, name in enumerate(short)]
    return [name if count == 1 else f"{name}_{count}" for name, count in zip(short, counts, strict=True)]


__all__ = ["Score", "Scorer", "Unjudged", "open_reward"]
