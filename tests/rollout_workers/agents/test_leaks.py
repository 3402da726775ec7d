"""Thousands of episodes leave a worker, its endpoint and its hosts as they were."""

import asyncio
import gc
import logging
import os
import tempfile
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import psutil
import pytest

from headway.broker.errors import HeadwayError
from headway.broker.user_code.pool import Host
from headway.rollout_workers.agents.hosted import AgentHosts

from .leaking_agents import KINDS
from .stage import MARK, MINUTES, Held, Stage, held, living, staged, until

AT_ONCE = 24
MOST_BYTES_PER_EPISODE = 1024
"""Growth of memory that is no leak of an episode's own things: its tokens alone are more in an hour of them."""
SLACK_BYTES = 24 << 20
"""Growth that is none either, however many episodes there are: of allocators, and of pools that fill."""
LOOK_S, CALM_LOOKS = 0.3, 6
"""What ends by itself has ended once so many looks in a row, so far apart, find no less than the look before."""


class Measured:
    """What a worker and its hosts hold."""

    def __init__(self) -> None:
        gc.collect()
        self.held: Held = held()
        hosts = [psutil.Process(pid) for pid in living()]
        self.bytes = psutil.Process().memory_info().rss
        self.bytes_of_host = max(one.memory_info().rss for one in hosts)
        self.descriptors_of_host = max(one.num_fds() for one in hosts)
        self.threads_of_host = max(one.num_threads() for one in hosts)

    def grown(self, before: "Measured", episodes: int) -> list[str]:
        """Return what is more than before, by more than what comes and goes."""
        most = SLACK_BYTES + MOST_BYTES_PER_EPISODE * episodes
        slack = {"descriptors": 2 * AT_ONCE, "tasks": 2 * AT_ONCE, "threads": 1, "processes": 1, "files": 0}
        slack |= {"bytes": most, "bytes_of_host": most, "descriptors_of_host": 2 * AT_ONCE, "threads_of_host": AT_ONCE}
        now, then = self.figures(), before.figures()
        return [f"{name}: {then[name]} -> {now[name]}" for name in now if now[name] > then[name] + slack[name]]

    def figures(self) -> dict[str, int]:
        """Return all that was measured."""
        return {**self.held._asdict(), **{name: value for name, value in vars(self).items() if name != "held"}}


@pytest.fixture(params=[""])
async def stage(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Stage]:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv(MARK, uuid.uuid4().hex)
    monkeypatch.setenv("AGENT_LEAK", request.param)
    monkeypatch.setattr(logging.root.manager, "disable", logging.CRITICAL)  # pytest keeps records with their errors
    async with staged("tests.rollout_workers.agents.leaking_agents:rollout", on_failure="zero") as opened:
        yield opened


async def play(stage: Stage, numbers: range) -> Counter[str]:
    """Play episodes, some of them side by side, and count them by what became of them."""
    outcomes, left = Counter[str](), iter(numbers)

    async def play_on() -> None:
        for number in left:
            outcomes[await outcome(stage, number)] += 1

    await asyncio.gather(*(play_on() for _ in range(AT_ONCE)))
    return outcomes


async def outcome(stage: Stage, number: int) -> str:
    """Play an episode, or give it up where its agent waits without end. Return what became of it."""
    playing = asyncio.create_task(stage.play(str(number)))
    if number % KINDS == 6:
        await asyncio.wait([playing], timeout=0.05)
        playing.cancel()
    try:
        scored = await playing
    except asyncio.CancelledError:
        return "given up"
    except HeadwayError:
        return "no turn"
    return next((name for name in scored.components if name.startswith("agent/failed/")), "played")


async def settled(stage: Stage) -> Measured:
    """Return what is held once all that ends by itself has ended: calls that were given up, lost hosts, tasks, and
    connections of agents that have left."""
    await until(lambda: not (stage.player._sessions.open or any(host.calls or ending(host) for host in hosts(stage))))
    before, calm = 1 << 30, 0
    async with asyncio.timeout(MINUTES):
        while calm < CALM_LOOKS:
            await asyncio.sleep(LOOK_S)
            now = sum(held()) + sum(map(descriptors, living()))
            before, calm = now, calm + 1 if now >= before else 0
    return Measured()


def descriptors(pid: int) -> int:
    """Return how many a process has; 0 if it has ended meanwhile."""
    try:
        return psutil.Process(pid).num_fds()
    except psutil.Error:
        return 0


def hosts(stage: Stage) -> list[Host]:
    """Return those of the agents."""
    assert isinstance(stage.player._agents, AgentHosts)
    pool = stage.player._agents._pool
    return [*pool._shared, pool._alone]


def ending(host: Host) -> bool:
    """Whether a call that was given up still runs in it."""
    return host._process is not None and not host._process.is_lost and bool(host._process._abandoned)


async def compare(stage: Stage, few: int, many: int) -> list[str]:
    """Play episodes; return what grew between `few` and `many`."""
    outcomes = await play(stage, range(few))
    first = await settled(stage)
    outcomes += await play(stage, range(few, many))
    last = await settled(stage)
    print(first.figures(), last.figures(), dict(outcomes), sep="\n")
    assert outcomes["played"] > many // 3
    assert min(outcomes[one] for one in ("given up", "no turn", "agent/failed/raised")) > many // KINDS // 2
    assert outcomes["agent/failed/lost"] > 0 or many < 50
    return last.grown(first, many - few)


async def test_hundreds_of_episodes_leave_nothing(stage: Stage) -> None:
    assert await compare(stage, 100, 300) == []


@pytest.mark.slow
async def test_ten_thousand_episodes_leave_nothing(stage: Stage) -> None:
    assert await compare(stage, 2000, 10_000) == []


PLANTED: dict[str, Callable[[], object]] = {
    "descriptors": lambda: os.open(os.devnull, os.O_RDONLY),
    "tasks": lambda: asyncio.create_task(asyncio.Event().wait()),
    "bytes": lambda: bytearray(os.urandom(1 << 20)),
    "files": tempfile.mkstemp,
}


@pytest.mark.slow
@pytest.mark.parametrize("leak", PLANTED)
async def test_a_leak_of_the_worker_is_found(stage: Stage, leak: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[object] = []
    play_one = stage.play

    async def play_and_leak(text: str) -> object:
        kept.append(PLANTED[leak]())
        return await play_one(text)

    monkeypatch.setattr(stage, "play", play_and_leak)
    try:
        assert leak in " ".join(await compare(stage, 60, 160))
    finally:
        for one in kept:
            if isinstance(one, int):
                os.close(one)
            elif isinstance(one, tuple):
                os.close(one[0])
            elif isinstance(one, asyncio.Task):
                one.cancel()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "figure"),
    [
        ("memory", "bytes_of_host"),
        ("descriptors", "descriptors_of_host"),
        ("threads", "threads_of_host"),
        ("processes", "processes"),
    ],
    indirect=["stage"],
)
async def test_a_leak_of_a_host_is_found(stage: Stage, figure: str) -> None:
    assert figure in " ".join(await compare(stage, 60, 160))
