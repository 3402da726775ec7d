"""`openenv`: an environment on a server that speaks OpenEnv's protocol (0.10), over a WebSocket for each episode.

Messages are JSON: {type: reset | step, data}, answered by {type: observation, data: {observation, reward, done}} or by
{type: error, data: {message, code}}.
"""

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import aiohttp
import msgspec

from headway.broker.errors import CallDeadlineError, ConfigError, HeadwayError
from headway.broker.user_code.import_paths import ImportRoots
from headway.rollout_workers.agents.conversation import Message, begin
from headway.rollout_workers.agents.episode import Agent, AgentAnswer, AgentEpisode, AgentTask, Outcome, Resume
from headway.rollout_workers.agents.tools.threads import uncancelled
from headway.rollout_workers.agents.tools.toolbox import Count, Seconds

from .base import ShapeError, finite, outcome, truth
from .turns import TurnReply, observed, play

HEARTBEAT_S = 20.0
"""The pause between two questions whether the server is there."""
FIRST_PAUSE_S, MOST_PAUSE_S = 0.1, 5.0
"""The pauses between attempts at a server that has no room for another episode."""


class OpenEnvOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The server, and how text becomes actions and observations text."""

    base_url: str
    """Its address: http(s)://HOST:PORT or ws(s)://HOST:PORT."""
    action_field: str = "message"
    """The field of an action that gets the text of an answer."""
    action: dict[str, Any] = {}
    """Further fields of each action."""
    observation_field: str = ""
    """The field of an observation that the model reads; "": all of it, as JSON."""
    system_prompt: str = ""
    """What the model reads first."""
    max_turns: Count = 50
    """The most answers of the model."""
    step_s: Seconds = 60.0
    """An answer of the server that takes longer ends its episode."""
    room_s: Seconds = 600.0
    """A server without room for another episode is asked so long."""
    max_observation_chars: Count = 20_000
    """The rest of a longer observation is cut off."""
    headers: dict[str, str] = {}
    """Headers of the request that opens the connection."""
    resume: Resume = "restart"
    """replay: where the same seed and the same actions lead to the same observations, and to nothing else."""


class EnvironmentServerError(HeadwayError):
    """The environment's server cannot be reached, or says that it failed."""


class OpenEnvAgent(Agent):
    """Opens a connection, and with it an environment, for each episode. Rewards are those of single turns."""

    def __init__(self, options: OpenEnvOptions, roots: ImportRoots, where: str) -> None:
        scheme, _, rest = options.base_url.rstrip("/").partition("://")
        if scheme not in ("http", "https", "ws", "wss") or not rest:
            raise ConfigError(f"{where}.base_url: {options.base_url!r} is no address such as http://127.0.0.1:8000.")
        self._url = f"{scheme.replace('http', 'ws')}://{rest}/ws"
        self._options = options
        self.resume = options.resume

    async def rollout(self, episode: AgentEpisode, task: AgentTask) -> Outcome:
        """Play one episode."""
        options = self._options
        async with _Connection(self._url, options) as server:
            first = await server.reset({"seed": task.seed, **task.extra_info})
            seen = self._observed(first["observation"])
            messages = begin(seen or task.messages, options.system_prompt)

            async def reply(answer: AgentAnswer) -> TurnReply:
                step = await server.ask("step", {**options.action, options.action_field: answer.content})
                reward = None if step.get("reward") is None else finite(step["reward"], f"{self._url}: reward")
                return TurnReply(
                    self._observed(step["observation"]), reward, truth(step.get("done"), f"{self._url}: done")
                )

            turns = await play(episode, messages, reply, options.max_turns, self._url)
        return outcome(0.0, {"steps": float(turns)}) if turns else None

    async def check_servers(self) -> None:
        """See Agent. It only connects: a server without room has room later. Raises EnvironmentServerError."""
        async with _Connection(self._url, self._options) as server:
            await server.connect()

    def _observed(self, observation: Any) -> list[Message]:
        name = self._options.observation_field
        if name:
            if not isinstance(observation, Mapping) or name not in observation:
                raise ShapeError(f"{self._url}: an observation has no field {name!r}: {observation!r:.200}.")
            observation = observation[name]
        return observed(observation, self._options.max_observation_chars, f"{self._url}: its observation")


