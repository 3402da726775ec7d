"""A Ray cluster of several nodes on this machine, for tests that run where Ray is installed."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, TypeVar

import psutil
import pytest

Test = TypeVar("Test", bound=Callable[..., Any])

RAY = [
    pytest.mark.ray,
    pytest.mark.skipif(find_spec("ray") is None, reason="needs Ray: make test-ray"),
    pytest.mark.timeout(1200),  # a machine at load starts the processes of a node in minutes
    pytest.mark.filterwarnings("ignore"),  # Ray's own, of its sockets and of its next versions
]


def needs_ray(test: Test) -> Test:
    """Skip the test where Ray is not installed."""
    for mark in RAY:
        test = mark(test)
    return test


def raylet_of(pid: int) -> int:
    """The process of the node on which Ray has placed this one."""
    return next(one.pid for one in psutil.Process(pid).parents() if one.name() == "raylet")


@contextmanager
def ray_cluster(**head: Any) -> Iterator[Any]:
    """Yield a cluster with this head; the test adds and removes further nodes. At the end no process of it is left."""
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"include_dashboard": False, **head})
    try:
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()
