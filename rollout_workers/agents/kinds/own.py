"""Your own agent: `package.module:rollout`, an `async def rollout(episode, task)`, or a class with that method."""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from headway.broker.errors import ConfigError
from headway.broker.user_code.import_paths import ImportRoots, in_one_paragraph
from headway.rollout_workers.agents.episode import AgentEpisode, AgentTask, Outcome

from .base import Agent, ShapeError, finite, resume_of
from .threads import EpisodeThread


class OwnAgent:
    """Calls the user's function, or the method of one object that is made with the options."""

    def __init__(self, path: str, options: Mapping[str, Any], roots: ImportRoots, where: str) -> None:
        own = roots.load(path, f"{where}.kind")
        self._object: Any = None
        self._rollout: Callable[..., Any] = partial(own, **options)
        if isinstance(own, type):
            with in_one_paragraph(path, f"{where}.kind"):
                self._object = own(**options)
            self._rollout = getattr(self._object, "rollout", own)
        _check(path, self._rollout, where)
        self._path = path
        self.resume = resume_of(own if self._object is None else self._object, f"{where}.kind")

    async def rollout(self, episode: AgentEpisode, task: AgentTask) -> Outcome:
        """Play one episode. Raises ShapeError for a result that is no outcome."""
        result = await self._rollout(episode, task)
        if result is None:
            return None
        if isinstance(result, Mapping):
            return {str(name): finite(value, f"{self._path}: {name!r} in its result") for name, value in result.items()}
        if isinstance(result, str | bytes):
            raise ShapeError(
                f"{self._path} returned {result!r:.200}; it must return a number, several by names, or None."
            )
        return finite(result, f"{self._path}: its result")

    async def close(self) -> None:
        """Call the object's own `close`, where it has one."""
        closing = getattr(self._object, "close", None)
        if callable(closing):
            await EpisodeThread().close(closing)


def _check(path: str, rollout: Callable[..., Any], where: str) -> None:
    """Raise ConfigError for what is no coroutine function of an episode and a task."""
    function, options = (rollout.func, rollout.keywords) if isinstance(rollout, partial) else (rollout, {})
    if not inspect.iscoroutinefunction(function):
        raise ConfigError(
            f"{where}.kind: {path!r} is no agent: write async def rollout(episode, task), or a class with that method."
        )
    try:
        inspect.signature(function).bind(None, None, **options)
    except TypeError as error:
        called = ", ".join(("episode", "task", *(f"{name}=..." for name in options)))
        raise ConfigError(f"{where}.kind: {path!r} cannot be called as rollout({called}): {error}.") from error


def open_own(path: str, options: Mapping[str, Any], roots: ImportRoots, where: str) -> Agent:
    """Open the user's own agent. Raises ConfigError."""
    return OwnAgent(path, options, roots, where)
