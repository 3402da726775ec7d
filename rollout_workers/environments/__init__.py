"""What comes after a turn: the end of the episode, or what the environment says before the model goes on.

     engine ── turn ──► rewards ── score ──► environment ── step ─┬─ says nothing: the episode ends
        ▲                                                         └─ says something ─┐
        └──────────── the same request, with what was said behind the turn ◄─────────┘

`base.py` is the seam, `samples/episode.py` plays over it. `single_turn` ends every episode after its first turn;
`second_try` asks once more after a wrong answer; your own goes by import path and runs in a process that can be killed.

The invariant: an environment keeps nothing between two turns. All that it needs of an episode is in what it is given,
so that a worker goes on with an episode that another one began.
"""

from broker.user_code.kinds import unknown_kind
from broker.user_code.options import typed_options
from broker.user_code.roots import ImportRoots
from rollout_workers.config import ENVIRONMENTS, EnvironmentConfig

from .base import Environment, Episode, Step


async def open_environment(config: EnvironmentConfig, roots: ImportRoots | None = None) -> Environment:
    """The environment of `config.kind`. Raises ConfigError where there is none of that kind, where an option is none of
    its own, or where one's own may not be imported (`roots`) or cannot be opened."""
    if ":" in config.kind:
        from .own import open_own

        return await open_own(config, roots or ImportRoots())
    return _built_in(config, "")


def check_environment(config: EnvironmentConfig, source: str) -> None:
    """Raise ConfigError for a kind or an option that there is not; one's own are looked for where workers run."""
    if ":" not in config.kind:
        _built_in(config, f"{source}: ")


def _built_in(config: EnvironmentConfig, source: str) -> Environment:
    options = f"{source}environment.options"
    match config.kind:
        case "single_turn":
            from .single_turn import SingleTurn, SingleTurnOptions

            typed_options(config.options, SingleTurnOptions, options)
            return SingleTurn()
        case "second_try":
            from .second_try import SecondTry, SecondTryOptions

            return SecondTry(typed_options(config.options, SecondTryOptions, options))
        case unknown:
            raise unknown_kind(unknown, ENVIRONMENTS, f"{source}environment.kind")


__all__ = ["Environment", "Episode", "Step", "check_environment", "open_environment"]
