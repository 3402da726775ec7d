"""Ray as a launcher chooses node and GPUs, lets a command wait for its place, and may lose a node."""

import json
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from headway.broker.errors import ConfigError
from headway.deploy.launch.base import Command, Handle, Launcher, Resources
from headway.deploy.launch.local_run import open_launcher
from headway.deploy.recipe.recipe import LauncherConfig
from headway.deploy.recipe.resolve import load_recipe
from tests.ray_cluster import needs_ray, ray_cluster, raylet_of

DEADLINE_S = 300.0
ANY = Resources()
SAYS = (
    "import os, time; print(os.getpid(), os.environ.get('CUDA_VISIBLE_DEVICES'), os.environ.get('SAID'), flush=True);"
    " time.sleep(600)"
)
WAITS = "import os, time; print(os.getpid(), os.environ.get('CUDA_VISIBLE_DEVICES'), flush=True); time.sleep(600)"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with ray_cluster(num_cpus=2, num_gpus=2) as opened:
        yield opened


@pytest.fixture
def launcher(cluster: Any) -> Launcher:
    return open_launcher(LauncherConfig(kind="ray", options={"address": cluster.address}))


def waiting(directory: Path, resources: Resources = ANY) -> Command:
    """Return a command that prints its process and its GPUs, and stays."""
    argv = (sys.executable, "-c", WAITS)
    return Command(name="w", argv=argv, log=directory / "w.log", cwd=directory, resources=resources)


