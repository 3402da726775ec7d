"""The learner's ranks tell each other what rank 0 alone hears from the broker.

`join_ranks` joins the ranks that torchrun started, or this process alone.

Everything travels as CPU tensors over the default process group; nothing is pickled.
"""

import atexit
import os
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from headway.broker.errors import ConfigError


class RankPlacement(Protocol):
    """The rank of a model's part, among all of them; see `learner.backends.base.TrainableModel`."""

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
    def of(cls, backend: RankPlacement) -> "Ranks":
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


def count_ranks() -> int:
    """The number of ranks, before they have joined."""
    return int(os.environ.get("WORLD_SIZE", 1))


def join_ranks(device: str) -> torch.device:
    """Join all ranks; return this rank's device. Collective, unless they have joined before; raises ConfigError."""
    if device == "cuda":
        if not torch.cuda.is_available():
            raise ConfigError("learner.device is cuda, but torch finds no CUDA device; set learner.device=cpu.")
        rank, ranks = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        if rank >= (devices := torch.cuda.device_count()):
            raise ConfigError(
                f"learner.layout needs {ranks} CUDA devices on this machine, and torch finds {devices}."
                " Lower its sizes, or set learner.device=cpu; CUDA_VISIBLE_DEVICES may hide devices."
            )
        torch.cuda.set_device(rank)
    if not dist.is_initialized():
        # Weights are sent through other groups. Once a worker in one of them dies, torch has the process's first group,
        # which this one is, write down what all did, and end the process eight minutes later.
        os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")
        backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
        if "RANK" in os.environ and "MASTER_ADDR" in os.environ:
            dist.init_process_group(backend)
        else:
            store = dist.HashStore()  # type: ignore[attr-defined]  # torch exports it without saying so
            dist.init_process_group(backend, store=store, rank=0, world_size=1)
        if device == "cpu":
            atexit.register(_leave_ranks)
    return torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else torch.device(device)


def _leave_ranks() -> None:
    """Have gloo join its threads while Python still runs: at the process's end torch aborts it now and then."""
    if dist.is_initialized():
        dist.destroy_process_group()


def sum_over_ranks(value: float, device: torch.device) -> float:
    """Sum in float64 over all ranks. Collective."""
    total = torch.tensor(value, dtype=torch.float64, device=device)
    if dist.get_world_size() > 1:
        dist.all_reduce(total)
    return total.item()


def check_same_count(count: int, device: torch.device) -> None:
    """Assert that all ranks have as many micro-batches: else they would wait for each other for ever. Collective."""
    if dist.get_world_size() > 1:
        extremes = torch.tensor([count, -count], device=device)
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX)
        most, minus_least = extremes.tolist()
        assert most == -minus_least, f"ranks have between {-minus_least} and {most} micro-batches"