class _Connection:
    """A session at the server."""

    def __init__(self, url: str, options: OpenEnvOptions) -> None:
        self._url = url
        self._options = options
        self._client: aiohttp.ClientSession | None = None
        self._socket: aiohttp.ClientWebSocketResponse | None = None

    async def __aenter__(self) -> "_Connection":
        self._client = aiohttp.ClientSession(headers=self._options.headers)
        return self

    async def __aexit__(self, *raised: object) -> None:
        await uncancelled(self._close())

    async def _close(self) -> None:
        if self._socket is not None:
            await self._socket.close()
        if self._client is not None:
            await self._client.close()

    async def reset(self, data: dict[str, Any]) -> dict[str, Any]:
        """Connect, and begin an episode; wait for room at the server."""
        pause_s, loop = FIRST_PAUSE_S, asyncio.get_running_loop()
        until_s = loop.time() + self._options.room_s
        while True:
            await self.connect()
            try:
                return await self.ask("reset", data)
            except _FullError as error:
                if loop.time() > until_s:
                    raise EnvironmentServerError(f"{self._url} has no room for another episode: {error}.") from None
            assert self._socket is not None
            await self._socket.close()
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MOST_PAUSE_S)

    async def connect(self) -> None:
        """Open a connection. Raises EnvironmentServerError."""
        assert self._client is not None
        try:
            async with asyncio.timeout(self._options.step_s):
                self._socket = await self._client.ws_connect(self._url, max_msg_size=0, heartbeat=HEARTBEAT_S)
        except (OSError, TimeoutError, aiohttp.ClientError) as error:
            raise EnvironmentServerError(f"{self._url} cannot be reached: {type(error).__name__}: {error}.") from error

    async def ask(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        """Return the data of the server's answer. Raises EnvironmentServerError, CallDeadlineError, ShapeError."""
        assert self._socket is not None
        try:
            async with asyncio.timeout(self._options.step_s):
                with suppress(ConnectionError, aiohttp.ClientError):  # a server without room says so before it closes
                    await self._socket.send_str(msgspec.json.encode({"type": kind, "data": data}).decode())
                message = await self._socket.receive()
        except TimeoutError:
            raise CallDeadlineError(f"{self._url}: {kind} took more than {self._options.step_s:g} s.") from None
        if message.type not in (aiohttp.WSMsgType.TEXT, aiohttp.WSMsgType.BINARY):
            raise EnvironmentServerError(
                f"{self._url} closed the connection at {kind}: {message.data} {message.extra}."
            )
        try:
            answer = msgspec.json.decode(message.data)
        except msgspec.DecodeError as error:
            raise ShapeError(f"{self._url} answered {kind} with what is no JSON: {error}.") from error
        return self._data(kind, answer)

    def _data(self, kind: str, answer: Any) -> dict[str, Any]:
        match answer:
            case {"type": "observation", "data": {"observation": _} as data}:
                return dict(data)
            case {"type": "error", "data": {"code": "CAPACITY_REACHED", "message": message}}:
                raise _FullError(message)
            case {"type": "error", "data": data}:
                said = data.get("message", data) if isinstance(data, dict) else data
                raise EnvironmentServerError(f"{self._url} failed at {kind}: {said!r:.1000}.")
        raise ShapeError(
            f"{self._url} answered {kind} with {answer!r:.200}; OpenEnv's servers answer with"
            " {type: observation, data: {observation, reward, done}}."
        )


class _FullError(Exception):
    """The server has no room for another session."""