def until(is_so: Callable[[], object]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not is_so():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def words_of(handle: Handle) -> list[str]:
    """Return the words that the command prints of itself."""
    until(handle.log)
    return handle.log().split()


@needs_ray
def test_ray_gives_each_process_gpus_of_its_own(launcher: Launcher, tmp_path: Path) -> None:
    handles = [launcher.start(waiting(tmp_path / f"{number}", Resources(gpus=1))) for number in range(2)]
    assert {words_of(handle)[1] for handle in handles} == {"0", "1"}
    for handle in handles:
        handle.kill()
        handle.kill()
        assert handle.exit_code() == -signal.SIGKILL


@needs_ray
def test_roles_share_gpus_and_have_nodes_and_environments_of_their_own(cluster: Any, tmp_path: Path) -> None:
    roles = {
        "worker": {"gpus": 0.5, "runtime_env": {"env_vars": {"SAID": "worker"}}},
        "big": {"resources": {"large": 0.5}, "runtime_env": {"env_vars": {"SAID": "big"}}},
    }
    options = {"address": cluster.address, "roles": roles}
    launcher = open_launcher(LauncherConfig(kind="ray", options=options))
    says = replace(waiting(tmp_path / "own", Resources(gpus=1)), argv=(sys.executable, "-c", SAYS), role="worker")
    large = cluster.add_node(num_cpus=2, num_gpus=1, resources={"large": 1})
    handles: list[Handle] = []
    try:
        for name, pool in (("a", "big"), ("b", "big"), ("c", "workers"), ("d", "workers")):
            handles.append(launcher.start(replace(says, cwd=tmp_path / name, pool=pool)))
            words_of(handles[-1])
        told = [words_of(handle) for handle in handles]
        assert [said[2] for said in told] == ["big", "big", "worker", "worker"]
        assert told[0][1] == told[1][1]
        assert told[2][1] == told[3][1]
        nodes = [raylet_of(int(said[0])) for said in told]
        assert nodes[0] == nodes[1] != nodes[2]
    finally:
        for handle in handles:
            handle.kill()
        cluster.remove_node(large)


@needs_ray
def test_a_command_waits_for_a_node_with_room_and_is_lost_with_it(
    cluster: Any, launcher: Launcher, tmp_path: Path
) -> None:
    handle = launcher.start(waiting(tmp_path / "own", Resources(threads=3)))
    assert handle.exit_code() is None
    assert handle.log() == ""
    node = cluster.add_node(num_cpus=3)
    pid = int(words_of(handle)[0])
    cluster.remove_node(node, allow_graceful=False)
    until(lambda: handle.exit_code() is not None)
    assert handle.describe_exit() == "was lost with its node or its actor"
    assert not handle.is_done()
    assert handle.last_words()
    handle.kill()
    until(lambda: not psutil.pid_exists(pid))


@needs_ray
@pytest.mark.parametrize("end", ["terminate", "kill"])
def test_a_command_without_a_place_can_be_stopped(launcher: Launcher, tmp_path: Path, end: str) -> None:
    handle = launcher.start(waiting(tmp_path / "own", Resources(threads=64)))
    getattr(handle, end)()
    until(lambda: handle.exit_code() is not None)
    assert handle.exit_code() in (-signal.SIGTERM, -signal.SIGKILL)
    assert not handle.is_done()
    assert not (tmp_path / "own").exists()


@needs_ray
def test_a_command_that_cannot_start_says_why(launcher: Launcher, tmp_path: Path) -> None:
    handle = launcher.start(replace(waiting(tmp_path / "own"), argv=("/nowhere",), log=Path("/proc/nowhere/w.log")))
    until(lambda: handle.exit_code() is not None)
    assert handle.exit_code() != 0
    assert "w cannot start on " in handle.last_words()


@needs_ray
def test_directories_that_were_made_for_a_command_are_gone_with_it(launcher: Launcher, tmp_path: Path) -> None:
    private = tmp_path / "private"
    command = replace(waiting(private / "w"), log=tmp_path / "w.log", exit_notice=private / "w.exit_notice")
    handle = launcher.start(command)
    words_of(handle)
    assert (private / "w").is_dir()
    handle.kill()
    assert not private.exists()


@needs_ray
def test_a_command_says_its_farewell_after_another_of_its_directory_has_gone(
    launcher: Launcher, tmp_path: Path
) -> None:
    private, go = tmp_path / "private", tmp_path / "go"
    last = (
        "import pathlib, time\nprint('here', flush=True)\n"
        f"while not pathlib.Path({str(go)!r}).exists(): time.sleep(0.05)\n"
        "from headway.deploy.launch.base import write_exit_notice\nwrite_exit_notice()"
    )
    first = launcher.start(
        replace(waiting(private / "w"), log=tmp_path / "w.log", exit_notice=private / "w.exit_notice")
    )
    words_of(first)
    learner = replace(waiting(tmp_path), argv=(sys.executable, "-c", last), log=tmp_path / "l.log", cwd=None)
    second = launcher.start(replace(learner, exit_notice=private / "learner.exit_notice"))
    words_of(second)
    first.kill()
    assert not private.exists()
    go.touch()
    until(lambda: second.exit_code() is not None)
    assert second.is_done(), second.log()


@needs_ray
@pytest.mark.parametrize(
    ("overrides", "others", "message"),
    [
        (["broker.url=embedded"], [], ""),
        (["broker.url=embedded"], ["gpu-7"], "broker.url=embedded reaches a server on this machine only, and the Ray"),
        (["broker.url='redis://u@127.0.0.1:1?password=x'"], ["gpu-7"], r"other nodes \(gpu-7\)"),
        (["broker.url='redis://10.0.0.5:6379'"], ["gpu-7"], ""),
        (
            ["learner.device=cuda", "learner.processes=2", "launcher.options.roles.learner.gpus=1"],
            [],
            "roles gives 1 GPUs to each process of learner, which needs 2",
        ),
        (["workers.devices=[1]", "workers.count=1"], [], "workers.devices names GPUs"),
        (["workers.pools=[{name: wide, count: 1, devices: [1]}]"], [], "also of workers.pools"),
        (["run.placement=colocated"], [], "start the run there by `headway run` with launcher.kind=local"),
    ],
)
def test_a_recipe_that_ray_cannot_place_is_refused(
    cluster: Any, monkeypatch: pytest.MonkeyPatch, overrides: list[str], others: list[str], message: str
) -> None:
    import ray

    known = [*ray.nodes(), *({"Alive": True, "NodeManagerHostname": name} for name in others)]
    monkeypatch.setattr(ray, "nodes", lambda: known)
    recipe = load_recipe("arithmetic.yaml", ["launcher.kind=ray", *overrides])
    options = {"address": cluster.address, **recipe.launcher.options}
    launcher = open_launcher(LauncherConfig(kind="ray", options=options))
    if not message:
        launcher.check(recipe)
        return
    with pytest.raises(ConfigError, match=message) as caught:
        launcher.check(recipe)
    assert "password" not in str(caught.value)


@needs_ray
def test_a_pool_lies_as_its_placement_says_and_grows_beside_its_group(cluster: Any, tmp_path: Path) -> None:
    import ray

    # The last test that places anything: a group keeps its places until this process ends.
    roles = {"workers": {"placement": "strict_pack"}, "wide": {"placement": "spread"}}
    overrides = [
        "workers.count=2",
        "workers.pools=[{name: wide, count: 2}]",
        f"launcher={json.dumps({'kind': 'ray', 'options': {'address': cluster.address, 'roles': roles}})}",
    ]
    recipe = load_recipe("arithmetic.yaml", overrides)
    launcher = open_launcher(recipe.launcher)
    launcher.check(recipe)
    added = cluster.add_node(num_cpus=5)
    # Ray spreads over the nodes that it knows to have room: the new one, and the one that tests before have left.
    until(lambda: ray.available_resources().get("CPU") == 7)
    one = Resources(threads=1)
    at = [("wide", 0), ("wide", 1), ("workers", 0), ("workers", 1), ("workers", 2)]
    handles = [
        launcher.start(replace(waiting(tmp_path / f"{pool}-{number}", one), role="worker", pool=pool, number=number))
        for pool, number in at
    ]
    try:
        nodes = [raylet_of(int(words_of(handle)[0])) for handle in handles]
        assert nodes[0] != nodes[1]
        assert len(set(nodes[2:])) == 1
    finally:
        for handle in handles:
            handle.kill()
        cluster.remove_node(added)


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.broker.installation.is_installed", lambda module: False)
    with pytest.raises(ConfigError, match=r"launcher\.kind=ray needs Ray.*pip install 'headway\[ray\]'"):
        open_launcher(LauncherConfig(kind="ray"))
