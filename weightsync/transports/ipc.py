"""Broadcast within one machine through memory that all its processes map: GPU memory by CUDA IPC, else a file in RAM.

For a learner and engines that share a GPU, where NCCL has no place for two ranks, and for whoever has no use for
sockets. The learner copies each bucket into one buffer, the others copy it out; a count on either side says whose turn
it is.
"""

from collections.abc import Callable
from contextlib import ExitStack, suppress

import torch
from torch.distributed import Store  # type: ignore[attr-defined]  # torch's stubs do not re-export it

from broker.errors import WeightSyncError
from weightsync.deadline import Deadline
from weightsync.shared_memory import attach, gpu_handle, host_buffer

_WAIT_S = 0.0002
_SENT, _TAKEN, _CLOSED = "sent", "taken", "closed"


class IpcTransport:
    """A formed group. Its buffer is as large as the largest bucket so far, and goes with the group."""

    def __init__(self, store: Store, rank: int, size: int, deadline: Deadline) -> None:
        self._store = store
        self._rank = rank
        self._receivers = size - 1
        self._count = 0
        self._buffers = ExitStack()
        self._buffer: torch.Tensor | None = None
        try:
            self._store.add(_TAKEN, 0)
            self._await("formed", size, deadline, add=1)
        except RuntimeError as error:
            raise WeightSyncError(f"the ipc group of {size} processes could not be formed: {error}") from error

    def start(self, bucket: torch.Tensor, deadline: Deadline) -> Callable[[], None]:
        """See BroadcastGroupTransport. A receiver copies only at the end of it."""
        self._count += 1
        count = self._count
        what = f"ipc broadcast of {bucket.numel()} bytes"
        deadline.check(what)
        if self._rank:
            return lambda: _translated(what, lambda: self._receive(bucket, count, deadline))
        _translated(what, lambda: self._send(bucket, count, deadline))
        return lambda: _translated(what, lambda: self._await_taken(count, deadline))

    def close(self) -> None:
        """Tell the others and let go of the buffer."""
        with suppress(RuntimeError):  # the store's process is gone, and nobody is left to tell
            self._store.set(_CLOSED, "")
        self._buffer = None
        self._buffers.close()

    def _send(self, bucket: torch.Tensor, count: int, deadline: Deadline) -> None:
        self._await_taken(count - 1, deadline)
        buffer = self._buffer
        if buffer is None or buffer.numel() < bucket.numel() or buffer.device != bucket.device:
            buffer = self._buffer = self._shared(bucket)
        buffer[: bucket.numel()].copy_(bucket)
        _finish(buffer)
        self._store.add(_SENT, 1)

    def _await_taken(self, count: int, deadline: Deadline) -> None:
        self._await(_TAKEN, count * self._receivers, deadline)

    def _receive(self, bucket: torch.Tensor, count: int, deadline: Deadline) -> None:
        self._await(_SENT, count, deadline)
        buffer = self._buffer  # `close` may be called meanwhile
        if buffer is None or self._store.check([_moved(self._rank, count)]):
            buffer = self._buffer = attach(self._store.get(_moved(self._rank, count)))
        bucket.copy_(buffer[: bucket.numel()])
        _finish(buffer)
        self._store.add(_TAKEN, 1)

    def _shared(self, bucket: torch.Tensor) -> torch.Tensor:
        """A buffer that holds `bucket`; each receiver finds a handle of its own, as CUDA counts who has let go."""
        if bucket.is_cuda:
            buffer = torch.empty_like(bucket)
            handles = [gpu_handle(buffer) for _ in range(self._receivers)]
        else:
            self._buffers.close()
            buffer, handle = self._buffers.enter_context(host_buffer(bucket.numel()))
            handles = [handle] * self._receivers
        for receiver, handle in enumerate(handles, 1):
            self._store.set(_moved(receiver, self._count), handle)  # type: ignore[arg-type]  # it takes bytes too
        return buffer

    def _await(self, key: str, count: int, deadline: Deadline, add: int = 0) -> None:
        while self._store.add(key, add) < count:
            add = 0
            if self._store.check([_CLOSED]):
                raise WeightSyncError("the ipc group was closed by another member")
            deadline.check(f"ipc group, waiting for {key}")
            deadline.pause(_WAIT_S)


def _translated(what: str, act: Callable[[], None]) -> None:
    try:
        act()
    except RuntimeError as error:
        raise WeightSyncError(f"{what} failed: {error}") from error


def _moved(rank: int, count: int) -> str:
    return f"buffer/{rank}/{count}"


def _finish(tensor: torch.Tensor) -> None:
    """Until the copy is there for other processes to see."""
    if tensor.is_cuda:
        torch.cuda.current_stream(tensor.device).synchronize()
