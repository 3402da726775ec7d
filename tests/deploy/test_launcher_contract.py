"""Every launcher that starts processes keeps the same promises, and a recipe may name one of the user's own."""

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from headway.broker.errors import ConfigError
from headway.deploy.launch.base import Command, Handle, Launcher, PrintedLauncher, Resources
from headway.deploy.launch.local_run import open_launcher
from headway.deploy.launch.process_pool import Pool
from headway.deploy.launch.supervisor import Supervisor
from headway.deploy.recipe.recipe import LauncherConfig
from headway.deploy.recipe.resolve import dump_recipe, load_recipe, recipe_from_bytes, recipe_to_bytes
from tests.processes import children_left
from tests.ray_cluster import RAY, ray_cluster

DEADLINE_S = 240.0
WAITS = (
    "import pathlib, signal, sys, time\n"
    "signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))\n"
    "pathlib.Path('up').touch()\n"
    "while True: time.sleep(0.05)"
)


@pytest.fixture(scope="module")
def ray_address() -> Iterator[str]:
    """Yield the address of a cluster whose GPUs exist for Ray alone."""
    with ray_cluster(num_cpus=8, num_gpus=2) as cluster:
        yield cluster.address


@pytest.fixture(params=["local", "printed", "own", pytest.param("ray", marks=RAY)])
def launcher(request: pytest.FixtureRequest) -> Launcher:
    if request.param == "printed":
        return PrintedLauncher(lambda _: None)
    if request.param == "own":
        request.getfixturevalue("own")
        return open_launcher(LauncherConfig(kind="own_launchers:Nice", options={"niceness": 7}))
    options = {"address": request.getfixturevalue("ray_address")} if request.param == "ray" else {}
    return open_launcher(LauncherConfig(kind=request.param, options=options))


@pytest.fixture
def starting(launcher: Launcher) -> Launcher:
    if not launcher.starts_processes:
        pytest.skip("it starts no processes")
    return launcher


def python(script: str, directory: Path) -> Command:
    return Command(name="w", argv=(sys.executable, "-c", script), log=directory / "w.log", cwd=directory / "own")


def ended(handle: Handle) -> int:
    """Wait for the process to end, and return its exit code."""
    deadline = time.monotonic() + DEADLINE_S
    while (code := handle.exit_code()) is None:
        assert time.monotonic() < deadline, "it still runs"
        time.sleep(0.02)
    return code


def await_file(path: Path) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not path.exists():
        assert time.monotonic() < deadline, f"waited in vain for {path}"
        time.sleep(0.02)


def test_a_command_that_does_its_work_is_done(launcher: Launcher, tmp_path: Path) -> None:
    command = python("print('hello')", tmp_path)
    handle = launcher.start(command)
    assert handle.command.argv[-len(command.argv) :] == command.argv  # a launcher may put a program before it
    assert replace(handle.command, argv=command.argv) == command
    assert ended(handle) == 0
    assert handle.is_done()
    assert handle.log() == ("hello\n" if launcher.starts_processes else "")
    for _ in range(2):
        handle.terminate()
        handle.kill()
    assert handle.is_done()


def test_a_run_on_it_ends_by_itself(launcher: Launcher, tmp_path: Path) -> None:
    workers = [replace(python("pass", tmp_path), name=name) for name in ("a", "b")]
    assert Supervisor([Pool.of(workers)], python("pass", tmp_path), say=lambda _: None, launcher=launcher).run() == 0
    assert children_left() == []


def test_what_starts_no_processes_leaves_nothing_behind(launcher: Launcher, tmp_path: Path) -> None:
    ended(launcher.start(replace(python("pass", tmp_path), exit_notice=tmp_path / "exit_notice")))
    assert any(tmp_path.iterdir()) == launcher.starts_processes


def test_a_command_is_asked_to_end_and_says_how_it_did(starting: Launcher, tmp_path: Path) -> None:
    handle = starting.start(python(WAITS, tmp_path))
    await_file(tmp_path / "own" / "up")
    assert handle.exit_code() is None
    handle.terminate()
    assert ended(handle) == 3
    assert not handle.is_done()
    assert handle.describe_exit() == "exited with code 3"


