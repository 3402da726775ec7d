"""SGLang's processes end with the worker that started them, its sockets lie in a short directory of their own, and the
worker's log stays the worker's."""

import asyncio
import gc
import io
import logging
import os
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import psutil
import pytest

from headway.broker.errors import HeadwayError
from headway.rollout_workers.engines import open_engine
from headway.rollout_workers.engines.sglang.open_sglang import prepare_environment
from headway.rollout_workers.engines.sglang.sglang_engine import SglangEngine
from headway.rollout_workers.engines.sglang.sglang_processes import SglangProcesses, own_log, own_sockets
from tests.processes import is_alive, tethered

from .marks import needs_sglang
from .models import make_model, save_config
from .sglang_settings import sglang_config

ROOT = Path(__file__).parents[2]
DEADLINE_S = 400.0
"""A deadline for steps that take seconds: a machine may be busy, but nothing waits for ever."""
OPENS = """
import asyncio, logging, sys
from pathlib import Path
from headway.rollout_workers.engines import open_engine
from tests.rollout_workers.sglang_settings import sglang_config


async def main():
    logging.basicConfig(level=logging.INFO, format="ours: %(message)s")
    open_engine(sglang_config(max_concurrent=2, max_model_len=64), Path(sys.argv[1]), seed=0)
    logging.getLogger("sglang.srt").info("SGLang is told to log errors alone")
    logging.getLogger("headway.rollout_workers").info("the engine is up")
    print("up", flush=True)
    await asyncio.sleep(600)


if __name__ == "__main__":
    asyncio.run(main())
"""


@pytest.mark.parametrize("own", ["", "1"])
def test_nccl_decides_how_it_shares_memory_as_a_learner_has_it(own: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "OMP_NUM_THREADS",
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN",
        "TQDM_DISABLE",
        "SGLANG_USE_CPU_ENGINE",
    ):
        monkeypatch.setenv(name, os.environ.get(name, ""))
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", own)
    if not own:
        monkeypatch.delenv("NCCL_CUMEM_ENABLE")
    prepare_environment(1)
    # SGLang sets 0 where it finds nothing; NCCL reads -2 as it reads nothing.
    assert os.environ["NCCL_CUMEM_ENABLE"] == (own or "-2")


@pytest.mark.parametrize("length", [10, 150])
def test_sockets_lie_in_a_short_directory_of_their_own(
    length: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = tmp_path.parent / ("u" * length)
    usual.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(usual))
    with own_sockets() as sockets, tempfile.NamedTemporaryFile(delete=False) as file, socket.socket(1) as bound:
        bound.bind(f"{file.name}.x")
    directory = Path(sockets.name)
    assert Path(file.name).parent == directory
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert tempfile.gettempdir() == str(usual)
    sockets.cleanup()
    assert not directory.exists()
    usual.rmdir()


def test_a_failed_start_leaves_no_directory() -> None:
    usual = tempfile.gettempdir()
    with pytest.raises(RuntimeError), own_sockets() as sockets:
        raise RuntimeError
    assert not Path(sockets.name).exists()
    assert tempfile.gettempdir() == usual


@pytest.fixture
def told() -> Iterator[io.StringIO]:
    """Yield what this process logs, from INFO on."""
    root, output = logging.getLogger(), io.StringIO()
    handlers = root.handlers[:]
    root.handlers[:] = [logging.StreamHandler(output)]
    root.setLevel(logging.INFO)
    yield output
    root.handlers[:] = handlers
    logging.getLogger("sglang").setLevel(logging.NOTSET)


@pytest.mark.parametrize("fails", [False, True])
def test_a_start_leaves_the_log_to_the_worker(fails: bool, told: io.StringIO) -> None:
    with suppress(RuntimeError), own_log():
        logging.basicConfig(level=logging.ERROR, stream=io.StringIO(), force=True)  # as SGLang does at its start
        if fails:
            raise RuntimeError
    for name in ("rollout_workers", "sglang.srt"):
        for level in (logging.INFO, logging.ERROR):
            logging.getLogger(name).log(level, "%s of %s", logging.getLevelName(level), name)
    assert told.getvalue().splitlines() == [
        "INFO of rollout_workers",
        "ERROR of rollout_workers",
        "ERROR of sglang.srt",
    ]


