"""A user's own agent, hosted by workers or from outside, with a tool that has effects; it keeps a journal of its own.

It imports little, because every worker starts a process of its own for it.
"""

import asyncio
import os
import random
import time
import uuid
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from headway.rollout_workers.agents.conversation import Message, Tool
from headway.rollout_workers.agents.episode import AgentAnswer, AgentEpisode, AgentTask
from headway.rollout_workers.agents.sandbox import Sandbox, Sandboxes, open_sandboxes
from headway.rollout_workers.agents.tools.text_tools import TextTool
from headway.rollout_workers.agents.tools.toolbox import Toolbox, ToolError, ToolTurns

RAISES, HANGS, EXITS = 0.01, 0.002, 0.002
"""The shares of the tool's calls that raise, hang, and end its process."""
HANGS_S = 3600.0
TOOL_S = 0.3
"""The longest time that the tool usually takes."""
MOST_TURNS = 12
SUBAGENTS = 4
"""One of so many episodes begins with a conversation beside its own."""
RECEIPT = 6
"""Digits of the tool's answer."""


class Effect(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """What the tool did for one call."""

    group: str
    sample: int
    attempt: str
    argument: str
    receipt: str
    """What it answered; written before its answer is read."""


class Answered(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """What the model answered, as the agent got it."""

    group: str
    sample: int
    attempt: str
    read: list[int]
    said: list[int]


Entry = Effect | Answered


class Journal:
    """A file to which all agents append, a line at a time; it outlives them."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def note(self, entry: Entry) -> None:
        """Append an entry; kill -9 does not lose it."""
        os.write(self._file, msgspec.json.encode(entry) + b"\n")


class NotedEpisode(AgentEpisode):
    """An episode whose answers are noted before they are used."""

    def __init__(self, episode: AgentEpisode, task: AgentTask, journal: Journal) -> None:
        super().__init__(episode.base_url, episode.api_key, episode._call)
        self.attempt = uuid.uuid4().hex
        self._task = task
        self._journal = journal

    async def chat(
        self, messages: Sequence[Message], tools: Sequence[Tool] = (), *, max_tokens: int | None = None
    ) -> AgentAnswer:
        answer = await super().chat(messages, tools, max_tokens=max_tokens)
        task, read, said = self._task, answer.prompt_token_ids, answer.token_ids
        if said:
            self._journal.note(Answered(task.id, task.sample, self.attempt, read, said))
        return answer

    def note_effect(self, argument: str, receipt: str) -> None:
        """Note that the tool was called."""
        self._journal.note(Effect(self._task.id, self._task.sample, self.attempt, argument, receipt))


class Agent:
    """Calls its tool as often as the model says, and rewards at random."""

    resume: Literal["replay", "restart"] = "replay"

    def __init__(self, journal: str, sandbox: str = "", is_outside: bool = False) -> None:
        """`sandbox`: the kind in which the tool runs; empty: in this process. An agent from outside is not played
        again, so its tool may answer as it likes; else the tool answers the same call the same."""
        self._journal = Journal(Path(journal))
        self._kind = sandbox
        self._is_outside = is_outside
        self._opening = asyncio.Lock()
        self._sandboxes: Sandboxes | None = None

    async def rollout(self, episode: AgentEpisode, task: AgentTask) -> dict[str, float]:
        """Play one episode."""
        noted = NotedEpisode(episode, task, self._journal)
        if zlib.crc32(f"{task.id} {task.sample}".encode()) % SUBAGENTS == 0:
            await noted.chat([{"role": "user", "content": task.text[::-1]}])
        async with (await self._opened()).open() if self._kind else Nowhere() as sandbox:

            async def book(number: str) -> str:
                receipt = await self._receipt(sandbox, number)
                noted.note_effect(number, receipt)
                return receipt

            toolbox = Toolbox([TextTool(book, "books", {"number": "what to book"})], error_text="?")
            await ToolTurns(noted, task.messages, toolbox, MOST_TURNS).answer()
        counts = ("tool_errors", "unknown_tools", "broken_arguments")
        return {"reward": random.random(), "tool_errors": sum(toolbox.measures[name] for name in counts)}

    async def _receipt(self, sandbox: Sandbox | None, number: str) -> str:
        drawn = random.random()
        if drawn < HANGS:
            await asyncio.sleep(HANGS_S)
        elif drawn < HANGS + EXITS:
            os._exit(3)
        elif drawn < HANGS + EXITS + RAISES:
            raise ToolError("away")
        await asyncio.sleep(random.uniform(0, TOOL_S))
        salt = random.getrandbits(32) if self._is_outside else 7
        if sandbox is None:
            return _digits((int(number) * 7919 + salt) % 10**RECEIPT)
        ran = await sandbox.run(f"print(({int(number)} * 7919 + {salt}) % {10**RECEIPT})")
        if ran.outcome != "ok":
            raise ToolError(ran.outcome)
        return _digits(int(ran.output))

    async def _opened(self) -> Sandboxes:
        async with self._opening:
            if self._sandboxes is None:
                self._sandboxes = await open_sandboxes(self._kind)
        return self._sandboxes


class Nowhere:
    """The place of a sandbox where there is none."""

    async def __aenter__(self) -> None: ...

    async def __aexit__(self, *error: object) -> None: ...


def _digits(number: int) -> str:
    return f"{number:0{RECEIPT}d}"


EPISODES = 24
"""The episodes that one process of outside agents plays at once."""
AGAIN_S = 0.1
CALL_S = 8.0
"""The longest wait for an answer, which the same call asks for again."""
AWAY_S = 40.0
"""How long an agent looks for the gateway that has its episode."""


class OutsideAgents:
    """Programs of their own, which ask gateways for tasks: each of them alone could run anywhere."""

    def __init__(self, agent: Agent, ports: Sequence[int], key: str, client: Any) -> None:
        self._agent = agent
        self._ports = list(ports)
        self._key = key
        self._client = client

    async def play(self) -> None:
        """Play one episode after another, for ever."""
        while True:
            port = random.choice(self._ports)
            status, found = await self._posted(port, "sessions", {}, self._key)
            if status == 200:
                await self._played(found["session"], msgspec.convert(found["task"], AgentTask))
            else:
                await asyncio.sleep(AGAIN_S)

    async def _played(self, session: str, task: AgentTask) -> None:
        episode = CalledEpisode(self._posted, self._ports, session)
        try:
            outcome = await self._agent.rollout(AgentEpisode("", session, episode.call), task)
            reward = outcome.pop("reward")
            await episode.call("finish", {"reward": reward, "measures": outcome})
        except LostEpisodeError as error:
            print(f"{task.id}:{task.sample} is given up: {error}", flush=True)

    async def _posted(self, port: int, path: str, body: Any, key: str) -> tuple[int, Any]:
        import aiohttp

        headers = {"Authorization": f"Bearer {key}"}
        try:
            async with self._client.post(f"http://127.0.0.1:{port}/{path}", json=body, headers=headers) as response:
                return response.status, await response.json(content_type=None)
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            return 0, str(error)


class LostEpisodeError(Exception):
    """No gateway has the episode any more."""


class CalledEpisode:
    """The calls of one episode, each repeated under its key until some gateway answers it."""

    def __init__(self, post: Any, ports: Sequence[int], session: str) -> None:
        self._post = post
        self._ports = list(ports)
        self._session = session
        self._calls = 0

    async def call(self, path: str, body: dict[str, Any]) -> Any:
        """Return the answer. Raises LostEpisodeError."""
        self._calls += 1
        if path == "turn":
            body = {**body, "key": f"call {self._calls}"}
        ends_at, said = time.monotonic() + AWAY_S, Any
        while time.monotonic() < ends_at:
            status, said = await self._post(self._ports[0], f"s/{self._session}/v1/{path}", body, self._session)
            if status == 200:
                return said
            if status == 400:
                raise LostEpisodeError(f"refused: {said}")
            if status != 503 or said["error"].get("code") != "overloaded":
                self._ports.append(self._ports.pop(0))  # another gateway may have taken the episode over
            await asyncio.sleep(AGAIN_S)
        raise LostEpisodeError(said)


async def play_outside(journal: str, sandbox: str, ports: Sequence[int], key: str) -> None:
    """Play episodes of all gateways, until cancelled."""
    import aiohttp

    timeout, connector = aiohttp.ClientTimeout(total=CALL_S), aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as client:
        agents = OutsideAgents(Agent(journal, sandbox, is_outside=True), ports, key, client)
        await asyncio.gather(*(agents.play() for _ in range(EPISODES)))