def test_a_killed_command_is_gone_at_once(starting: Launcher, tmp_path: Path) -> None:
    handle = starting.start(python(WAITS, tmp_path))
    await_file(tmp_path / "own" / "up")
    handle.kill()
    assert handle.exit_code() == -signal.SIGKILL
    assert children_left() == []


def test_a_command_started_again_is_judged_by_itself_alone(starting: Launcher, tmp_path: Path) -> None:
    exit_notice = tmp_path / "exit_notice"
    says = "import os, pathlib; print('first'); pathlib.Path(os.environ['HEADWAY_FAREWELL']).touch()"
    first = starting.start(replace(python(says, tmp_path), exit_notice=exit_notice))
    ended(first)
    assert first.is_done()
    second = starting.start(replace(python("print('Error: second')", tmp_path), exit_notice=exit_notice))
    ended(second)
    assert not second.is_done()
    assert (second.log(), second.last_words()) == ("Error: second\n", "second")
    assert (tmp_path / "w.log").read_text() == "first\nError: second\n"


def test_a_process_has_the_directory_and_variables_of_its_command(starting: Launcher, tmp_path: Path) -> None:
    command = replace(
        python("import json, os; print(json.dumps([os.getcwd(), dict(os.environ)]))", tmp_path),
        environment={"HEADWAY_RUN": "x"},
        resources=Resources(threads=3, gpus=2, devices="4,5"),
    )
    handle = starting.start(command)
    ended(handle)
    directory, environment = json.loads(handle.log())
    assert directory == str(tmp_path / "own")
    assert command.variables().items() <= environment.items()
    assert (environment["OMP_NUM_THREADS"], environment["CUDA_VISIBLE_DEVICES"]) == ("3", "4,5")


OWN = """
from dataclasses import replace
from headway.deploy.launch.base import Launcher
from headway.deploy.launch.local_launcher import LocalLauncher

class Nice(Launcher):
    def __init__(self, niceness):
        self._niceness = niceness
    def start(self, command):
        return LocalLauncher().start(replace(command, argv=("nice", "-n", str(self._niceness), *command.argv)))

class Other:
    pass
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_launchers.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("own")
def test_a_launcher_of_ones_own_starts_commands_its_own_way(tmp_path: Path) -> None:
    launcher = open_launcher(LauncherConfig(kind="own_launchers:Nice", options={"niceness": 7}))
    handle = launcher.start(python("import os; print(os.nice(0))", tmp_path))
    assert ended(handle) == 0
    assert handle.log() == f"{min(os.nice(0) + 7, 19)}\n"


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize(
    ("config", "message"),
    [
        (LauncherConfig(kind="own_launchers:Nice"), "launcher: own_launchers:Nice cannot be made: TypeError"),
        (LauncherConfig(kind="local", options={"x": 1}), "launcher: local cannot be made: TypeError"),
        (LauncherConfig(kind="own_launchers:Other"), "makes a Other, which lacks check, start, starts_processes; "),
        (LauncherConfig(kind="nowhere_to_be_found:X"), "launcher.kind: cannot import 'nowhere_to_be_found'"),
        (LauncherConfig(kind="subprocess:Popen"), "belongs to Python's standard library"),
    ],
)
def test_what_is_no_launcher_is_refused(config: LauncherConfig, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_launcher(config)
    assert message in str(caught.value)


def test_an_unknown_launcher_is_refused_with_the_recipe() -> None:
    with pytest.raises(ConfigError, match=r"launcher\.kind: there is no 'lokal'; did you mean 'local'"):
        load_recipe("arithmetic.yaml", ["launcher.kind=lokal"])


def test_the_broker_is_never_told_of_a_launcher(tmp_path: Path) -> None:
    recipe = load_recipe("arithmetic.yaml", ["launcher.kind=mine:Slurm", "launcher.options={partition: a}"])
    assert recipe_from_bytes(recipe_to_bytes(recipe)).launcher == LauncherConfig()
    (tmp_path / "config.yaml").write_text(dump_recipe(recipe))
    assert load_recipe(tmp_path / "config.yaml").launcher == recipe.launcher  # for --resume
