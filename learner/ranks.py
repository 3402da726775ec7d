"""The learner's ranks tell each other what rank 0 alone hears from the broker.

Everything travels as CPU tensors over the default process group; nothing is pickled.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist


class Placed(Protocol):
    """A model that is spread over ranks, and knows which of them this one is; see `learner.backends.base.Trained`."""

    rank: int
    world_size: int
    replica: int
    replicas: int
    is_lead: bool


class Ranks:
    """The learner's own processes. With one rank every call returns at once.

    Several ranks may hold one replica of the model together. They get the same batches, so sums count it once.
    """

    rank: int
    world_size: int
    """The number of ranks."""
    replica: int
    """The index of the replica that this rank holds, or a part of."""
    replicas: int
    """The number of replicas that share a step's batches."""

    def __init__(self, rank: int, world_size: int, replica: int, replicas: int, is_lead: bool) -> None:
        self.rank = rank
        self.world_size = world_size
        self.replica = replica
        self.replicas = replicas
        self._is_lead = is_lead

    @classmethod
    def of(cls, backend: Placed) -> "Ranks":
        """Returns the ranks that hold the backend's model."""
        return cls(backend.rank, backend.world_size, backend.replica, backend.replicas, backend.is_lead)

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which alone talks to the broker and writes what all ranks know."""
        return self.rank == 0

    def share_bytes(self, payload: bytes) -> bytes:
        """Returns rank 0's bytes on every rank."""
        if self.world_size == 1:
            return payload
        size = torch.tensor([len(payload)], dtype=torch.int64)
        dist.broadcast(size, src=0)
        if not size.item():
            return b""
        buffer = torch.empty(int(size.item()), dtype=torch.uint8)
        if self.is_first:
            buffer.copy_(torch.frombuffer(bytearray(payload), dtype=torch.uint8))
        dist.broadcast(buffer, src=0)
        return buffer.numpy().tobytes()

    def sum(self, values: Sequence[float]) -> list[float]:
        """Returns each value summed over the replicas, in float64."""
        return self._reduce(values if self._is_lead else [0.0] * len(values), dist.ReduceOp.SUM)

    def max(self, values: Sequence[float]) -> list[float]:
        """Returns each value's maximum over the ranks."""
        return self._reduce(values, dist.ReduceOp.MAX)

    def any(self, claim: bool) -> bool:
        """Returns True on every rank if `claim` is true on one."""
        return self.max([float(claim)])[0] > 0

    def _reduce(self, values: Sequence[float], operation: dist.ReduceOp.RedOpType) -> list[float]:
        if self.world_size == 1 or not values:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, op=operation)
        return [float(value) for value in tensor.tolist()]
