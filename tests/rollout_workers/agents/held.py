"""Agents that hold something for their episodes, which they free when they end."""

import asyncio
from pathlib import Path
from typing import Any

from headway.rollout_workers.agents.episode import AgentEpisode, AgentTask


async def says_text(episode: AgentEpisode, task: AgentTask) -> Any:
    """Return what is no outcome."""
    return "1.0"


class Held:
    """Plays until it is cancelled, and takes a moment to free an episode."""

    def __init__(self, directory: str, hangs: bool = False) -> None:
        self._directory = Path(directory)
        self._hangs = hangs

    async def rollout(self, episode: AgentEpisode, task: AgentTask) -> float:
        """Never return."""
        (self._directory / "begun").touch()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(1e6 if self._hangs else 0.1)
            self._note("episode")
        return 0.0

    def close(self) -> None:
        """Note it."""
        self._note("agent")

    def _note(self, what: str) -> None:
        with (self._directory / "ends").open("a") as file:
            file.write(f"{what}\n")
