# ruff: noqa: ASYNC220, ASYNC221, ASYNC251 - hostile agents block their event loop
"""Agents that do what no agent should: each method of `Acts` is one, by the text of its prompt."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp

from headway.rollout_workers.agents.episode import AgentCallError, AgentEpisode, AgentTask, EpisodeOverError

ASKED: list[dict[str, Any]] = [{"role": "user", "content": "hello"}]
SLEEP = [sys.executable, "-c", "import time; time.sleep(100000)"]


class OddError(BaseException):
    """Is no Exception."""


class MuteError(Exception):
    """Cannot be told."""

    def __str__(self) -> str:
        raise RuntimeError("no words")


class BrokenNumber:
    """Is no number, in an odd way."""

    def __float__(self) -> float:
        raise RuntimeError("no number")

    def __repr__(self) -> str:
        raise RuntimeError("no words")


def notes() -> Path:
    """Return the directory in which agents note what they saw."""
    return Path(os.environ["AGENT_NOTES"])


async def rollout(episode: AgentEpisode, task: AgentTask) -> Any:
    """Do what the prompt says."""
    name, _, argument = task.text.partition(" ")
    act: Callable[..., Any] = globals()[f"act_{name}"]
    return await (act(episode, argument) if argument else act(episode))


async def act_good(episode: AgentEpisode) -> float:
    """Ask twice."""
    answer = await episode.chat(ASKED)
    await episode.chat([*ASKED, answer.message, {"role": "user", "content": "and now?"}])
    return 1.0


async def act_silent(episode: AgentEpisode) -> float:
    """Never call."""
    return 1.0


async def act_exit(episode: AgentEpisode) -> float:
    """Call sys.exit."""
    await episode.chat(ASKED)
    sys.exit(3)


async def act_interrupt(episode: AgentEpisode) -> float:
    """Raise what Ctrl-C raises."""
    await episode.chat(ASKED)
    raise KeyboardInterrupt


async def act_odd(episode: AgentEpisode) -> float:
    """Raise what is no Exception."""
    await episode.chat(ASKED)
    raise OddError("odd")


async def act_mute(episode: AgentEpisode) -> float:
    """Raise an error whose text raises."""
    await episode.chat(ASKED)
    raise MuteError


async def act_cancelled(episode: AgentEpisode) -> float:
    """Cancel itself."""
    await episode.chat(ASKED)
    raise asyncio.CancelledError


async def act_vast_error(episode: AgentEpisode) -> float:
    """Raise an error of a hundred megabytes."""
    raise ValueError("x" * 100_000_000)


async def act_vast_result(episode: AgentEpisode) -> Any:
    """Return a text of a hundred megabytes."""
    await episode.chat(ASKED)
    return "x" * 100_000_000


async def act_many_results(episode: AgentEpisode) -> Any:
    """Return a hundred thousand measures."""
    await episode.chat(ASKED)
    return {f"measure {number}": 1.0 for number in range(100_000)}


async def act_broken_result(episode: AgentEpisode) -> Any:
    """Return what raises when it is read."""
    await episode.chat(ASKED)
    return BrokenNumber()


async def act_memory(episode: AgentEpisode) -> float:
    """Ask for more memory than there is."""
    await episode.chat(ASKED)
    return float(len(bytearray(1 << 60)))


async def act_recursion(episode: AgentEpisode) -> float:
    """Call itself without end."""
    return await act_recursion(episode)


async def act_end(episode: AgentEpisode) -> float:
    """End its process."""
    await episode.chat(ASKED)
    os._exit(7)


async def act_crash(episode: AgentEpisode) -> float:
    """Have its process killed by a fault."""
    await episode.chat(ASKED)
    os.kill(os.getpid(), signal.SIGSEGV)
    return 1.0


async def act_close(episode: AgentEpisode) -> float:
    """Close all descriptors."""
    await episode.chat(ASKED)
    os.closerange(0, 1000)
    return 1.0


async def act_exit_in_task(episode: AgentEpisode) -> float:
    """Call sys.exit in a task of its own."""
    await episode.chat(ASKED)

    async def leave() -> None:
        sys.exit(4)

    await asyncio.create_task(leave())
    return 1.0


async def act_wait(episode: AgentEpisode) -> float:
    """Wait without end."""
    await episode.chat(ASKED)
    await asyncio.Event().wait()
    return 1.0


async def act_deaf(episode: AgentEpisode) -> float:
    """Wait without end, and take no cancelling."""
    await episode.chat(ASKED)
    (notes() / "deaf").touch()
    while True:
        try:
            await asyncio.sleep(1000)
        except asyncio.CancelledError:
            continue


async def act_spin(episode: AgentEpisode) -> float:
    """Keep a processor busy without end, and the event loop of its process with it."""
    await episode.chat(ASKED)
    (notes() / "spin").touch()
    while True:
        pass


async def act_stop(episode: AgentEpisode) -> float:
    """Stop its process."""
    await episode.chat(ASKED)
    os.kill(os.getpid(), signal.SIGSTOP)
    return 1.0


async def act_print(episode: AgentEpisode) -> float:
    """Print a hundred megabytes."""
    await episode.chat(ASKED)
    for _ in range(1600):
        os.write(1, b"x" * 65536)
    return 1.0


async def act_signals(episode: AgentEpisode) -> float:
    """Ignore all signals."""
    await episode.chat(ASKED)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, 32, 33}:
        signal.signal(number, signal.SIG_IGN)
    return 1.0


async def act_thread(episode: AgentEpisode) -> float:
    """Leave a thread behind that keeps a processor busy for a while, and one that sleeps."""
    await episode.chat(ASKED)
    latest = time.monotonic() + 0.2

    def spin() -> None:
        while time.monotonic() < latest:
            pass

    threading.Thread(target=spin).start()
    threading.Thread(target=time.sleep, args=(100_000,)).start()
    return 1.0


async def act_fork(episode: AgentEpisode) -> float:
    """Fork: the copy goes on as if it were the process."""
    await episode.chat(ASKED)
    child = os.fork()
    if child:
        (notes() / f"fork {child}").touch()
    await episode.chat([{"role": "user", "content": f"I am {os.getpid()}."}])
    return 1.0


async def act_bomb(episode: AgentEpisode) -> float:
    """Fork fifty processes that wait."""
    await episode.chat(ASKED)
    for _ in range(50):
        if os.fork() == 0:
            time.sleep(100_000)
    return 1.0


async def act_children(episode: AgentEpisode) -> float:
    """Leave processes behind: one of its group, one of its own session, and one that a dead parent has left."""
    await episode.chat(ASKED)
    subprocess.Popen(SLEEP)
    subprocess.Popen(SLEEP, start_new_session=True)
    leave = f"import subprocess, sys; subprocess.Popen({SLEEP!r}, start_new_session=True)"
    subprocess.run([sys.executable, "-c", leave], check=True)
    return 1.0


async def act_late(episode: AgentEpisode) -> float:
    """Go on calling after the end."""
    await episode.chat(ASKED)

    async def call() -> None:
        await asyncio.sleep(0)
        try:
            while True:
                await episode.chat(ASKED)
        except EpisodeOverError as error:
            (notes() / "late").write_text(str(error))

    globals()["kept"] = asyncio.create_task(call())
    return 1.0


async def act_nonsense(episode: AgentEpisode) -> Any:
    """Ask what cannot be asked, each of which is refused, and then well."""
    taken: list[str] = []
    deep: Any = []
    for _ in range(400):
        deep = [deep]
    wrong: list[dict[str, Any]] = [
        {"messages": "hello"},
        {"messages": []},
        {"messages": [1]},
        {"messages": [{"role": "boss", "content": "x"}]},
        {"messages": [{"role": "user", "content": 7}]},
        {"messages": [{"role": "user", "content": deep}]},
        {"messages": [{"role": "user", "content": float("nan")}]},
        {"messages": [{"role": "user", "content": "\ud800"}]},
        {"messages": [{"role": "user", "content": "x" * 20_000_000}]},
        {"messages": ASKED, "tools": [deep]},
        {"messages": ASKED, "tools": [{"type": "function", "function": {"name": "x", "parameters": deep}}]},
        {"messages": ASKED, "max_tokens": -1},
        {"messages": ASKED, "temperature": 7.0},
        {"messages": ASKED, "role": "boss"},
        {"messages": ASKED, "odd": 1},
        {"prompt_token_ids": [-1]},
        {"prompt_token_ids": [2**40]},
        {"prompt_token_ids": ["x"]},
        {"prompt_token_ids": []},
        {},
    ]
    tries = [("turn", asked) for asked in wrong]
    tries += [("reward", {"reward": reward}) for reward in (float("nan"), float("inf"), "much")]
    for path, asked in [*tries, ("finish", {"reward": 1.0})]:
        try:
            await episode._call(path, asked)
            taken.append(str(asked)[:200])
        except AgentCallError:
            continue
    await episode.chat(ASKED)
    if taken:
        raise ValueError(f"these were taken: {taken}")
    return {"reward": 1.0}


async def act_keys(episode: AgentEpisode, other: str) -> dict[str, float]:
    """Call with the keys of other episodes: one that is guessed, one that has ended, and one beside its own."""
    await episode.chat(ASKED)
    root, ended = episode.base_url.partition("/s/")[0], (notes() / "ended").read_text()
    statuses: dict[str, float] = {}
    async with aiohttp.ClientSession() as client:
        for name, path, key in (
            ("guessed", "/s/guessed/v1", ""),
            ("ended", f"/s/{ended}/v1", ""),
            ("both", f"/s/{episode.api_key}/v1", other),
            ("none", "/v1", ""),
            ("odd", "/v1", "\x80\xff"),
            ("above", "/s/../s/%2e%2e/v1", ""),
        ):
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            async with client.post(f"{root}{path}/chat/completions", json={"messages": ASKED}, headers=headers) as told:
                statuses[name] = float(told.status)
    return {"reward": 1.0, **statuses}


async def act_key(episode: AgentEpisode) -> float:
    """Note the own key."""
    await episode.chat(ASKED)
    (notes() / "ended").write_text(episode.api_key)
    return 1.0


async def act_oom(episode: AgentEpisode) -> dict[str, float]:
    """Say how willingly the kernel ends this process where memory is short."""
    await episode.chat(ASKED)
    return {"reward": 1.0, "score": float(Path("/proc/self/oom_score_adj").read_text())}  # noqa: ASYNC240
