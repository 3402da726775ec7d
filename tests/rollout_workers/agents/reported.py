"""An agent that forks, has a call refused, waits for a tool, and fails now and then."""

import asyncio
import os

import aiohttp

from headway.rollout_workers.agents.conversation import Message
from headway.rollout_workers.agents.episode import AgentEpisode, AgentTask

FIRST: list[Message] = [{"role": "user", "content": "9 9"}]


async def roam(episode: AgentEpisode, task: AgentTask) -> dict[str, float]:
    """Ask for another temperature, ask, wait until a file is there, and ask with a history that was rewritten."""
    async with aiohttp.ClientSession() as client:
        asked = {"model": "m", "messages": FIRST, "temperature": 0.125}
        async with client.post(f"{episode.base_url}/chat/completions", json=asked) as answer:
            assert answer.status == 400
    one = await episode.chat(FIRST, max_tokens=12)
    while not os.path.exists(os.environ["AGENT_GO"]):  # noqa: ASYNC110, ASYNC240 - another process writes it
        await asyncio.sleep(0.01)
    if task.sample == 1:
        raise KeyError("lost")
    await episode.chat([{"role": "user", "content": "8 8"}, one.message, *FIRST], max_tokens=12)
    return {"reward": 1.0, "turns": 100.0, "own": 2.0}


async def insist(episode: AgentEpisode, task: AgentTask) -> float:
    """Ask twice at the temperature that the environment names, as a program does that knows of no evaluation."""
    async with aiohttp.ClientSession() as client:
        asked = {"model": "m", "messages": FIRST, "max_tokens": 12, "temperature": float(os.environ["AGENT_ASKS"])}
        for _ in range(2):
            async with client.post(f"{episode.base_url}/chat/completions", json=asked) as answer:
                if answer.status != 200:
                    raise ValueError(await answer.text())
    return 1.0
