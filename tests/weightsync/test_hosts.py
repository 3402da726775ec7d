"""NCCL between hosts notices the death of a peer, as it does not on one host, and reports it to torch."""

import signal
from collections.abc import Callable

from msgspec.structs import replace

from benchmarks.gpus import on_host
from headway.broker.schema import WeightVersion
from tests.weightsync.conftest import CONFIG, ON_GPUS, WorkerProcess
from tests.weightsync.learner_process import WATCHDOG_PATIENCE, outlive
from tests.weightsync.processes import ForkedProcess

pytestmark = ON_GPUS

SECONDS = 20.0
"""Time for torch, which writes down all its stacks before it ends a process."""


def test_learner_and_worker_outlive_a_worker_on_another_host(
    url: str, run_name: str, start_worker: Callable[..., WorkerProcess]
) -> None:
    config = replace(CONFIG, transport="nccl", staging="device", broadcast_timeout_s=8.0)
    healthy = start_worker("healthy", staging="device", **{WATCHDOG_PATIENCE: "1"})
    dying = start_worker("dying", staging="device", **on_host("another"))
    learner = ForkedProcess(outlive, url, run_name, config, "healthy", "dying", SECONDS)
    try:
        step = learner.next()
        dying.send(signal.SIGKILL)
        reached = learner.next()
        learner.until_ended()
    finally:
        learner.close()
    assert reached[-1] == ("healthy",)
    healthy.expect(WeightVersion(1, step + len(reached)))
