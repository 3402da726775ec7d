"""Environments answer a turn: the episode ends, or the environment says what the model reads next.

     engine ── turn ──► rewards ── score ──► environment ── step ─┬─ says nothing: the episode ends
        ▲                                                         └─ says something ─┐
        └──────────── the same request, with the said tokens behind the turn ◄───────┘

`base.py` is the seam, `samples/episode.py` plays over it. `single_turn` ends every episode after its first turn;
`second_try` asks once more after a wrong answer; your own has an import path and runs in a process that can be killed.

The invariant: an environment keeps nothing between two turns. Each call gives it all that it needs of an episode, so
that a worker can continue an episode that another one began.
"""

from headway.broker.user_code.import_paths import ImportRoots
from headway.broker.user_code.kinds import typed_options, unknown_kind
from headway.rollout_workers.config import ENVIRONMENTS, EnvironmentConfig

from .base import Environment, Episode, Step


async def open_environment(config: EnvironmentConfig, roots: ImportRoots | None = None) -> Environment:
    """Open the environment of `config.kind`. Raises ConfigError for an unknown kind or option, and for a user's own
    class that may not be imported (`roots`) or cannot be opened."""
    if ":" in config.kind:
        from .custom import open_custom

        return await open_custom(config, roots or ImportRoots())
    return _built_in(config, "")


def check_environment(config: EnvironmentConfig, source: str) -> None:
    """Raise ConfigError for an unknown kind or option. A user's own class is looked for where workers run."""
    if ":" not in config.kind:
        _built_in(config, f"{source}: ")


def _built_in(config: EnvironmentConfig, source: str) -> Environment:
    options = f"{source}environment.options"
    match config.kind:
        case "single_turn":
            from .built_in import SingleTurn, SingleTurnOptions

            typed_options(config.options, SingleTurnOptions, options)
            return SingleTurn()
        case "second_try":
            from .built_in import SecondTry, SecondTryOptions

            return SecondTry(typed_options(config.options, SecondTryOptions, options))
        case unknown:
            raise unknown_kind(unknown, ENVIRONMENTS, f"{source}environment.kind")


__all__ = ["Environment", "Episode", "Step", "check_environment", "open_environment"]
