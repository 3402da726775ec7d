"""An agent of the tests' models without a tokenizer, through OpenAI's client."""

from typing import Any

from headway.rollout_workers.agents.episode import AgentEpisode, AgentTask

from .numbers import TURNS


async def talk(episode: AgentEpisode, task: AgentTask) -> float:
    """Ask on after each answer; the reward is the number of turns."""
    from openai import AsyncOpenAI

    messages: list[Any] = [{"role": "user", "content": f"{2 + task.seed % 40} 7"}]
    async with AsyncOpenAI(base_url=episode.base_url, api_key=episode.api_key) as client:
        for number in range(TURNS):
            answer = await client.chat.completions.create(model="any", messages=messages, max_tokens=12)
            messages += [answer.choices[0].message, {"role": "user", "content": f"{30 + number} 5"}]
    return float(TURNS)
