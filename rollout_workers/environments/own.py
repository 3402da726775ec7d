"""An environment of your own by import path, `package.module:Class`, called as Class(**options).

It has `max_turns` and `step(episode) -> Step`, plain or a coroutine, as `base.py` says, and is called from several
threads at once. It runs in processes of its own (`broker.user_code`), under a deadline, as reward functions do.
"""

import inspect
import math
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from broker.errors import UserCodeError
from broker.user_code.own import make_own
from broker.user_code.pool import HostPool
from broker.user_code.roots import ImportRoots
from broker.user_code.wire import Program
from rollout_workers.config import EnvironmentConfig
from rollout_workers.rewards.failures import Failures, LeftOut
from rollout_workers.rewards.function_calls import measures, number

from .base import Environment, Episode, Step

THREADS = 32
COROUTINES = 1024


async def open_own(config: EnvironmentConfig, roots: ImportRoots) -> "OwnEnvironment":
    """Open `package.module:Class` in processes of its own. Raises ConfigError if it does not exist, may not be imported
    or has no `max_turns` of 1 or more, UserCodeError if opening it hangs or ends its process."""
    roots.check(config.kind, "environment.kind")
    program = Program(
        name=f"environment {config.kind}",
        factory=f"{__name__}:Opened",
        arguments={
            "path": config.kind,
            "options": dict(config.options),
            "named": roots.named,
            "directory": str(roots.directory),
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
    return OwnEnvironment(config, pool, max_turns)


class OwnEnvironment:
    """Calls one class in processes that can be killed."""

    def __init__(self, config: EnvironmentConfig, pool: HostPool, max_turns: int) -> None:
        self.max_turns = max_turns
        self._pool = pool
        self._deadline_s = config.deadline_s
        self._left_out = LeftOut(f"environment {config.kind}")
        self._failures = Failures(
            f"environment {config.kind}",
            "Return a Step for every episode, within environment.deadline_s.",
            config.deadline_s,
        )

    async def step(self, episode: Episode) -> Step:
        """Answer the last turn. Raises UnscoredError if `step` twice raises, returns no Step, passes its deadline or
        ends its process; RewardError if it fails again and again."""
        try:
            answered = await self._pool.call("step", msgspec.to_builtins(episode), deadline_s=self._deadline_s)
        except UserCodeError as error:
            raise self._failures.note(episode.prompt, error) from error
        self._failures.note_success()
        step, left_out = msgspec.convert(answered, tuple[Step, list[str]])
        return replace(step, components=self._left_out.note(dict(step.components), left_out))

    async def close(self) -> None:
        """Kill its processes."""
        await self._pool.close()


class Opened:
    """The user's class in its process. It checks what the class returns, and sends it as plain data."""

    def __init__(self, path: str, options: dict[str, Any], named: list[str], directory: str) -> None:
        self._environment = make_own(
            path,
            Environment,
            "environment.kind",
            lambda own: own(**options),
            roots=ImportRoots(tuple(named), Path(directory)),
            not_asked=("close",),
        )
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
        return _later(answered) if inspect.isawaitable(answered) else _plain(answered)


async def _later(answered: Awaitable[Any]) -> Any:
    return _plain(await answered)


def _plain(step: Any) -> Any:
    if not isinstance(step, Step):
        raise TypeError(f"step returned {step!r:.200}, which is no rollout_workers.environments.Step")
    reward = number(step.reward)
    if reward is None or not math.isfinite(reward):
        raise ValueError(f"step returned a reward of {step.reward!r:.200}, which is no finite number")
    components, left_out = measures(step.components)
    plain = msgspec.to_builtins((replace(step, reward=reward, components=components), left_out))
    msgspec.convert(plain, tuple[Step, list[str]])  # raises for a result that is no Step
    return plain
