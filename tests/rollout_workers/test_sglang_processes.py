"""SGLang's processes end with the worker that started them, and its sockets lie in a short directory of their own."""

import gc
import os
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

from broker.errors import HeadwayError
from rollout_workers.engines import open_engine
from rollout_workers.engines.sglang.processes import own_sockets
from tests.processes import is_alive, tethered

from .marks import needs_sglang
from .models import make_model, save_config
from .sglang_settings import sglang_config

ROOT = Path(__file__).parents[2]
DEADLINE_S = 400.0
"""A deadline for steps that take seconds: a machine may be busy, but nothing waits for ever."""
OPENS = """
import asyncio, sys
from pathlib import Path
from rollout_workers.engines import open_engine
from tests.rollout_workers.sglang_settings import sglang_config


async def main():
    open_engine(sglang_config(max_concurrent=2, max_model_len=64), Path(sys.argv[1]), seed=0)
    print("up", flush=True)
    await asyncio.sleep(600)


if __name__ == "__main__":
    asyncio.run(main())
"""


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
def opener(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Yield a process that opens the engine, and says when it is up."""
    program = tmp_path / "opens.py"
    program.write_text(OPENS)
    directory = save_config(make_model("dense", 0), tmp_path / "model")
    command = tethered(sys.executable, str(program), str(directory))
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)}) as it:
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
def test_its_processes_end_with_a_killed_worker(opener: subprocess.Popen[str], moment: str) -> None:
    worker = psutil.Process(opener.pid)
    if moment == "starting":
        wait_until(lambda: bool(schedulers_of(worker)))
    else:
        assert opener.stdout is not None
        assert opener.stdout.readline() == "up\n"
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
