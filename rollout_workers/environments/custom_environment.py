"""An environment of your own by import path, `package.module:Class`, called as Class(**options).

It has `max_turns` and `step(episode) -> Step`, plain or a coroutine, as `Environment` says, and is called from several
threads at once. It runs in processes of its own (`broker.user_code`), under a deadline, as reward functions do.
"""

import inspect
import logging
import math
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from headway.broker.errors import UserCodeError
from headway.broker.user_code.host import Program
from headway.broker.user_code.import_paths import ImportRoots, load_custom
from headway.broker.user_code.pool import HostPool
from headway.rollout_workers.config import EnvironmentConfig
from headway.rollout_workers.rewards.base import CallFailures, DroppedMeasures
from headway.rollout_workers.rewards.functions import measures, number

from . import Environment, Episode, Step

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
