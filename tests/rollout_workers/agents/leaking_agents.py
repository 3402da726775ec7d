"""An agent for the search for leaks: the number of its episode says what it does in it, and how it ends."""

import asyncio
import os
import subprocess
import sys
import threading
from typing import Any

import aiohttp

from headway.rollout_workers.agents.conversation import ToolCall
from headway.rollout_workers.agents.episode import AgentCallError, AgentEpisode, AgentTask, EpisodeOverError
from headway.rollout_workers.agents.tools.threads import EpisodeThread
from headway.rollout_workers.agents.tools.toolbox import Toolbox, ToolLimits
from headway.rollout_workers.agents.tools.typed_functions import FunctionTool, TypedFunction

ASKED: list[dict[str, Any]] = [{"role": "user", "content": "hello"}]
KINDS = 10
PROGRAM_EVERY, END_EVERY, LAST_END = 200, 500, 5000
"""An episode of so many starts a program, and one of so many, up to a last one, ends its process."""
KEPT: list[Any] = []
"""What a leak that was planted keeps."""


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def fail(a: int) -> int:
    """Raise an error."""
    raise ValueError(a)


TOOLS = [TypedFunction(one, "tools") for one in (add, fail)]


async def rollout(episode: AgentEpisode, task: AgentTask) -> Any:
    """Play the episode of this number."""
    number = int(task.text)
    if number % END_EVERY == 50 and number < LAST_END:
        await episode.chat(ASKED)
        os._exit(1)
    plant(os.environ.get("AGENT_LEAK", ""))
    if number % PROGRAM_EVERY == PROGRAM_EVERY - 1:
        child = await asyncio.create_subprocess_exec(sys.executable, "-ISc", "", stdout=subprocess.PIPE)
        await child.wait()
    return await ACTS[number % KINDS](episode)


def plant(leak: str) -> None:
    """Keep something, where a test asks for it."""
    match leak:
        case "memory":
            KEPT.append(bytearray(os.urandom(1 << 19)))
        case "descriptors":
            os.open(os.devnull, os.O_RDONLY)
        case "threads":
            threading.Thread(target=threading.Event().wait, daemon=True).start()
        case "processes":
            subprocess.Popen([sys.executable, "-ISc", "import time; time.sleep(100000)"])


async def talk(episode: AgentEpisode) -> float:
    """Take three turns."""
    messages = list(ASKED)
    for _ in range(3):
        answer = await episode.chat(messages)
        messages += [answer.message, {"role": "user", "content": "more"}]
    await episode.reward(0.25)
    return 1.0


async def use_tools(episode: AgentEpisode) -> dict[str, Any]:
    """Have tools called, well, wrongly, and by names that do not exist."""
    thread = EpisodeThread()
    toolbox = Toolbox([FunctionTool(one, thread) for one in TOOLS], ToolLimits())
    try:
        answer = await episode.chat(ASKED, tools=toolbox.schemas)
        asked = (("add", '{"a": 1, "b": 2}'), ("add", "{"), ("fail", '{"a": 1}'), ("none", "{}"))
        calls = [ToolCall(id=f"{i}", name=name, arguments=arguments) for i, (name, arguments) in enumerate(asked)]
        said = [*ASKED, answer.message, *await toolbox.answers(calls)]
        await episode.chat(said, tools=toolbox.schemas)
    finally:
        await thread.close()
    return {"reward": 1.0, **toolbox.measures}


async def branch(episode: AgentEpisode) -> float:
    """Ask four times at once."""
    await asyncio.gather(*(episode.chat(ASKED) for _ in range(4)))
    return 1.0


async def raise_error(episode: AgentEpisode) -> float:
    """Raise after a turn."""
    await episode.chat(ASKED)
    raise KeyError("lost")


async def stay_silent(episode: AgentEpisode) -> float:
    """Never ask."""
    return 1.0


async def leave(episode: AgentEpisode) -> float:
    """Leave in the middle of an answer, and ask again."""
    url = f"{episode.base_url}/chat/completions"
    async with aiohttp.ClientSession() as client:
        asking = asyncio.create_task(client.post(url, json={"messages": ASKED, "stream": True}))
        await asyncio.sleep(0.001)
        asking.cancel()
        await asyncio.wait([asking])
        async with client.post(url, json={"messages": ASKED, "stream": True}) as response:
            await response.read()
    return 1.0


async def give_up(episode: AgentEpisode) -> float:
    """Wait without end for what never comes: the worker gives the episode up."""
    await episode.chat(ASKED)
    await asyncio.Event().wait()
    return 1.0


async def ask_nonsense(episode: AgentEpisode) -> float:
    """Ask what is refused, and then well."""
    for wrong in ({"messages": 7}, {"odd": 1}, {"messages": [{"role": "boss"}]}):
        try:
            await episode._call("turn", wrong)
        except AgentCallError:
            continue
    await episode.chat(ASKED)
    return 1.0


async def call_late(episode: AgentEpisode) -> float:
    """Call after the end."""
    await episode.chat(ASKED)

    async def call() -> None:
        try:
            while True:
                await episode.chat(ASKED)
        except EpisodeOverError:
            LATE.discard(task)

    task = asyncio.create_task(call())
    LATE.add(task)
    return 1.0


LATE: set[asyncio.Task[None]] = set()


async def return_nonsense(episode: AgentEpisode) -> Any:
    """Return no outcome."""
    await episode.chat(ASKED)
    return "much"


ACTS = (
    talk, use_tools, branch, raise_error, stay_silent, leave, give_up, ask_nonsense, call_late, return_nonsense,
)  # fmt: skip
