"""Ten thousand clients at once: each is answered, or told when to come again, and nobody else is harmed."""

import asyncio
import gc
import json
import os
import resource
import sys
from collections.abc import Iterator

import pytest

from headway.rollout_workers.agents.endpoint.connections import EndpointSettings

from .scripted import ScriptedSession
from .test_endpoint import Bench, opened, until

CLIENTS = 10_000
SPARE = 1000
"""Descriptors of a process for other things than connections."""


@pytest.fixture(autouse=True)
def descriptors() -> Iterator[None]:
    """Let the process have as many descriptors as it may."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if before[1] < CLIENTS + SPARE:
        pytest.skip(f"a process may have {before[1]} descriptors here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    yield
    gc.collect()
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def waiting(bench: Bench) -> int:
    return sum(bench.session(name).waiting for name in bench.sessions.by_name)


async def heard(bench: Bench, names: list[str]) -> dict[str, int]:
    """Have a crowd call these sessions, of which no call is answered before each client is answered or waits; meanwhile
    another episode gets its answers. Return what the crowd has heard."""
    gate, counts = asyncio.Event(), bench.endpoint.counts
    for name in names:
        bench.sessions.by_name[name] = session = ScriptedSession()
        session.gate = gate
    assert (await bench.post("chat/completions"))[0] == 200
    crowd = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", f"{__package__}.crowd", str(bench.endpoint.port), str(CLIENTS), *names),
        stdout=asyncio.subprocess.PIPE,
    )
    answers = 0

    def refused() -> int:
        return sum(counts.get(kind, 0) for kind in ("busy", "overloaded", "connections_refused"))

    async def ask_beside() -> None:
        nonlocal answers
        while not gate.is_set():
            status, _ = await bench.post("chat/completions")
            answers += status == 200
            assert status in (200, 503)
            await asyncio.sleep(0.05)

    beside = asyncio.create_task(ask_beside())
    await until(lambda: waiting(bench) + refused() >= CLIENTS)
    gate.set()
    await beside
    assert answers > 0
    said, _ = await crowd.communicate()
    assert crowd.returncode == 0
    found: dict[str, int] = json.loads(said)
    return found


@pytest.mark.slow
async def test_the_crowd_of_one_episode_harms_no_other() -> None:
    """It fills its own episode's places alone."""
    before = len(os.listdir("/proc/self/fd"))
    async with opened() as bench:
        found = await heard(bench, ["crowd"])
        assert set(found) <= {"200", "429", "503"}, found
        assert sum(found.values()) == CLIENTS
        assert found["200"] == EndpointSettings().session_calls
        assert (await bench.post("chat/completions"))[0] == 200
        await until(lambda: len(bench.endpoint._server.connections) == 1)
    assert len(os.listdir("/proc/self/fd")) <= before


@pytest.mark.slow
async def test_a_crowd_of_many_episodes_is_answered_or_told_to_come_again() -> None:
    """It fills all places that there are for connections."""
    before = len(os.listdir("/proc/self/fd"))
    async with opened(EndpointSettings(calls=2 * CLIENTS, session_calls=CLIENTS)) as bench:
        found = await heard(bench, [f"crowd-{number}" for number in range(20)])
        assert set(found) == {"200", "503"}, found
        assert sum(found.values()) == CLIENTS
        assert found["503"] == bench.endpoint.counts["connections_refused"] > 0
        assert (await bench.post("chat/completions"))[0] == 200
        await until(lambda: len(bench.endpoint._server.connections) == 1)
    assert len(os.listdir("/proc/self/fd")) <= before
