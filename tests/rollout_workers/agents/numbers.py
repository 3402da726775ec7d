"""A chat format of numbers for models without a tokenizer, and agents that talk in it."""

import asyncio
import os
from collections.abc import Sequence
from typing import Any

from headway.rollout_workers.agents.conversation import Message, ParsedAnswer, Tool
from headway.rollout_workers.agents.episode import AgentCallError, AgentEpisode, AgentTask

USER, ASSISTANT = 62, 63
STOPS = tuple(range(0, 56, 8))
TURNS = 4


class NumberFormat:
    """Contents are token ids with spaces between them; a marker begins each message."""

    name = "numbers"
    stop_token_ids = STOPS

    def render(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        """See ChatFormat."""
        found: list[int] = []
        for message in messages:
            found += [ASSISTANT if message["role"] == "assistant" else USER, *map(int, message["content"].split())]
        return [*found, ASSISTANT]

    def bridge(self, previous: Sequence[int], new: Sequence[Message], tools: Sequence[Tool]) -> list[int] | None:
        """See ChatFormat."""
        return self.render(new, tools)

    def parse(self, token_ids: Sequence[int], tools: Sequence[Tool]) -> ParsedAnswer:
        """See ChatFormat."""
        return ParsedAnswer(content=" ".join(map(str, token_ids)))


async def talk(episode: AgentEpisode, task: AgentTask) -> dict[str, float]:
    """Ask on after each answer; the reward is the number of turns."""
    messages: list[Message] = [{"role": "user", "content": f"{2 + task.seed % 40} 7"}]
    turns = 0
    for number in range(TURNS):
        answer = await episode.chat(messages)
        if answer.is_over:
            break
        turns += 1
        await episode.reward(0.25)
        messages += [answer.message, {"role": "user", "content": f"{30 + number} 5"}]
    return {"reward": float(turns), "asked": float(turns)}


async def explore(episode: AgentEpisode, task: AgentTask) -> float:
    """Ask twice at a time, then go on from the first answer, with a title in between."""
    first: list[Message] = [{"role": "user", "content": "9 9"}]
    one, _ = await asyncio.gather(episode.chat(first, max_tokens=12), episode.chat(first, max_tokens=12))
    await episode.chat([{"role": "system", "content": "3"}, {"role": "user", "content": "4"}], max_tokens=12)
    await episode.chat([*first, one.message, {"role": "user", "content": "11"}], max_tokens=12)
    return 1.0


async def stray(episode: AgentEpisode, task: AgentTask) -> float:
    """Ask by a token that the model does not have, and then by one that it has; the reward is what was refused."""
    refused = 0
    for token in (64, 9):
        try:
            await episode.generate([9, token], max_tokens=12)
        except AgentCallError as error:
            refused += "token id 64 is none of the model's 64" in str(error)
    return float(refused)


async def fail(episode: AgentEpisode, task: AgentTask) -> float:
    """Raise after a turn that was rewarded."""
    await episode.chat([{"role": "user", "content": "9 9"}], max_tokens=12)
    await episode.reward(0.5)
    raise KeyError("lost")


async def leave(episode: AgentEpisode, task: AgentTask) -> None:
    """Return no reward."""
    await episode.chat([{"role": "user", "content": "9 9"}], max_tokens=12)


def is_first(task: AgentTask, what: str) -> bool:
    """Whether no other call asked the same of this sample, in any process."""
    try:
        os.mkdir(f"{os.environ['AGENT_MARKS']}/{task.id}-{task.sample}-{what}")
    except FileExistsError:
        return False
    return True


async def forget(episode: AgentEpisode, task: AgentTask) -> float:
    """Of half of all episodes, end the process after a turn, and then return without having asked for it again."""
    forgets = task.sample == 0
    if forgets and is_first(task, "end"):
        await episode.chat([{"role": "user", "content": "9 9"}], max_tokens=12)
        os._exit(1)
    if not forgets or not is_first(task, "forget"):
        await episode.chat([{"role": "user", "content": "9 9"}], max_tokens=12)
    return 1.0


async def hang(episode: AgentEpisode, task: AgentTask) -> float:
    """Hang in the first attempt at half of all episodes, after a turn."""
    await episode.chat([{"role": "user", "content": "9 9"}], max_tokens=12)
    if task.sample == 0 and is_first(task, "hang"):
        await asyncio.sleep(1e6)
    return 1.0


async def die(episode: AgentEpisode, task: AgentTask) -> float:
    """End the process in the first attempt at each episode, after a turn."""
    answer = await episode.chat([{"role": "user", "content": "9 9"}], max_tokens=12)
    if is_first(task, "die"):
        os._exit(1)
    await episode.chat([{"role": "user", "content": "9 9"}, answer.message, {"role": "user", "content": "1"}])
    return 1.0


async def die_and_restart(episode: AgentEpisode, task: AgentTask) -> float:
    """Do the same, and take no answer of an attempt before."""
    return await die(episode, task)


die_and_restart.resume = "restart"  # type: ignore[attr-defined]


class Slow:
    """Waits for a file after its second turn."""

    async def rollout(self, episode: AgentEpisode, task: AgentTask) -> Any:
        """See `episode`."""
        messages: list[Message] = [{"role": "user", "content": f"{2 + task.seed % 40} 7"}]
        for number in range(TURNS):
            answer = await episode.chat(messages, max_tokens=16)
            messages += [answer.message, {"role": "user", "content": f"{30 + number} 5"}]
            if number == 1:
                while not os.path.exists(os.environ["AGENT_GO"]):  # noqa: ASYNC110, ASYNC240 - another process writes it
                    await asyncio.sleep(0.02)
        return 1.0


class SlowAndRestarted(Slow):
    """Takes no answer of an attempt before."""

    resume = "restart"
