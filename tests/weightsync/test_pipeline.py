"""Filling, sending and finishing of buckets overlap, and a failure leaves no transfer under way."""

from collections.abc import Callable, Iterator

import pytest
import torch

from headway.broker.errors import WeightSyncError
from headway.broker.schema import WeightVersion
from headway.weightsync.limits import Deadline
from headway.weightsync.transports.broadcast import empty_seal, pipelined, seal, unsealed


class Noting:
    """A transport that notes its calls; `broken` is the number of the transfer that fails."""

    def __init__(self, events: list[str], broken: int | None = None) -> None:
        self._events = events
        self._broken = broken

    def start(self, bucket: torch.Tensor, deadline: Deadline) -> Callable[[], None]:
        number = int(bucket)
        self._events.append(f"start {number}")

        def finish() -> None:
            self._events.append(f"finish {number}")
            if number == self._broken:
                raise WeightSyncError("broken")

        return finish

    def close(self) -> None: ...


def filled(events: list[str], count: int) -> Iterator[torch.Tensor]:
    for number in range(count):
        events.append(f"fill {number}")
        yield torch.tensor(number)


def test_the_next_bucket_is_filled_and_begun_while_one_is_under_way() -> None:
    events: list[str] = []
    for bucket in pipelined(Noting(events), filled(events, 3), Deadline(10)):
        events.append(f"use {int(bucket)}")
    assert " ".join(events) == (
        "fill 0 start 0 fill 1 start 1 finish 0 use 0 fill 2 start 2 finish 1 use 1 finish 2 use 2"
    )


def test_after_a_failure_nothing_is_under_way() -> None:
    events: list[str] = []
    with pytest.raises(WeightSyncError, match="broken"):
        list(pipelined(Noting(events, broken=1), filled(events, 5), Deadline(10)))
    assert events[-3:] == ["start 2", "finish 1", "finish 2"]


def test_a_seal_names_its_version() -> None:
    version, fingerprints = WeightVersion(3, 7), ((1 << 64) - 1, 0, 5)
    sealed = seal(version, fingerprints, torch.device("cpu"))
    assert sealed.shape == empty_seal(3, torch.device("cpu")).shape
    assert unsealed(version, sealed) == fingerprints
    with pytest.raises(WeightSyncError, match="arrived where"):
        unsealed(WeightVersion(3, 8), sealed)
