"""A supervisor removes files, sockets and shared memory of a process that was killed, and none of another one."""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import msgspec
import psutil
import pytest
import torch
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from headway.broker.installation import SHARED_TMPDIR, shared_temporary_directory
from headway.deploy.launch.base import Command
from headway.deploy.launch.local_launcher import IN_RAM, LONGEST_DIRECTORY, LOOK_S, PATIENCE_S, Child, TemporaryFiles
from headway.deploy.launch.process_pool import Pool
from headway.deploy.launch.supervisor import Supervisor
from tests.broker.topologies import wait_until
from tests.processes import is_alive, shared_memory_of
from tests.rollout_workers.models import make_model, save_config

ROOT = Path(__file__).parents[2]
DEADLINE_S = 300.0
LEAVES = """
import json, os, signal, sys, tempfile, uuid
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

if os.path.exists("made"):
    sys.exit(0)
met = Path(tempfile.gettempdir(), f"vllm_dist_{uuid.uuid4().hex}")
met.touch()
named = Path("/dev/shm", f"{met.name}-tp:0-[0-1]-cpushm_0")
named.touch()
tracked = SharedMemory(create=True, size=4096)
below = tempfile.mkdtemp()
Path("made.part").write_text(json.dumps([str(met), str(named), f"/dev/shm/{tracked.name}", below]))
os.rename("made.part", "made")
if os.fork() == 0:  # it keeps what its parent has open, and would never end by itself
    signal.pause()
os.kill(os.getpid(), signal.SIGKILL)
"""
LEAVES_ANOTHER = """
import os, signal
from pathlib import Path

if (other := os.fork()) == 0:
    signal.pause()
Path("other.part").write_text(str(other))
os.rename("other.part", "other")
signal.pause()
"""
TRACKED_BY_OTHERS = """
import os, signal
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

tracked = SharedMemory(create=True, size=4096)
if os.fork() == 0:  # it keeps the tracker, and no kill of its parent's group reaches it
    os.setsid()
    Path("keeper.part").write_text(f"{os.getpid()} {tracked.name}")
    os.rename("keeper.part", "keeper")
signal.pause()
"""
OPENS = """
import asyncio, sys
from pathlib import Path
from headway.rollout_workers.config import EngineConfig
from headway.rollout_workers.engines import open_engine, preload


async def main():
    config = EngineConfig(kind="vllm", max_concurrent=4, max_model_len=64, options={"tensor_parallel_size": 2})
    open_engine(config, Path(sys.argv[1]), seed=0)
    Path("up").touch()
    await asyncio.sleep(600)


if __name__ == "__main__":
    preload("vllm", 1)
    asyncio.run(main())
"""


class Clock:
    """Stands in for the module `time`: a wait takes no time, and moves the clock on."""

    def __init__(self) -> None:
        self.waits = 0
        self.on_wait: Callable[[], object] = lambda: None
        self._now_s = 0.0

    def monotonic(self) -> float:
        return self._now_s

    def sleep(self, seconds: float) -> None:
        self.waits += 1
        self._now_s += seconds
        self.on_wait()


def of_pool(directory: Path, script: str, *arguments: str) -> Command:
    """Return the command of a process that belongs to a pool."""
    argv = (sys.executable, "-c", script, *arguments)
    return Command(name="w", argv=argv, log=directory / "logs" / "w.log", cwd=directory, pool="main")


@pytest.fixture
def of_another() -> Iterator[Path]:
    """Yield shared memory of a process that runs on."""
    path = IN_RAM / f"vllm_dist_{uuid4().hex}-tp:0-[0-1]-cpushm_0"
    path.touch()
    yield path
    path.unlink()


@pytest.fixture
def own(tmp_path: Path) -> Iterator[TemporaryFiles]:
    """Yield the directory of a process that has ended."""
    files = TemporaryFiles(tmp_path)
    yield files
    files.remove()


@pytest.fixture
def in_ram() -> Iterator[Callable[[str], Path]]:
    """Yield a function that makes shared memory of a name, which is gone after the test."""
    made: list[Path] = []

    def make(name: str) -> Path:
        made.append(IN_RAM / name)
        made[-1].touch()
        return made[-1]

    yield make
    for path in made:
        path.unlink(missing_ok=True)


def met_in(own: TemporaryFiles, name: str) -> str:
    """Make a file in the directory, as processes do that meet by it, and return its name."""
    Path(own.variables()["TMPDIR"], name).touch()
    return name


def test_a_supervisor_removes_what_its_killed_process_left(tmp_path: Path, of_another: Path) -> None:
    assert Supervisor([Pool.of([of_pool(tmp_path, LEAVES)])], backoff_s=0).run() == 0
    made = [Path(path) for path in msgspec.json.decode((tmp_path / "made").read_bytes())]
    assert len(made) == 4
    assert [path for path in made if path.exists()] == []
    assert not made[0].parent.exists(), "nor what its second process left"
    assert of_another.exists()


def test_no_process_that_a_killed_one_leaves_is_there_once_the_kill_returns(tmp_path: Path) -> None:
    child = Child(of_pool(tmp_path, LEAVES_ANOTHER))
    until_there(tmp_path / "other", child)
    other = psutil.Process(int((tmp_path / "other").read_text()))
    child.kill()
    assert not is_alive(other)


