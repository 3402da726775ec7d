"""A Ray cluster on this machine, and membership in it."""

import logging
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_OBJECT_STORE_BYTES = 2 << 30
_QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR, "namespace": "benchmark"}

_TOKEN = secrets.token_hex(32)
"""The token of the clusters that this process starts: Ray reads it once."""


@contextmanager
def started() -> Iterator[str]:
    """Start a cluster of this machine alone, and yield its address. Processes started meanwhile may join it."""
    root = str(Path(__file__).parents[3])
    environment = {
        "PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH")))),  # for its workers
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": _TOKEN,
        "TQ_LOGGING_LEVEL": "ERROR",
        "TQ_NUM_THREADS": "1",  # its default, 8, warns at every call where there are fewer cores
    }
    os.environ.update(environment)
    import ray  # reads its environment when it is imported

    ray.init(num_cpus=8, include_dashboard=False, object_store_memory=_OBJECT_STORE_BYTES, **_QUIET)
    try:
        yield ray.get_runtime_context().gcs_address
    finally:
        ray.shutdown()


def join(address: str) -> None:
    """Make this process a driver of the cluster, until it ends. Idempotent."""
    import ray

    if not ray.is_initialized():
        ray.init(address=address, **_QUIET)
