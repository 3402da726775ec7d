"""Broadcast through a torch.distributed process group of its own, outside any default group.

It needs no `init_process_group` and leaves one that exists alone. Two facts shape this file: a gloo operation
ends only by success, its own timeout or a closed peer (`abort` does nothing); one of NCCL ends by `abort`.
"""

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # torch's stubs do not re-export them
from torch.distributed.distributed_c10d import BroadcastOptions

from broker.errors import WeightSyncError
from weightsync.deadline import Deadline

CollectiveName = Literal["gloo", "nccl", "ucc"]
_WAIT_S = 0.0005
_ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_NEVER = timedelta(days=1)
"""NCCL's own watchdog ends the process when its timeout is over: ours comes first, and ends the group."""


class ProcessGroupTransport:
    """A formed group; constructing it blocks until all ranks are there."""

    def __init__(
        self, name: CollectiveName, store: Store, rank: int, size: int, interface: str, deadline: Deadline
    ) -> None:
        self._device = torch.device("cpu" if name == "gloo" else "cuda")
        self._rank = rank
        self._name = name
        try:
            self._backend = _open(name, PrefixStore("group", store), rank, size, interface, deadline)
        except RuntimeError as error:  # torch raises nothing finer; DistStoreError is one too
            raise WeightSyncError(
                f"the {name} group of {size} processes could not be formed within {deadline.seconds:g} s: "
                f"{_first_line(error)}"
            ) from error

    def broadcast(self, bucket: torch.Tensor, deadline: Deadline) -> None:
        """See BroadcastGroupTransport. Blocks without holding the interpreter."""
        deadline.check(f"{self._name} broadcast of {bucket.numel()} bytes")
        backend = self._backend
        if backend is None:  # a worker leaves from another thread, as soon as the next group is there
            raise WeightSyncError(f"the {self._name} group was left")
        if bucket.numel() == 0:
            return
        backend = self._backend
        if backend is None:
            raise WeightSyncError(f"the {self._name} group was left in the middle of a transfer")
        wire = bucket.to(self._device)
        try:
            _wait(backend.broadcast([wire], _root_options(deadline)), backend, deadline)
        except RuntimeError as error:
            raise WeightSyncError(
                f"{self._name} broadcast of {bucket.numel()} bytes failed (deadline {deadline.seconds:g} s): "
                f"{_first_line(error)}"
            ) from error
        if self._rank and wire is not bucket:
            bucket.copy_(wire)

    def close(self) -> None:
        """Drop the connections: gloo closes them with the last reference, NCCL when told to."""
        backend, self._backend = self._backend, None
        if backend is not None and self._name != "gloo":
            backend.abort()


def _open(
    name: CollectiveName, store: Store, rank: int, size: int, interface: str, deadline: Deadline
) -> Any:  # torch gives the three no common type with `broadcast`
    timeout = timedelta(seconds=max(0.001, deadline.remaining()))
    kind = backend_class(name)
    store.set_timeout(timeout)
    if name == "ucc":
        return kind(store, rank, size, timeout)
    options = kind._Options() if name == "gloo" else kind.Options()
    options._timeout = timeout if name == "gloo" else _NEVER
    if name == "gloo":
        # Without it gloo would take the interface that the host's name resolves to, which is often loopback.
        options._devices = [kind.create_device(hostname=interface)]
    with _without_watchdog():
        return kind(store, rank, size, options)


@contextmanager
def _without_watchdog() -> Iterator[None]:
    """NCCL's watchdog ends the process for a peer that died; the group reads the setting when it is made."""
    before = os.environ.get(_ERROR_HANDLING)
    os.environ[_ERROR_HANDLING] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_ERROR_HANDLING]
        else:
            os.environ[_ERROR_HANDLING] = before


def backend_class(name: CollectiveName) -> Any:
    """torch's class. Raises WeightSyncError with the remedy where this process cannot use it."""
    kind = getattr(torch.distributed, f"ProcessGroup{name.capitalize() if name == 'gloo' else name.upper()}", None)
    if kind is None:
        raise WeightSyncError(
            f"weights.transport is {name}, but torch {torch.__version__} was built without it; "
            "use weights.transport=gloo, or a torch build that has it"
        )
    if name != "gloo" and not torch.cuda.is_available():
        raise WeightSyncError(
            f"weights.transport is {name}, which needs a GPU, and torch sees none; use weights.transport=gloo"
        )
    return kind


def _root_options(deadline: Deadline) -> BroadcastOptions:
    options = BroadcastOptions()
    options.rootRank = 0
    options.rootTensor = 0
    options.timeout = timedelta(seconds=max(0.001, deadline.remaining()))
    return options


def _wait(work: Any, backend: Any, deadline: Deadline) -> None:
    """Until the operation ended. Polling keeps Ctrl-C alive and lets NCCL be aborted."""
    while not work.is_completed():
        if backend.name() == "nccl" and deadline.is_over():
            backend.abort()
            raise WeightSyncError(f"nccl broadcast not done within {deadline.seconds:g} s")
        time.sleep(_WAIT_S)
    work.wait()


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def local_address(host: str, port: int, timeout_s: float) -> str:
    """The address that this machine uses towards host:port. Raises OSError where nobody listens there."""
    with socket.create_connection((host, port), timeout=timeout_s) as connection:
        return str(connection.getsockname()[0])
