"""Agents that no worker starts: they ask a worker's endpoint for a task, play it over their session's URL, and end it.

    POST /sessions            key of the gateway        ─► {session, base_url, task}, or 204 if no task is free now
    POST /s/SESSION/v1/...    calls of the model
    POST /s/SESSION/finish    {reward, measures}

A session's name is made of the key and the sample, so that it stays the same at the next attempt: a client that repeats
its call while another worker takes the episode over goes on there, if it has the same address and key.
"""

import asyncio
import hmac
import os
from collections import deque
from collections.abc import Callable
from hashlib import blake2b
from typing import Any

import msgspec

from headway.broker.errors import ConfigError, UserCodeError

from .calls import CallRefusedError
from .episode import AgentTask

EXTERNAL = "external"
"""The kind of agents that come from outside."""
KEY, SHORTEST_KEY = "HEADWAY_GATEWAY_KEY", 16
NAME_BYTES = 18


class ExternalOptions(msgspec.Struct, frozen=True, kw_only=True):
    """There are no options: agents from outside have their own."""


class _Offer(msgspec.Struct, eq=False):
    task: AgentTask
    name: str


class ExternalAgents:
    """Waits for agents from outside; in the place of `AgentHosts`."""

    resume = "replay"

    def __init__(self, key: str = "") -> None:
        """`key`: the secret of those who may ask for tasks; by default that of this process's environment."""
        self._key = key or os.environ.get(KEY, "")
        if len(self._key) < SHORTEST_KEY:
            raise ConfigError(
                f"agent.kind={EXTERNAL} needs a key with which agents ask for tasks: set the environment variable {KEY}"
                f" of the workers to at least {SHORTEST_KEY} characters, such as of `openssl rand -hex 16`."
            )
        self._offers: deque[_Offer] = deque()
        self._ends: dict[str, asyncio.Future[tuple[float | None, dict[str, float]]]] = {}

    def name_of(self, sample: str) -> str:
        """Return the name of a sample's session: the same for all attempts, and unknown without the key."""
        return blake2b(sample.encode(), key=self._key.encode()[:64], digest_size=NAME_BYTES).hexdigest()

    def claim(self, key: str) -> dict[str, Any] | None:
        """See Claims."""
        if not hmac.compare_digest(key.encode(), self._key.encode()):
            raise CallRefusedError(f"this is not the key with which agents ask for tasks here ({KEY})")
        if not self._offers:
            return None
        offer = self._offers.popleft()
        return {"session": offer.name, "task": msgspec.to_builtins(offer.task)}

    def finish(self, name: str, reward: float | None, measures: dict[str, float]) -> None:
        """End the episode of a session. A repeated call does nothing."""
        ended = self._ends.get(name)
        if ended is not None and not ended.done():
            ended.set_result((reward, measures))

    async def play(
        self, task: AgentTask, base_url: str, api_key: str, *, deadline_s: float, on_lost: Callable[[], None]
    ) -> tuple[float | None, dict[str, float], list[str]]:
        """Offer an episode, and return its outcome. Raises UserCodeError where no agent ends it in time."""
        offer = _Offer(task, api_key)
        self._offers.append(offer)
        ended = self._ends[api_key] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(deadline_s):
                reward, measures = await ended
        except TimeoutError:
            raise UserCodeError(f"was not ended by its agent within its deadline of {deadline_s:g} s") from None
        finally:
            del self._ends[api_key]
            if offer in self._offers:
                self._offers.remove(offer)
        return reward, measures, []

    async def close(self) -> None:
        """Do nothing: the agents are not ours to end."""
