"""Both sides of a broadcast: bucket after bucket, each sent while learner and members work on the next or previous one,
and then the fingerprints, which exist only once the last bucket is full.

    learner    fill k + 1 │ send k         member    receive k + 1 │ fingerprint k
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress

import numpy as np
import torch

from headway.broker.errors import WeightSyncError
from headway.broker.schema import WeightVersion
from headway.weightsync.deadline import Deadline

from .base import BroadcastGroupTransport

_AT_ONCE = 2
_NUMBER = np.dtype("<u8")


def pipelined(
    transport: BroadcastGroupTransport, buckets: Iterable[torch.Tensor], deadline: Deadline
) -> Iterator[torch.Tensor]:
    """Broadcast `buckets`, and yield each once it is through, while the next one is under way.

    Raises the errors of the transport and of `buckets`. However it ends, no transfer is under way afterwards.
    """
    under_way: deque[_UnderWay] = deque()
    try:
        for bucket in buckets:
            under_way.append(_UnderWay(transport, bucket, deadline))
            if len(under_way) == _AT_ONCE:
                yield under_way.popleft().finished()
        while under_way:
            yield under_way.popleft().finished()
    finally:
        for transfer in under_way:
            with suppress(WeightSyncError):
                transfer.finished()


class _UnderWay:
    def __init__(self, transport: BroadcastGroupTransport, bucket: torch.Tensor, deadline: Deadline) -> None:
        self._bucket = bucket
        self._finish = transport.start(bucket, deadline)

    def finished(self) -> torch.Tensor:
        self._finish()
        return self._bucket


def seal(version: WeightVersion, fingerprints: Sequence[int], device: torch.device) -> torch.Tensor:
    """Return the seal that follows the last bucket: the version and all of its fingerprints, as bytes."""
    numbers = (version.incarnation, version.step, *fingerprints)
    return torch.from_numpy(np.array(numbers, _NUMBER).view(np.uint8)).to(device)


def empty_seal(count: int, device: torch.device) -> torch.Tensor:
    """Return memory for the seal of a version of `count` tensors."""
    return torch.zeros((2 + count) * _NUMBER.itemsize, dtype=torch.uint8, device=device)


def unsealed(version: WeightVersion, sealed: torch.Tensor) -> tuple[int, ...]:
    """Return the fingerprints in a seal. Raises WeightSyncError if they are another version's."""
    incarnation, step, *fingerprints = sealed.cpu().numpy().view(_NUMBER).tolist()
    if (found := WeightVersion(incarnation, step)) != version:
        raise WeightSyncError(f"version {found} arrived where {version} was offered")
    return tuple(fingerprints)
