"""`headway ray up` on a cluster of several nodes adds workers with the nodes, and the run survives a node's loss."""

import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from headway.broker.schema.status import RunStatus
from tests.ray_cluster import needs_ray, ray_cluster, raylet_of

from .recipes import write_recipe
from .records import check_trained, summary
from .terminals import Terminals, paused
from .watching import attached

pytestmark = pytest.mark.slow

STEPS = 40
SLOW = """import time


def compute_score(data_source, solution_str, ground_truth, extra_info):
    time.sleep(0.5)
    return solution_str.count("7") / 16
"""


@pytest.fixture
def cluster() -> Iterator[Any]:
    """Yield a cluster whose head has room for the learner alone."""
    with ray_cluster(num_cpus=1) as opened:
        yield opened


def pids(status: RunStatus) -> set[int]:
    """Return the process ids of the workers."""
    return {worker.pid for worker in status.workers}


def learner_of(run: Path) -> int:
    """Return the learner's process id, on whichever node Ray has put it."""
    arguments = ["learner", str(run / "config.yaml")]
    found = [one.pid for one in psutil.process_iter() if " ".join(arguments) in " ".join(_arguments(one))]
    assert len(found) == 1
    return found[0]


def _arguments(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


@needs_ray
def test_a_run_on_ray_grows_with_its_nodes_and_outlives_one(cluster: Any, terminals: Terminals) -> None:
    home = terminals.directory("run")
    recipe = write_recipe(home, learner={"steps": STEPS}, workers={"count": 1, "heartbeat_s": 0.2})
    headway = terminals.open("run", "ray", "up", recipe, "--address", cluster.address)
    run = home / "runs" / "tiny"
    with attached(terminals, headway, run) as watch:
        cluster.add_node(num_cpus=1)
        watch.until_step(1)
        learner = learner_of(run)
        with paused(learner):  # the run must not end meanwhile
            terminals.open("run", "scale", "3").succeeds()
            lost = cluster.add_node(num_cpus=2)
            three = pids(watch.until("three workers are there", lambda status: len(pids(status)) == 3))
        watch.until_step(4)
        with paused(learner):
            cluster.remove_node(lost, allow_graceful=False)
            cluster.add_node(num_cpus=2)
            watch.until("two others are in their place", lambda status: len(pids(status) - three) == 2)
    headway.succeeds()
    check_trained(run, steps=STEPS, trajectories_per_step=16, max_lag=2)
    assert summary(run)["worker_restarts"] == 2


@needs_ray
def test_the_autoscaler_grows_a_pool_on_the_nodes_of_its_resource(cluster: Any, terminals: Terminals) -> None:
    home = terminals.directory("run")
    (home / "slow.py").write_text(SLOW)
    recipe = write_recipe(
        home,
        learner={"steps": 10_000},
        workers={"count": 1, "heartbeat_s": 0.2},
        rewards=[{"kind": "slow:compute_score"}],
        launcher={"kind": "ray", "options": {"roles": {"workers": {"resources": {"rollout": 1}, "placement": "pack"}}}},
    )
    headway = terminals.open("run", "ray", "up", recipe, "--address", cluster.address)
    with attached(terminals, headway, home / "runs" / "tiny") as watch:
        for _ in range(2):
            cluster.add_node(num_cpus=1, resources={"rollout": 1})
        watch.until_step(1)
        told = ("--most", "2", "--steps", "4", "--cooldown-s", "1", "--json")
        scaler = terminals.open("run", "autoscale", *told)
        two = watch.until("it has grown", lambda status: len(pids(status)) == 2)
        assert len({raylet_of(pid) for pid in pids(two)}) == 2
        for stopped in (scaler, headway):  # the scaler's server ends with the run
            terminals.expect_failure(stopped)  # its exit code says that it was stopped
            stopped.send(signal.SIGTERM)
            stopped.wait()
    steps = summary(home / "runs" / "tiny")["steps"]
    check_trained(home / "runs" / "tiny", steps=steps, trajectories_per_step=16, max_lag=2)


@needs_ray
def test_without_a_cluster_a_ray_is_started_that_ends_with_the_run(terminals: Terminals) -> None:
    home = terminals.directory("run")
    recipe = write_recipe(home, learner={"steps": 2}, workers={"count": 1})
    with tempfile.TemporaryDirectory(prefix="ray-") as short:  # paths of Ray's sockets must be short
        terminals.open("run", "ray", "up", recipe, RAY_TMPDIR=short).succeeds()
    check_trained(home / "runs" / "tiny", steps=2, trajectories_per_step=16, max_lag=2)