@pytest.mark.parametrize(("signals", "most_waits"), [(0, PATIENCE_S / LOOK_S + 1), (1, 1), (2, 0)])
def test_a_run_that_ends_waits_once_for_all_and_not_after_a_second_signal(
    signals: int, most_waits: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers = [of_pool(tmp_path / name, TRACKED_BY_OTHERS) for name in ("a", "b")]
    supervisor = Supervisor([Pool.of(workers)], say=lambda _: None)
    supervisor._stops = [signal.SIGINT] * signals
    keepers, shared = [], []
    try:
        supervisor._start()
        for slot in supervisor._workers():
            assert isinstance(slot.child, Child)
            until_there(slot.child.command.directory() / "keeper", slot.child)
            pid, name = (slot.child.command.directory() / "keeper").read_text().split()
            keepers.append(psutil.Process(int(pid)))
            shared.append(IN_RAM / name)
        monkeypatch.setattr("headway.deploy.launch.local_launcher.time", clock := Clock())
        if signals == 1:
            clock.on_wait = lambda: supervisor._stops.append(signal.SIGINT)
        supervisor._kill_all()
        assert clock.waits <= most_waits
        assert all(slot.child is not None and slot.child.exit_code() == -9 for slot in supervisor._workers())
        for keeper in keepers:
            keeper.kill()
        wait_until(lambda: signals == 0 or not any(path.exists() for path in shared))  # trackers that nobody killed
    finally:
        for keeper in filter(is_alive, keepers):
            keeper.kill()
        for path in shared:
            path.unlink(missing_ok=True)


def test_a_file_that_is_not_vllms_names_no_shared_memory(own: TemporaryFiles, in_ram: Callable[[str], Path]) -> None:
    of_a_reward = in_ram(f"{met_in(own, f'shared_reward_cache_{uuid4().hex}')}-index")
    own.remove()
    assert of_a_reward.exists()


def test_shared_memory_of_another_user_stays(
    own: TemporaryFiles, in_ram: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    of_another = in_ram(f"{met_in(own, f'vllm_dist_{uuid4().hex}')}-0")
    monkeypatch.setattr("os.geteuid", lambda: of_another.stat().st_uid + 1)
    own.remove()
    assert of_another.exists()


def test_shared_memory_that_cannot_be_removed_keeps_nothing_else(
    own: TemporaryFiles, in_ram: Callable[[str], Path]
) -> None:
    name = met_in(own, f"vllm_dist_{uuid4().hex}")
    first, blocked = in_ram(f"{name}-0"), IN_RAM / f"{name}-1"
    blocked.mkdir()
    last = in_ram(f"{name}-2")
    try:
        own.remove()
        assert blocked.exists()
        assert not first.exists()
        assert not last.exists()
        assert not Path(own.variables()["TMPDIR"]).exists()
    finally:
        blocked.rmdir()


def test_a_process_of_no_pool_keeps_the_directory_of_its_supervisor(tmp_path: Path) -> None:
    told = "import os, tempfile; print(tempfile.gettempdir())"
    child = Child(replace(of_pool(tmp_path, told), pool=""))
    child._process.wait()
    assert child.last_words() == str(shared_temporary_directory())


@pytest.mark.parametrize("user", ["somebody", "DOMAIN\\somebody", None])
def test_what_torch_has_compiled_is_found_by_workers_and_others(
    user: str | None, own: TemporaryFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.delenv(SHARED_TMPDIR, raising=False)
    for variable in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(variable, raising=False)
    if user is None:
        monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)  # as in a container whose user has no entry
    else:
        monkeypatch.setenv("LOGNAME", user)
    assert own.variables()["TORCHINDUCTOR_CACHE_DIR"] == default_cache_dir()


@pytest.mark.parametrize(("length", "parent"), [(LONGEST_DIRECTORY, ""), (LONGEST_DIRECTORY + 1, "/tmp")])
def test_the_directory_leaves_room_for_the_paths_of_sockets(
    length: int, parent: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SHARED_TMPDIR, "/tmp/" + "u" * 60)
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    preferred = Path("/tmp", uuid4().hex.ljust(length - len("/tmp/"), "p"))
    preferred.mkdir()
    own = TemporaryFiles(preferred)
    try:
        variables = own.variables()
        assert Path(variables["TMPDIR"]).parent == Path(parent or preferred)
        assert variables[SHARED_TMPDIR] == "/tmp/" + "u" * 60
        assert Path(variables["TORCHINDUCTOR_CACHE_DIR"]).parent == Path(variables[SHARED_TMPDIR])
        longest = Path(variables["TMPDIR"], "headway-sglang-12345678", "tmp12345678")
        assert len(str(longest)) <= 107
        own.remove()
        assert not Path(variables["TMPDIR"]).exists()
    finally:
        own.remove()
        preferred.rmdir()


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, perhaps not two")
def test_vllms_killed_processes_leave_nothing(tmp_path: Path) -> None:
    """Two processes share the model: they meet by a file, and talk through sockets and two kinds of shared memory."""
    model = save_config(make_model("dense", 0), tmp_path / "model")
    command = replace(of_pool(tmp_path, OPENS, str(model)), environment={"PYTHONPATH": str(ROOT)})
    child = Child(command)
    try:
        until_there(tmp_path / "up", child)
        temporary = Path(psutil.Process(child.pid).environ()["TMPDIR"])
        files, shared = list(temporary.iterdir()), shared_memory_of(child.pid)
        assert len(files) > 3
        assert {path.name[:4] for path in shared} == {"psm_", "vllm"}
        os.kill(child.pid, signal.SIGKILL)
        while child.exit_code() is None:
            time.sleep(0.01)
    finally:
        child.kill()
    assert [path for path in (temporary, *shared) if path.exists()] == []


def until_there(path: Path, child: Child) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not path.exists():
        assert child.exit_code() is None, child.last_words()
        assert time.monotonic() < deadline, child.last_words()
        time.sleep(0.05)
