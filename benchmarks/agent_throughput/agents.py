"""The agents that are played. Host processes import this file, and nothing heavy with it."""

import asyncio
import math
import random
from typing import Any

from headway.rollout_workers.agents.conversation import Message, Tool
from headway.rollout_workers.agents.episode import AgentEpisode, AgentTask

TOOLS: list[Tool] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"{what} Use it whenever the user asks for it, and read what it returns with care.",
            "parameters": {
                "type": "object",
                "properties": {
                    "key": {"type": "string", "description": "the key by which the record is found"},
                    "limit": {"type": "integer", "description": "how many records there may be at most"},
                },
                "required": ["key"],
            },
        },
    }
    for name, what in (
        ("look_up", "Looks a record of the database up."),
        ("list_orders", "Lists the orders of a customer."),
        ("refund", "Pays an order back."),
        ("send_note", "Sends a note to a customer."),
    )
]
RULES = "You work at a desk for orders. Answer by calls of tools until nothing is left to do, and then say so. "
FOUND = '{"order": "A-1207", "customer": "c-77", "items": [{"sku": "x-4", "count": 2}], "state": "sent", "total": 41.5}'


class ToolUser:
    """Asks for turns one after another, and tells the model after each what a tool found, which takes its time."""

    def __init__(
        self,
        turns: int,
        instruction_words: int = 150,
        tool_median_s: float = 0.0,
        tool_spread: float = 1.0,
        tool_most_s: float = 30.0,
        clock: float = 1.0,
        max_tokens: int | None = None,
    ) -> None:
        """A tool takes a lognormal time, at most `tool_most_s`; 0 as its median: none at all. `tool_spread`: standard
        deviation of its logarithm. `clock`: real seconds for each of these."""
        self._turns = turns
        self._rules = " ".join((RULES * (1 + instruction_words // len(RULES.split()))).split()[:instruction_words])
        self._median_s, self._spread, self._most_s = tool_median_s, tool_spread, tool_most_s
        self._clock, self._max_tokens = clock, max_tokens

    async def rollout(self, episode: AgentEpisode, task: AgentTask) -> Any:
        """Play one episode. The measures are its answers, and the seconds that its tools took."""
        drawn = random.Random(f"{task.id}-{task.sample}")
        messages: list[Message] = [
            {"role": "system", "content": self._rules},
            {"role": "user", "content": f"Customer {task.id} number {task.sample} asks for the state of an order."},
        ]
        turns, waited_s = 0, 0.0
        for _ in range(self._turns):
            answer = await episode.chat(messages, TOOLS, max_tokens=self._max_tokens)
            if answer.is_over:
                break
            turns += 1
            messages.append(answer.message)
            if turns < self._turns:
                waited_s += await self._tool(drawn)
                messages += found(answer.message)
        return {"reward": 1.0, "answers": turns, "tool_seconds": waited_s}

    async def _tool(self, drawn: random.Random) -> float:
        if not self._median_s:
            return 0.0
        seconds = min(drawn.lognormvariate(math.log(self._median_s), self._spread), self._most_s)
        await asyncio.sleep(seconds * self._clock)
        return seconds


def found(answer: Message) -> list[Message]:
    """Return what the tools of an answer say; where it calls none, the user asks on."""
    calls = answer.get("tool_calls") or []
    if not calls:
        return [{"role": "user", "content": f"Go on. {FOUND}"}]
    return [
        {"role": "tool", "tool_call_id": one["id"], "name": one["function"]["name"], "content": FOUND} for one in calls
    ]
