"""Environments answer a turn: the episode ends, or the environment says what the model reads next.

     engine ── turn ──► rewards ── score ──► environment ── step ─┬─ says nothing: the episode ends
        ▲                                                         └─ says something ─┐
        └──────────── the same request, with the said tokens behind the turn ◄───────┘

`Environment` is the seam, `samples/episode.py` plays over it. `single_turn` ends every episode after its first turn;
`second_try` asks once more after a wrong answer; your own has an import path and runs in a process that can be killed
(`custom_environment.py`).

The invariant: an environment keeps nothing between two turns. Each call gives it all that it needs of an episode, so
that a worker can continue an episode that another one began.
"""

from collections.abc import Mapping
from typing import Annotated, Protocol

import msgspec
from msgspec import Meta

from headway.broker.schema import Prompt
from headway.broker.user_code.import_paths import ImportRoots
from headway.broker.user_code.kinds import typed_options, unknown_kind
from headway.rollout_workers.config import ENVIRONMENTS, EnvironmentConfig


class Episode(msgspec.Struct, frozen=True, kw_only=True):
    """An episode up to the end of a turn."""

    prompt: Prompt
    """The task, with the fields of its row."""
    answers: tuple[str, ...]
    """The model's answers, turn by turn, without the tokens that ended the turns. The last one is to be answered."""
    rewards: tuple[float, ...] = ()
    """The rewards of the turns before the last."""
    score: float
    """The weighted sum of the reward functions for the last answer."""
    finish_reason: str
    """The end of the last turn: "stop", or "length" if no further turn may follow."""
    room: int
    """Tokens that are left for what the environment says and for all that the model answers."""


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """The environment's answer to a turn."""

    reward: float
    """The reward of this turn alone; an episode's reward is the sum over its turns."""
    components: Mapping[str, float] = {}
    """Further measures of the episode, for people to read. Those of its last turn are kept."""
    says: str | tuple[int, ...] = ""
    """Text or token ids that the model reads next; empty: the episode ends."""


class Environment(Protocol):
    """Answers turns, many at a time. It keeps nothing between two turns: another worker may play the next one."""

    max_turns: int
    """The most turns of an episode. A sample needs no engine after its last turn, whatever the environment says."""

    async def step(self, episode: Episode) -> Step:
        """Answer the last turn, without blocking the event loop.

        If the answer leaves the model no room for a token, it is not said and the episode ends. Raises UnscoredError if
        this sample is to be given up, RewardError if the worker is to end.
        """
        ...

    async def close(self) -> None:
        """Free threads and processes. Idempotent."""
        ...


class SingleTurnOptions(msgspec.Struct, frozen=True, kw_only=True):
    """There are no options."""


class SingleTurn:
    """Ends every episode after its first turn."""

    max_turns = 1

    async def step(self, episode: Episode) -> Step:
        """End the episode, with the score as its reward."""
        return Step(reward=episode.score)

    async def close(self) -> None:
        """Do nothing: there is nothing to free."""


class SecondTryOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The hint after a wrong answer, and the reward of the next answer."""

    hint: Annotated[str, Meta(min_length=1)] = "\nNot right. Try once more:\n"
    """Text that the model reads after a wrong answer; `{prompt}` in it stands for the prompt's text."""
    discount: Annotated[float, Meta(ge=0, le=1)] = 0.5
    """Factor of the second answer's score."""
    right_from: Annotated[float, Meta(ge=-1e9, le=1e9)] = 1.0
    """The score from which on an answer counts as right."""


class SecondTry:
    """Plays at most two turns. A right answer ends the episode; a wrong one has no reward if a second one follows.

    `first_try` and `second_try` measure in how many episodes the first answer, or the second, was right.
    """

    max_turns = 2

    def __init__(self, options: SecondTryOptions) -> None:
        self._options = options

    async def step(self, episode: Episode) -> Step:
        """Say the hint after a wrong first answer, if it fits; otherwise end the episode."""
        is_first, is_right = len(episode.answers) == 1, episode.score >= self._options.right_from
        if is_first and not is_right and episode.finish_reason == "stop":
            return Step(reward=0.0, says=self._options.hint.replace("{prompt}", episode.prompt.text))
        return Step(
            reward=episode.score if is_first else self._options.discount * episode.score,
            components={"first_try": float(is_first and is_right), "second_try": float(not is_first and is_right)},
        )

    async def close(self) -> None:
        """Do nothing: there is nothing to free."""


async def open_environment(config: EnvironmentConfig, roots: ImportRoots | None = None) -> Environment:
    """Open the environment of `config.kind`. Raises ConfigError for an unknown kind or option, and for a user's own
    class that may not be imported (`roots`) or cannot be opened."""
    if ":" in config.kind:
        from .custom_environment import open_custom

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
            typed_options(config.options, SingleTurnOptions, options)
            return SingleTurn()
        case "second_try":
            return SecondTry(typed_options(config.options, SecondTryOptions, options))
        case unknown:
            raise unknown_kind(unknown, ENVIRONMENTS, f"{source}environment.kind")
