"""Agents in host processes: `HostedAgent` runs there, `AgentHosts` in the worker calls it.

An agent's code is the user's: it runs in processes that can be killed, each episode under a deadline, and its calls of
the model come back to the worker's endpoint. A cancelled episode cancels its agent, which frees what it holds.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from headway.broker.errors import ConfigError, HeadwayError
from headway.broker.user_code.host import Program
from headway.broker.user_code.import_paths import ImportRoots
from headway.broker.user_code.pool import HostPool
from headway.rollout_workers.config import AgentConfig
from headway.rollout_workers.rewards.functions import measures, number

from .client import EndpointClient
from .episode import AgentEpisode, AgentTask
from .tools.threads import FREE_S

EPISODES = 1024
"""Episodes that one process plays at once."""

AGENTS_CLOSE_S = 2 * FREE_S
"""Agents and their environments may take so long to end, before their processes are killed: what an episode's thread
holds is given its time twice."""

Played = tuple[float | None, dict[str, float], list[str]]
"""What an agent returned: its reward, its measures, and the names of those that are left out."""


class AgentHosts:
    """Runs agents in processes of this worker."""

    def __init__(self, pool: HostPool, resume: str) -> None:
        self._pool = pool
        self.resume = resume
        """replay or restart, as `kinds.base.Agent` says it."""

    @classmethod
    async def open(cls, config: AgentConfig, roots: ImportRoots, *, checks_servers: bool = False) -> "AgentHosts":
        """Start the processes. Raises ConfigError for an agent that cannot be opened, or lacks something of this
        machine, or, if that is asked, servers elsewhere; UserCodeError where opening it hangs or ends its process."""
        if ":" in config.kind:
            roots.check(config.kind, "agent.kind")
        arguments = {
            "kind": config.kind,
            "options": dict(config.options),
            "named": roots.named,
            "directory": str(roots.directory),
        }
        program = Program(
            name=f"agent {config.kind}",
            factory=f"{__name__}:HostedAgent",
            arguments=arguments,
            import_path=str(roots.directory),
        )
        pool = HostPool(program, processes=config.processes)
        try:
            await pool.open()
            for method in ("check", "check_servers") if checks_servers else ("check",):
                if complaint := await pool.call(method, deadline_s=config.episode_s):
                    raise ConfigError(f"agent.kind={config.kind}: {complaint}")
            resume = await pool.call("resume", deadline_s=config.episode_s)
        except BaseException:
            await pool.close()
            raise
        return cls(pool, resume)

    async def play(
        self, task: AgentTask, base_url: str, api_key: str, *, deadline_s: float, on_lost: Callable[[], None]
    ) -> Played:
        """Play an episode. One whose process was lost is played once more, once `on_lost` was called.

        Raises UserCodeError where the agent raises, returns no reward, or twice ends its process or passes the
        deadline."""
        asked = msgspec.to_builtins(task), base_url, api_key
        played = await self._pool.call("play", *asked, deadline_s=deadline_s, on_lost=on_lost)
        reward, kept, left_out = msgspec.convert(played, Played)
        return reward, kept, left_out

    async def close(self) -> None:
        """Have the agents free what they hold, for AGENTS_CLOSE_S at most, and kill their processes."""
        await self._pool.close("close", AGENTS_CLOSE_S)


class HostedAgent:
    """The agent in its process."""

    places = EPISODES

    def __init__(self, kind: str, options: dict[str, Any], named: list[str], directory: str) -> None:
        from .kinds import open_agent

        self._agent = open_agent(kind, options, ImportRoots(tuple(named), Path(directory)))
        self._client = EndpointClient()
        self._playing = set[asyncio.Task[Any] | None]()

    async def check(self) -> str:
        """Return what this machine lacks of what the agent needs; "": nothing that is known."""
        return await _complaint(self._agent.check())

    async def check_servers(self) -> str:
        """Return which server elsewhere cannot be used; "": none that is known."""
        return await _complaint(self._agent.check_servers())

    def resume(self) -> str:
        """Return how an interrupted episode goes on."""
        return self._agent.resume

    async def play(self, task: Any, base_url: str, api_key: str) -> Any:
        """Play one episode, and return its `Played` as plain data."""
        playing = asyncio.current_task()
        self._playing.add(playing)
        try:
            episode = AgentEpisode(base_url, api_key, partial(self._client.post, base_url))
            return _played(await self._agent.rollout(episode, msgspec.convert(task, AgentTask)))
        finally:
            self._playing.discard(playing)

    async def close(self) -> None:
        """Cancel the episodes that still run, wait until they are freed, and free what they share."""
        playing = [task for task in self._playing if task is not None]
        for task in playing:
            if not task.cancelling():  # a second time would interrupt what frees it
                task.cancel()
        if playing:
            await asyncio.wait(playing)
        await self._agent.close()
        await self._client.close()


async def _complaint(checking: Awaitable[None]) -> str:
    try:
        await checking
    except HeadwayError as error:
        return str(error)
    return ""


def _played(outcome: Any) -> Any:
    """Return what an agent returned as plain data. Raises TypeError or ValueError for what is no outcome."""
    if outcome is None:
        return None, {}, []
    if not isinstance(outcome, Mapping):
        return _reward(outcome), {}, []
    reward = None if outcome.get("reward") is None else _reward(outcome["reward"])
    kept, left_out = measures({str(name): value for name, value in outcome.items() if name != "reward"})
    return reward, kept, left_out


def _reward(value: Any) -> float:
    reward = number(value)
    if reward is None or not math.isfinite(reward):
        raise TypeError(f"rollout returned {value!r:.200}, which is no reward: a finite number, a mapping, or None")
    return reward
