"""vLLM's process is forked from one that imports vLLM beside the worker, and spawned where that cannot be."""

import os
import subprocess
import sys
import time
from multiprocessing import forkserver
from pathlib import Path

import msgspec
import psutil
import pytest

from headway.rollout_workers.config import EngineConfig
from headway.rollout_workers.engines import libraries_of, open_engine, preload
from headway.rollout_workers.engines.vllm.fork_server import METHOD
from tests.processes import is_alive

from .marks import VLLM
from .models import make_model, save_config

ROOT = Path(__file__).parents[2]
DEADLINE_S = 240.0
"""A deadline for steps that take seconds: a machine may be busy, but nothing waits for ever."""
FORKS = """
import json, os, sys, time
from headway.rollout_workers.engines import preload
from headway.rollout_workers.engines.vllm import fork_server


def tell():
    here = "vllm.v1.engine.core" in sys.modules, os.environ["LATER"], os.environ[fork_server.METHOD]
    print(json.dumps([os.getpid(), os.getppid(), *here]), flush=True)
    time.sleep(600)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        fork_server.PRELOADED = sys.argv[1]
    preload("vllm", 1)
    os.environ["LATER"] = "told"
    process = fork_server.Forking().Process(target=tell)
    process.start()
    process.join()
"""


def program(directory: Path, *arguments: str) -> "subprocess.Popen[bytes]":
    """Start the program above."""
    path = directory / "forks.py"
    path.write_text(FORKS)
    environment = {name: value for name, value in os.environ.items() if name != METHOD}
    environment["PYTHONPATH"] = os.pathsep.join([str(directory), str(ROOT)])
    return subprocess.Popen([sys.executable, str(path), *arguments], stdout=subprocess.PIPE, env=environment)


def told(running: "subprocess.Popen[bytes]") -> tuple[int, int, bool, str, str]:
    assert running.stdout is not None
    return msgspec.json.decode(running.stdout.readline(), type=tuple[int, int, bool, str, str])


def all_end(*pids: int) -> bool:
    """Wait until the processes have ended, also those that are not waited for."""
    deadline = time.monotonic() + DEADLINE_S
    while any(psutil.pid_exists(pid) and is_alive(psutil.Process(pid)) for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


@pytest.mark.vllm
@pytest.mark.slow
def test_it_has_vllm_and_the_environment_of_now_and_ends_with_the_worker(tmp_path: Path) -> None:
    with program(tmp_path) as running:
        process, server, has_vllm, later, method = told(running)
        assert has_vllm
        assert (later, method) == ("told", "spawn")
        assert psutil.Process(server).ppid() == running.pid
        running.kill()
    assert all_end(process, server)


def test_it_is_spawned_where_the_server_has_ended(tmp_path: Path) -> None:
    (tmp_path / "ends.py").write_text("import os\nos._exit(1)")
    with program(tmp_path, "ends") as running:
        process, parent, has_vllm, later, _ = told(running)
        assert (parent, has_vllm, later) == (running.pid, False, "told")
        running.kill()
    assert all_end(process)


@pytest.mark.parametrize(("kind", "chosen"), [("vllm", "spawn"), ("embedded", ""), ("my.module:Engine", "")])
def test_there_is_no_server_for_nothing(kind: str, chosen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(METHOD, chosen) if chosen else monkeypatch.delenv(METHOD, raising=False)
    monkeypatch.setattr(forkserver, "ensure_running", lambda: pytest.fail("a server was started"))
    preload(kind, 1)
    assert bool(libraries_of(kind)) == (kind == "vllm")


def test_processes_are_spawned_where_the_servers_socket_has_too_long_a_path(tmp_path: Path) -> None:
    long = tmp_path / ("d" * 90)
    long.mkdir()
    told = (
        "import os; from headway.rollout_workers.engines import preload; preload('vllm', 1); print(os.environ['"
        + METHOD
        + "'])"
    )
    environment = {name: value for name, value in os.environ.items() if name != METHOD} | {"TMPDIR": str(long)}
    done = subprocess.run([sys.executable, "-c", told], env=environment, stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout.strip() == "spawn"


class TestEngine:
    pytestmark = VLLM

    async def test_is_forked_and_looks_at_the_models_class_itself(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from vllm.model_executor.models import registry

        monkeypatch.delenv(METHOD, raising=False)
        monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "nothing is kept here"))
        monkeypatch.setattr(registry, "_SUBPROCESS_COMMAND", ["false"])
        registry._try_inspect_model_cls.cache_clear()
        directory = save_config(make_model("dense", 0), tmp_path)
        engine = open_engine(EngineConfig(kind="vllm", max_concurrent=2, max_model_len=64), directory, seed=0)
        (process,) = engine._processes  # type: ignore[attr-defined]
        parent = psutil.Process(process.pid).parent()
        await engine.close()
        assert parent is not None
        assert parent in psutil.Process().children()
        assert all_end(process.pid)
