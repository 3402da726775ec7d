# mypy: disable-error-code="attr-defined"
"""Signals that a process sends to itself at a chosen place of a chosen transfer, on either side of it."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch

from headway.broker.schema import WeightVersion
from headway.broker.schema.weights import WeightManifest
from headway.weightsync import publisher, receiver
from headway.weightsync.limits import Deadline
from headway.weightsync.publisher import _on_the_wire
from headway.weightsync.receiver import GroupMembership
from headway.weightsync.sender import Sender, Wire
from headway.weightsync.tensors.staging import Gathering
from headway.weightsync.transports.base import BroadcastGroupTransport


class Place(NamedTuple):
    """A place in the broadcast of version `step`, after so many of its buckets have passed; the seal counts as one.

    The sender is at the place when it is asked for the next bucket.
    """

    step: int
    buckets: int


Interruptions = dict[Place, signal.Signals]
"""Signals by place; each is sent once."""


def interrupt_receiving(interruptions: Interruptions) -> None:
    """Interrupt this process at these places of a transfer that it receives.

    When all buckets have passed, it has not acknowledged the version yet.
    """

    class Interrupted(GroupMembership):
        _counted: _Counted | None = None

        def _receive_into(self, buckets: Any, device: Any, offer: WeightManifest, *how: Any) -> WeightManifest:
            step, inner = offer.version.step, self._transport
            self._transport = self._counted = _Counted(inner, step, interruptions)
            try:
                return super()._receive_into(buckets, device, offer, *how)
            finally:
                self._transport = inner

        def _acknowledge(self, version: WeightVersion, failure: str) -> None:
            if self._counted is not None:
                self._counted.interrupt()
            super()._acknowledge(version, failure)

    receiver.GroupMembership = Interrupted  # type: ignore[misc]


def interrupt_sending(interruptions: Interruptions) -> None:
    """Interrupt this process at these places of a transfer that it sends."""

    class Interrupted(Sender):
        def send(self, version: WeightVersion, wire: Wire) -> tuple[tuple[str, ...], str]:
            def one_by_one() -> Iterator[torch.Tensor]:
                for index, bucket in enumerate(wire()):
                    _interrupt(interruptions, Place(version.step, index))
                    yield bucket

            return super().send(version, one_by_one)

    publisher.Sender = Interrupted


@contextmanager
def damaged_bucket(number: int) -> Iterator[None]:
    """Send one wrong byte in that bucket of each version meanwhile."""

    def damaged(version: WeightVersion, gathering: Gathering) -> Iterator[torch.Tensor]:
        for index, part in enumerate(_on_the_wire(version, gathering)):
            if index == number:
                part = part.clone()
                part[0] ^= 1
            yield part

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(publisher, "_on_the_wire", damaged)
        yield


class _Counted:
    def __init__(self, transport: BroadcastGroupTransport, step: int, interruptions: Interruptions) -> None:
        self._transport = transport
        self._step = step
        self._interruptions = interruptions
        self._through = 0

    def start(self, bucket: torch.Tensor, deadline: Deadline) -> Callable[[], None]:
        finish = self._transport.start(bucket, deadline)

        def finish_counted() -> None:
            self.interrupt()
            finish()
            self._through += 1

        return finish_counted

    def interrupt(self) -> None:
        _interrupt(self._interruptions, Place(self._step, self._through))

    def close(self) -> None:
        self._transport.close()


def _interrupt(interruptions: Interruptions, place: Place) -> None:
    if place in interruptions:
        signal.pthread_kill(threading.get_ident(), interruptions.pop(place))  # arrives before the thread's next step
