"""A learner without training in a process of its own, which is interrupted in the middle of a broadcast."""

import os
import signal
import time
from multiprocessing.connection import Connection

import torch

from headway.learner.ranks import join_ranks
from headway.weightsync.config import WeightsConfig
from headway.weightsync.tensors.shared_memory import host_buffer
from headway.weightsync.transports import collective
from tests.weightsync.conftest import Learner
from tests.weightsync.interruptions import Interruptions, interrupt_sending

WATCHDOG_PATIENCE = "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"
"""The variable for the seconds that torch waits before it ends a process whose group has failed."""


def publish(
    url: str,
    run: str,
    config: WeightsConfig,
    workers: tuple[str, ...],
    interruptions: Interruptions,
    connection: Connection,
) -> None:
    """Publish version after version, each once `workers` hold the one before."""
    torch.set_num_threads(1)
    interrupt_sending(interruptions)
    learner = Learner(url, run, config)
    while True:
        report = learner.publish()
        connection.send(report.members)
        learner.until_held(*workers)


def outlive(
    url: str, run: str, config: WeightsConfig, healthy: str, dying: str, seconds: float, connection: Connection
) -> None:
    """Publish to both workers, send that step, go on with the healthy one, and send the members that each step reached.

    The process has a group for training, too, as learners on GPUs do. Torch's watchdog, which looks ten times a second,
    hears of the failure before the learner does, as may happen where processors are busy.
    """
    collective._WAIT_S = 0.3
    os.environ[WATCHDOG_PATIENCE] = "1"
    torch.set_num_threads(1)
    join_ranks("cuda")
    learner = Learner(url, run, config)
    while set(learner.publish().members) != {healthy, dying}:
        learner.until_held(healthy, dying)
    connection.send(learner.step)
    end, reached = time.monotonic() + seconds, []
    while time.monotonic() < end:
        learner.until_held(healthy)
        time.sleep(0.5)
        reached.append(learner.publish().members)
    connection.send(reached)
    learner.close()


def hold_buffer(nbytes: int, connection: Connection) -> None:
    """Hold a host buffer full of sevens for ever."""
    with host_buffer(nbytes) as (buffer, handle):
        buffer.fill_(7)
        connection.send(handle)
        signal.pause()
