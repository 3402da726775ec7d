"""Calls of every backend to the ranks that torchrun started, or to this process alone."""

import atexit
import os

import torch
import torch.distributed as dist

from headway.broker.errors import ConfigError


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
