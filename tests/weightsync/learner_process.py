"""A learner without training, as a process of its own, that is interrupted in the middle of a broadcast."""

import signal
from multiprocessing.connection import Connection

import torch

from tests.weightsync.conftest import Learner
from tests.weightsync.interruptions import Interruptions, interrupt_sending
from weightsync.config import WeightsConfig
from weightsync.shared_memory import host_buffer


def publish(
    url: str,
    run: str,
    config: WeightsConfig,
    workers: tuple[str, ...],
    interruptions: Interruptions,
    connection: Connection,
) -> None:
    """Version after version, each once `workers` hold the one before."""
    torch.set_num_threads(1)
    interrupt_sending(interruptions)
    learner = Learner(url, run, config)
    while True:
        report = learner.publish()
        connection.send(report.members)
        learner.until_held(*workers)


def hold_buffer(nbytes: int, connection: Connection) -> None:
    """A host buffer full of sevens, for ever."""
    with host_buffer(nbytes) as (buffer, handle):
        buffer.fill_(7)
        connection.send(handle)
        signal.pause()
