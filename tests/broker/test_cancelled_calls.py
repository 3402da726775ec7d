"""A call whose caller is cancelled ends in its host, which lives on; only one that does not end costs its process."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from headway.broker.user_code import pool
from headway.broker.user_code.host import Program
from headway.broker.user_code.pool import HostProcess

MINUTES = 600.0


class Programs:
    """Methods for calls that are cancelled."""

    places = 8

    async def block(self, directory: str) -> None:
        """Keep the host's event loop until a file is there."""
        (Path(directory) / "blocks").touch()
        while not (Path(directory) / "go_on").exists():
            time.sleep(0.01)  # noqa: ASYNC251 - it is what is tested

    async def begin(self, directory: str) -> None:
        """Note that it has begun."""
        (Path(directory) / "began").touch()

    async def echo(self, value: Any) -> Any:
        """Return the value."""
        return value


@pytest.fixture
async def host() -> AsyncIterator[HostProcess]:
    program = Program(name="calls", factory=f"{__name__}:Programs", import_path=str(Path.cwd()))
    process = await HostProcess.start(program, 8)
    yield process
    await process.lose("the test has ended")


@pytest.fixture
async def blocked(host: HostProcess, tmp_path: Path) -> "asyncio.Task[Any]":
    """Blocks the host's event loop, until it is told to go on."""
    blocking = asyncio.create_task(host.call("block", [str(tmp_path)], MINUTES))
    async with asyncio.timeout(MINUTES):
        while not (tmp_path / "blocks").exists():  # noqa: ASYNC110 - nobody notifies
            await asyncio.sleep(0.01)
    return blocking


async def answers_and_has_forgotten(host: HostProcess, blocked: "asyncio.Task[Any]", tmp_path: Path) -> bool:
    """Let the host go on; whether it has answered all calls that were cancelled by the time it answers a later one."""
    (tmp_path / "go_on").touch()
    await blocked
    assert await host.call("echo", [1], MINUTES) == 1
    return not host._abandoned and not host.is_lost


async def test_a_call_that_is_cancelled_before_it_begins_is_answered(
    host: HostProcess, blocked: "asyncio.Task[Any]", tmp_path: Path
) -> None:
    calling = asyncio.create_task(host.call("begin", [str(tmp_path)], MINUTES, grace_s=MINUTES))
    await asyncio.sleep(0)
    calling.cancel()
    await asyncio.wait([calling])
    assert len(host._abandoned) == 1
    assert await answers_and_has_forgotten(host, blocked, tmp_path)
    assert not (tmp_path / "began").exists()


async def test_a_call_that_is_cancelled_as_its_answer_comes_is_not_waited_for(host: HostProcess) -> None:
    calling = asyncio.create_task(host.call("echo", [1], MINUTES, grace_s=MINUTES))
    await asyncio.sleep(0)
    (answered,) = host._waiting.values()
    answered.add_done_callback(lambda _: calling.cancel())
    await asyncio.wait([calling])
    assert calling.cancelled()
    assert not host._abandoned


async def test_a_call_whose_caller_is_cancelled_past_its_deadline_is_waited_for(
    host: HostProcess, blocked: "asyncio.Task[Any]", tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_past, cancel = asyncio.Event(), host._cancel

    def note(number: int) -> None:
        cancel(number)
        is_past.set()

    monkeypatch.setattr(host, "_cancel", note)
    calling = asyncio.create_task(host.call("begin", [str(tmp_path)], 0.01, grace_s=MINUTES))
    await is_past.wait()
    calling.cancel()
    await asyncio.wait([calling])
    assert calling.cancelled()
    assert len(host._abandoned) == 1
    assert await answers_and_has_forgotten(host, blocked, tmp_path)


@pytest.mark.parametrize("has_threads", [True, False])
async def test_what_a_lost_process_leaves_is_looked_for_beside_the_event_loop(
    host: HostProcess, has_threads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that ends starts no threads any more, and looks all the same."""
    looked = list[int]()
    monkeypatch.setattr(pool, "kill_marked", lambda *_: looked.append(threading.get_ident()))
    if not has_threads:
        await asyncio.to_thread(int)
        await asyncio.get_running_loop().shutdown_default_executor()
    await host.lose("the test asks for it")
    assert {one != threading.get_ident() for one in looked} == {has_threads}
