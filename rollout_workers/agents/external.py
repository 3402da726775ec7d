"""Agents that no worker starts: they ask a worker's endpoint for a task, play it over their session's URL, and end it.

    POST /sessions            key of the gateway        ─► {session, base_url, task}, or 204 if no task is free now
    POST /s/SESSION/v1/...    calls of the model
    POST /s/SESSION/finish    {reward, measures}

A session's name is made of the key, the sample and the attempt that began the episode, which its turns tell. So it
stays the same where another worker takes the episode over: a client that repeats its call meanwhile goes on there, if
that worker has the same address and key. If no call comes for a while, the task is offered again: whoever claims it
begins anew under another name, with the recorded answers, and the calls of the silent agent are refused from then on.
So are calls of a session that no worker has had for as long as an episode may last, such as one whose only turns were
repeated ones: no record names it.
"""

import asyncio
import hmac
import os
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from hashlib import blake2b
from typing import Any

import msgspec

from headway.broker.errors import CallDeadlineError, ConfigError

from .calls import CallRefusedError
from .episode import AgentTask

EXTERNAL = "external"
"""The kind of agents that come from outside."""
KEY, SHORTEST_KEY = "HEADWAY_GATEWAY_KEY", 16
NAME_BYTES = 18
SILENT_S = 120.0
"""An episode that was taken over is offered again if its agent does not call for so long."""
REMEMBERED = 10_000
"""Ended sessions, and absent ones, that are told from those that may come back."""
ABSENT_S = 3600.0
"""A session is waited for so long, unless its run says otherwise."""


class ExternalOptions(msgspec.Struct, frozen=True, kw_only=True):
    """There are no options: agents from outside have their own."""


class _Offer(msgspec.Struct, eq=False):
    task: AgentTask
    claim: Callable[[], str]
    """Return the name of the session for the agent that claims it."""
    claimed: asyncio.Event
    """Set once an agent plays it."""


class ExternalAgents:
    """Waits for agents from outside; in the place of `AgentHosts`."""

    resume = "replay"

    def __init__(self, key: str = "", absent_s: float = ABSENT_S) -> None:
        """`key`: the secret of those who may ask for tasks; by default that of this process's environment. `absent_s`:
        how long a session is waited for that no worker has."""
        self._key = key or os.environ.get(KEY, "")
        if len(self._key) < SHORTEST_KEY:
            raise ConfigError(
                f"agent.kind={EXTERNAL} needs a key with which agents ask for tasks: set the environment variable {KEY}"
                f" of the workers to at least {SHORTEST_KEY} characters, such as of `openssl rand -hex 16`."
            )
        self._offers: deque[_Offer] = deque()
        self._ended: deque[str] = deque(maxlen=REMEMBERED)
        self._absent_s = absent_s
        self._absent: dict[str, tuple[float, float]] = {}
        """When sessions that are not here were first and last asked for, the latest last."""
        self._ends: dict[str, asyncio.Future[tuple[float | None, dict[str, float]]]] = {}

    def name_of(self, sample: str, attempt: str) -> str:
        """Return the name of an attempt's session, which is unknown without the key."""
        whole = f"{sample} {attempt}".encode()
        return blake2b(whole, key=self._key.encode()[:64], digest_size=NAME_BYTES).hexdigest()

    def may_come_back(self, name: str) -> bool:
        """Return whether a session that is not here may come yet: it has not ended here, nor was it asked for in vain,
        without a pause in which it may have been elsewhere, for too long."""
        if name in self._ended:
            return False
        now = time.monotonic()
        first, last = self._absent.pop(name, (now, now))
        first = now if now - last > SILENT_S else first
        self._absent[name] = first, now
        if len(self._absent) > REMEMBERED:
            del self._absent[next(iter(self._absent))]
        return now - first < self._absent_s

    def claim(self, key: str) -> dict[str, Any] | None:
        """See Claims."""
        if not hmac.compare_digest(key.encode(), self._key.encode()):
            raise CallRefusedError(f"this is not the key with which agents ask for tasks here ({KEY})")
        if not self._offers:
            return None
        offer = self._offers.popleft()
        offer.claimed.set()
        return {"session": offer.claim(), "task": msgspec.to_builtins(offer.task)}

    def finish(self, name: str, reward: float | None, measures: dict[str, float]) -> None:
        """End the episode of a session. A repeated call does nothing."""
        ended = self._ends.get(name)
        if ended is not None and not ended.done():
            ended.set_result((reward, measures))

    async def play(
        self,
        task: AgentTask,
        name: str,
        called: asyncio.Event,
        *,
        take_over: Callable[[], str] | None = None,
        deadline_s: float,
    ) -> tuple[float | None, dict[str, float], list[str]]:
        """Offer an episode, and return its outcome. `called` is set by the first call of its session. `take_over` gives
        an episode that is resumed, whose agent may still live, to another agent, and returns the session's new name.
        Raises CallDeadlineError where an agent that has it does not end it in time."""
        names = [name]
        self._absent.pop(name, None)

        def claim() -> str:
            if take_over is not None:
                self._ended.append(name)  # for the agent that had it
                names.append(take_over())
            return names[-1]

        ended = self._ends[name] = asyncio.get_running_loop().create_future()
        try:
            if take_over is None or not await _set_within(called, SILENT_S):
                await self._claimed(_Offer(task, claim, called))
            async with asyncio.timeout(deadline_s):
                reward, measures = await ended
            self._ended.append(names[-1])  # one that is handed back comes back under its name
        except TimeoutError:
            self._ended.append(names[-1])
            raise CallDeadlineError(f"was not ended by its agent within its deadline of {deadline_s:g} s") from None
        finally:
            del self._ends[name]
        return reward, measures, []

    async def _claimed(self, offer: _Offer) -> None:
        self._offers.append(offer)
        try:
            await offer.claimed.wait()
        finally:
            if offer in self._offers:
                self._offers.remove(offer)

    async def close(self) -> None:
        """Do nothing: the agents are not ours to end."""


async def _set_within(event: asyncio.Event, seconds: float) -> bool:
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
    return event.is_set()
