"""Your own agent: `package.module:rollout`, an `async def rollout(episode, task)`, or a class with that method."""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from headway.broker.errors import ConfigError
from headway.broker.user_code.import_paths import ImportRoots, in_one_paragraph
from headway.rollout_workers.agents.episode import Agent, AgentEpisode, AgentTask, Outcome
from headway.rollout_workers.agents.tools.threads import EpisodeThread

from .base import resume_of


class OwnAgent(Agent):
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
        self.resume = resume_of(own if self._object is None else self._object, f"{where}.kind")

    async def rollout(self, episode: AgentEpisode, task: AgentTask) -> Outcome:
        """Play one episode."""
        returned: Outcome = await self._rollout(episode, task)
        return returned

    async def close(self) -> None:
        """Call the object's own `close`, where it has one."""
        await EpisodeThread().close(self._object)


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
