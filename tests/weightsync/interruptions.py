"""Signals that a process sends to itself at a chosen place of a chosen transfer, on either side of it."""

import signal
import threading
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from broker.schema import WeightManifest, WeightVersion
from weightsync import publisher, receiver
from weightsync.deadline import Deadline
from weightsync.landing import Landed, Landing
from weightsync.receiver import JoinedGroup
from weightsync.sender import Sender
from weightsync.transports.base import BroadcastGroupTransport


class Place(NamedTuple):
    """In the broadcast of version `step`, once so many of its buckets are through."""

    step: int
    buckets: int


Interruptions = dict[Place, signal.Signals]
"""Each happens once."""


def interrupt_receiving(interruptions: Interruptions) -> None:
    """Of this process, at these places. With all buckets through, it has not said so yet."""

    class Interrupted(JoinedGroup):
        def receive(self, manifest: WeightManifest, landing: Landing, cancelled: threading.Event) -> Landed:
            step, inner = manifest.version.step, self._transport
            self._transport = counted = _Counted(inner, step, interruptions)
            self._counted = counted
            try:
                return super().receive(manifest, landing, cancelled)
            finally:
                self._transport = inner

        def _acknowledge(self, version: WeightVersion, failure: str) -> None:
            self._counted.interrupt()
            super()._acknowledge(version, failure)

    receiver.JoinedGroup = Interrupted  # type: ignore[misc]


def interrupt_sending(interruptions: Interruptions) -> None:
    """Of this process, at these places."""

    class Interrupted(Sender):
        def send(self, version: WeightVersion, buckets: Sequence[torch.Tensor]) -> tuple[tuple[str, ...], str]:
            def one_by_one() -> Iterator[torch.Tensor]:
                for index, bucket in enumerate(buckets):
                    _interrupt(interruptions, Place(version.step, index))
                    yield bucket

            return super().send(version, one_by_one())  # type: ignore[arg-type]

    publisher.Sender = Interrupted  # type: ignore[misc]


class _Counted:
    def __init__(self, transport: BroadcastGroupTransport, step: int, interruptions: Interruptions) -> None:
        self._transport = transport
        self._step = step
        self._interruptions = interruptions
        self._through = 0

    def broadcast(self, bucket: torch.Tensor, deadline: Deadline) -> None:
        self.interrupt()
        self._transport.broadcast(bucket, deadline)
        self._through += 1

    def interrupt(self) -> None:
        _interrupt(self._interruptions, Place(self._step, self._through))

    def close(self) -> None:
        self._transport.close()


def _interrupt(interruptions: Interruptions, place: Place) -> None:
    if place in interruptions:
        signal.pthread_kill(threading.get_ident(), interruptions.pop(place))  # before this thread takes a further step
