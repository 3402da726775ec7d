"""Rewards score responses: built-in ones, your own function by import path, or a weighted sum of several.

     RewardConfig(kind, weight) ──open_reward──► WeightedSum ─┬─ arithmetic, math_verify, reasoning_gym
                                                              ├─ package.module:function (verl, TRL)
                                                              └─ reward_model ──asks──► scorers

The invariant: nothing is ever trained on a score that no function returned. A call of your own function that raises,
hangs or ends its process is made once more. If that fails too, the worker gives the sample up, to be generated again.
A worker that could score none of several samples in a row ends with an error that names function and prompt.
"""

from collections.abc import Callable, Sequence

from headway.broker.errors import ConfigError
from headway.broker.installation import check_extra
from headway.broker.user_code.import_paths import ImportRoots
from headway.broker.user_code.kinds import unknown_kind
from headway.rollout_workers.config import REWARDS, RewardConfig
from headway.rollout_workers.scorers import TokenScorer

from .base import Reward, Score
from .built_in import ArithmeticReward, ModelReward, WeightedReward, WeightedSum, ZeroReward

EXTRAS = {"reasoning_gym": ("reasoning-gym", "reasoning_gym")}
"""The kinds that need an extra of Headway, which is named after its package, and the package's module."""

ScorerOpener = Callable[[str, RewardConfig], TokenScorer]
"""Opens the scorer of a reward model by the name of its reward."""


async def open_reward(
    configs: Sequence[RewardConfig],
    roots: ImportRoots | None = None,
    open_scorer: ScorerOpener | None = None,
    *,
    warms: bool = False,
) -> Reward:
    """Open the weighted sum of `configs`. `open_scorer` opens what reward models are asked through. With `warms`, the
    processes that import a package for it start now and not at the first score, which waits for them.

    Raises ConfigError for a kind that does not exist, may not be imported (`roots`, by default Headway's own modules
    and the working directory's) or cannot be called.
    """
    if not configs:
        raise ConfigError(f"rewards: none given; name at least one of {', '.join(REWARDS)} or package.module:function")
    roots, terms = roots or ImportRoots(), list[WeightedReward]()
    try:
        for name, config in zip(reward_names(configs), configs, strict=True):
            reward = await open_single(name, config, roots, open_scorer, warms=warms)
            terms.append(WeightedReward(name, config.weight, reward, config.mean, config.std, config.clip))
    except BaseException:
        await WeightedSum(terms).close()
        raise
    return WeightedSum(terms)


async def open_single(
    name: str, config: RewardConfig, roots: ImportRoots, open_scorer: ScorerOpener | None = None, *, warms: bool = False
) -> Reward:
    """Open one reward, without its weight. The arguments and errors are those of `open_reward`."""
    match config.kind:
        case "reward_model":
            if open_scorer is None:
                raise ConfigError("rewards: a reward_model is asked by the workers of a run, and there is none here.")
            return ModelReward(name, open_scorer(name, config), config.deadline_s)
        case "arithmetic":
            return ArithmeticReward()
        case "math_verify":
            from .math_verify_reward import MathVerifyReward

            return MathVerifyReward(config.deadline_s, config.processes, warms=warms)
        case "reasoning_gym":
            from .reasoning_gym_reward import ReasoningGymReward

            check_installed(config.kind)
            return ReasoningGymReward(config.deadline_s, config.processes, warms=warms)
        case path if ":" in path:
            from .functions import open_function

            return await open_function(config, roots)
        case unknown:
            raise unknown_kind(unknown, REWARDS, "rewards.kind")


def check_installed(kind: str, key: str = "rewards.kind") -> None:
    """Raise ConfigError, with the remedy, if the package of a reward of this kind is missing. `key` names it."""
    if kind in EXTRAS:
        extra, module = EXTRAS[kind]
        check_extra(extra, module, f"{key}={kind}", name=extra)


def reward_names(configs: Sequence[RewardConfig]) -> list[str]:
    """Return short names for metrics and scorers. The second function of a name gets `_2`."""
    short = [config.kind.rsplit(":", 1)[-1] for config in configs]
    counts = [short[: index + 1].count(name) for index, name in enumerate(short)]
    return [name if count == 1 else f"{name}_{count}" for name, count in zip(short, counts, strict=True)]


__all__ = [
    "Reward",
    "Score",
    "ScorerOpener",
    "ZeroReward",
    "check_installed",
    "open_reward",
    "open_single",
    "reward_names",
]
