"""Environments answer a turn: the episode ends, or the environment says what the model reads next.

     engine ── turn ──► rewards ── score ──► environment ── step ─┬─ says nothing: the episode ends
        ▲                                                         └─ says something ─┐
        └──────────── the same request, with the said tokens behind the turn ◄───────┘

`Environment` is the seam, `samples/episode.py` plays over it. `single_turn` ends every episode after its first turn;
`second_try` asks once more after a wrong answer. Your own has an import path, `package.module:Class`, is called as
Class(**options), and answers from several threads at once. It runs in processes of its own (`broker.user_code`), under
a deadline, as reward functions do.

The invariant: an environment keeps nothing between two turns. Each call gives it all that it needs of an episode, so
that a worker can continue an episode that another one began.
"""

import inspect
import logging
import math
from collections.abc import Awaitable, Mapping
from pathlib import Path
from typing import Annotated, Any, Protocol

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from headway.broker.errors import UserCodeError
from headway.broker.schema import Prompt
from headway.broker.user_code.host import Program
from headway.broker.user_code.import_paths import ImportRoots, load_custom
from headway.broker.user_code.kinds import typed_options, unknown_kind
from headway.broker.user_code.pool import HostPool
from headway.rollout_workers.config import ENVIRONMENTS, EnvironmentConfig
from headway.rollout_workers.rewards.base import CallFailures, DroppedMeasures
from headway.rollout_workers.rewards.functions import measures, number


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


StepResult = tuple[Step, list[str], int]
"""A step, the names of its measures that are left out, and the length of what it says if that is left out."""
THREADS = 32
COROUTINES = 1024
log = logging.getLogger(__name__)


async def open_custom(config: EnvironmentConfig, roots: ImportRoots) -> "CustomEnvironment":
    """Open `package.module:Class` in processes of its own. Raises ConfigError if it does not exist, may not be imported
    or has no `max_turns` of 1 or more, UserCodeError if opening it hangs or ends its process."""
    roots.check(config.kind, "environment.kind")
    program = Program(
        name=f"environment {config.kind}",
        factory=f"{__name__}:HostedEnvironment",
        arguments={
            "path": config.kind,
            "options": dict(config.options),
            "named": roots.named,
            "directory": str(roots.directory),
            "max_says": config.max_says,
        },
        import_path=str(roots.directory),
    )
    pool = HostPool(program, processes=config.processes)
    try:
        await pool.open()
        max_turns = await pool.call("max_turns", deadline_s=config.deadline_s)
    except BaseException:
        await pool.close()
        raise
    return CustomEnvironment(config, pool, max_turns)


class CustomEnvironment:
    """Calls one class in processes that can be killed."""

    def __init__(self, config: EnvironmentConfig, pool: HostPool, max_turns: int) -> None:
        self.kind = config.kind
        self.max_turns = max_turns
        self._max_says = config.max_says
        self._too_long = 0
        self._pool = pool
        self._deadline_s = config.deadline_s
        self._left_out = DroppedMeasures(f"environment {config.kind}")
        self._failures = CallFailures(
            f"environment {config.kind}",
            "Return a Step for every episode, within environment.deadline_s.",
            config.deadline_s,
        )

    async def step(self, episode: Episode) -> Step:
        """Answer the last turn. What the class says beyond `environment.max_says` is not said: it is asked once more,
        as if there were no room, and `components` has `says_too_long`. Raises UnscoredError if `step` twice raises,
        returns no Step, passes its deadline or ends its process; RewardError if it fails again and again."""
        step, too_long = await self._step(episode)
        if not too_long:
            return step
        self._too_long += 1
        if math.log10(self._too_long).is_integer():
            log.warning(
                "environment %s says %d characters or token ids, of environment.max_says=%d, on prompt %r: it is not"
                " said, and the episode ends. So it was %d times so far.",
                self.kind,
                too_long,
                self._max_says,
                episode.prompt.group,
                self._too_long,
            )
        step, _ = await self._step(replace(episode, finish_reason="length", room=0))
        return replace(step, says="", components={**step.components, "says_too_long": 1.0})

    async def _step(self, episode: Episode) -> tuple[Step, int]:
        """Return what the class answers, and the length of what it says if that is too long and left out."""
        try:
            answered = await self._pool.call("step", msgspec.to_builtins(episode), deadline_s=self._deadline_s)
        except UserCodeError as error:
            raise self._failures.note(episode.prompt, error) from error
        self._failures.note_success()
        step, left_out, too_long = msgspec.convert(answered, StepResult)
        return replace(step, components=self._left_out.note(dict(step.components), left_out)), too_long

    async def close(self) -> None:
        """Kill its processes."""
        await self._pool.close()


class HostedEnvironment:
    """The user's class in its process. It checks what the class returns, and sends it as plain data."""

    def __init__(self, path: str, options: dict[str, Any], named: list[str], directory: str, max_says: int) -> None:
        self._environment = load_custom(
            path,
            Environment,
            "environment.kind",
            lambda own: own(**options),
            roots=ImportRoots(tuple(named), Path(directory)),
            not_asked=("close",),
        )
        self._max_says = max_says
        self._most: int = self._environment.max_turns
        if not isinstance(self._most, int) or self._most < 1:
            raise ValueError(f"its max_turns is {self._most!r}, which is no number of turns")
        self.places = COROUTINES if inspect.iscoroutinefunction(self._environment.step) else THREADS

    def max_turns(self) -> int:
        """See Environment."""
        return self._most

    def step(self, episode: Any) -> Any:
        """See Environment. Raises what the class raises, and TypeError or ValueError for a result that is no Step."""
        answered = self._environment.step(msgspec.convert(episode, Episode))
        return self._later(answered) if inspect.isawaitable(answered) else _plain(answered, self._max_says)

    async def _later(self, answered: Awaitable[Any]) -> Any:
        return _plain(await answered, self._max_says)


def _plain(step: Any, max_says: int) -> Any:
    """Return the parts of `StepResult` as plain data."""
    if not isinstance(step, Step):
        raise TypeError(f"step returned {step!r:.200}, which is no headway.rollout_workers.environments.Step")
    reward = number(step.reward)
    if reward is None or not math.isfinite(reward):
        raise ValueError(f"step returned a reward of {step.reward!r:.200}, which is no finite number")
    components, left_out = measures(step.components)
    too_long = len(step.says) if len(step.says) > max_says else 0
    step = replace(step, reward=reward, components=components, says="" if too_long else step.says)
    plain = msgspec.to_builtins((step, left_out, too_long))
    msgspec.convert(plain, StepResult)  # raises for a result that is no Step
    return plain


async def open_environment(config: EnvironmentConfig, roots: ImportRoots | None = None) -> Environment:
    """Open the environment of `config.kind`. Raises ConfigError for an unknown kind or option, and for a user's own
    class that may not be imported (`roots`) or cannot be opened."""
    if ":" in config.kind:
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