async def test_the_end_of_sglangs_front_end_names_its_cause() -> None:
    async def fails() -> None:
        raise LookupError("an answer to nobody")

    front = SimpleNamespace(handle_loop=fails)
    sglang = SimpleNamespace(tokenizer_manager=front, shutdown=lambda: None)
    ended: asyncio.Future[HeadwayError] = asyncio.get_running_loop().create_future()
    sockets: Any = SimpleNamespace()
    SglangProcesses(sglang, set(), sockets).when_ended(ended.set_result)
    assert "its front end stopped: LookupError('an answer to nobody')" in str(await ended)


@pytest.mark.parametrize("turns", range(4))
async def test_a_swap_that_is_cancelled_as_the_last_request_ends_is_cancelled(turns: int) -> None:
    processes: Any = SimpleNamespace(front=None, when_ended=lambda ended: None, abort=lambda: None)
    engine = SglangEngine(processes, sglang_config(max_concurrent=1, max_model_len=8), make_model("dense", 0), 1)
    engine._running.add("1.")
    engine._is_idle.clear()
    emptied = asyncio.create_task(engine._emptied())
    for _ in range(3):
        await asyncio.sleep(0)
    engine._running.clear()
    engine._is_idle.set()
    for _ in range(turns):  # of the event loop, after the last request
        await asyncio.sleep(0)
    was_under_way = emptied.cancel()
    await asyncio.wait([emptied])
    assert emptied.cancelled() == was_under_way


@pytest.fixture
def opener(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Yield a process that opens the engine, and says when it is up."""
    program = tmp_path / "opens.py"
    program.write_text(OPENS)
    directory = save_config(make_model("dense", 0), tmp_path / "model")
    command = tethered(sys.executable, str(program), str(directory))
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with (
        (tmp_path / "log").open("w") as log,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment) as it,
    ):
        yield it
        it.kill()


@needs_sglang
async def test_a_start_without_a_kernel_names_the_remedy_and_leaves_no_process(tmp_path: Path) -> None:
    config = sglang_config(max_concurrent=2, max_model_len=64)
    without = msgspec.structs.replace(config, options={**config.options, "attention_backend": "nonesuch"})
    with pytest.raises(HeadwayError, match=r"SGLang did not start: .*engine\.options\.attention_backend=triton"):
        open_engine(without, save_config(make_model("dense", 0), tmp_path), seed=0)
    assert not schedulers_of(psutil.Process())
    gc.collect()  # ZeroMQ would wait for ever for what an open socket has not sent


@needs_sglang
@pytest.mark.parametrize("moment", ["starting", "up"])
def test_its_processes_end_with_a_killed_worker(opener: subprocess.Popen[str], moment: str, tmp_path: Path) -> None:
    worker = psutil.Process(opener.pid)
    if moment == "starting":
        wait_until(lambda: bool(schedulers_of(worker)))
    else:
        assert opener.stdout is not None
        assert opener.stdout.readline() == "up\n"
        log = (tmp_path / "log").read_text()
        assert "ours: the engine is up" in log
        assert "SGLang is told" not in log
    children = worker.children(recursive=True)
    assert schedulers_of(worker)
    opener.kill()
    wait_until(lambda: not any(is_alive(child) for child in children))


def schedulers_of(worker: psutil.Process) -> list[psutil.Process]:
    """Return its children that run SGLang's scheduler, or will once they have imported it."""
    told = [(child, " ".join(child.cmdline())) for child in worker.children() if is_alive(child)]
    return [child for child, words in told if "spawn_main" in words or "sglang::scheduler" in words]


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.02)
