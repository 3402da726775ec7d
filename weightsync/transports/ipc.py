"""Broadcast within one machine through memory that all its processes map: GPU memory by CUDA IPC, else a file in RAM.

For a learner and engines that share a GPU, on which NCCL does not allow two ranks, and for hosts on which no ports may
be opened. The learner copies each bucket into one buffer, and the other members copy it out. Through a Unix socket each
side tells the other when the buffer is its to use; a closed socket says that it is gone. While the group is formed the
socket lies in a directory that only its user can enter.
"""

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from tempfile import TemporaryDirectory

import torch
from torch.distributed import Store  # type: ignore[attr-defined]  # torch's stubs do not re-export it

from headway.broker.errors import WeightSyncError
from headway.weightsync.limits import Deadline
from headway.weightsync.tensors.shared_memory import attach, gpu_handle, host_buffer

_POLL_S = 0.1
_SAME, _MOVED, _TAKEN, _FORMED = b"=", b"+", b"t", b"f"
_MAX_MESSAGE_BYTES = 4096


class IpcTransport:
    """A formed group. Its buffer is as large as the largest bucket so far, and is freed with the group."""

    def __init__(self, store: Store, rank: int, size: int, deadline: Deadline) -> None:
        self._rank = rank
        self._count = 0
        self._buffers = ExitStack()
        self._buffer: torch.Tensor | None = None
        try:
            self._peers = _accepted(store, size - 1, deadline) if rank == 0 else [_connected(store, deadline)]
        except (RuntimeError, OSError) as error:  # the store raises RuntimeError
            raise WeightSyncError(f"the ipc group of {size} processes could not be formed: {error}") from error
        self._taken = [0] * len(self._peers)

    def start(self, bucket: torch.Tensor, deadline: Deadline) -> Callable[[], None]:
        """See BroadcastGroupTransport. A receiver copies only in the returned function."""
        self._count += 1
        count = self._count
        what = f"ipc broadcast of {bucket.numel()} bytes"
        deadline.check(what)
        if self._rank:
            return lambda: self._receive(bucket, deadline, what)
        self._send(bucket, count, deadline, what)
        return lambda: self._await_taken(count, deadline, what)

    def close(self) -> None:
        """Close the sockets, which tells the other members, and let go of the buffer."""
        for peer in self._peers:
            with suppress(OSError):  # the peer is gone
                peer.shutdown(socket.SHUT_RDWR)
            peer.close()
        self._buffer = None
        self._buffers.close()

    def _send(self, bucket: torch.Tensor, count: int, deadline: Deadline, what: str) -> None:
        self._await_taken(count - 1, deadline, what)
        buffer, messages = self._buffer, [_SAME] * len(self._peers)
        if buffer is None or buffer.numel() < bucket.numel() or buffer.device != bucket.device:
            buffer, handles = self._shared(bucket)
            self._buffer, messages = buffer, [_MOVED + handle for handle in handles]
        buffer[: bucket.numel()].copy_(bucket)
        _finish(buffer)
        with _peer_errors(what):
            for peer, message in zip(self._peers, messages, strict=True):
                peer.send(message)

    def _await_taken(self, count: int, deadline: Deadline, what: str) -> None:
        for number, peer in enumerate(self._peers):
            while self._taken[number] < count:
                _receive_message(peer, deadline, what)
                self._taken[number] += 1

    def _receive(self, bucket: torch.Tensor, deadline: Deadline, what: str) -> None:
        message = _receive_message(self._peers[0], deadline, what)
        buffer = self._buffer  # kept here, as `close` may be called meanwhile
        if buffer is None or message != _SAME:
            buffer = self._buffer = attach(message.removeprefix(_MOVED))
        if buffer.numel() < bucket.numel():
            raise WeightSyncError(f"{what}: the learner's buffer has {buffer.numel()} bytes only")
        bucket.copy_(buffer[: bucket.numel()])
        _finish(buffer)
        with _peer_errors(what):
            self._peers[0].send(_TAKEN)

    def _shared(self, bucket: torch.Tensor) -> tuple[torch.Tensor, list[bytes]]:
        """Return a buffer that holds `bucket`, and a handle for each receiver: CUDA counts releases by handle."""
        if bucket.is_cuda:
            buffer = torch.empty_like(bucket)
            return buffer, [gpu_handle(buffer) for _ in self._peers]
        self._buffers.close()
        buffer, handle = self._buffers.enter_context(host_buffer(bucket.numel()))
        return buffer, [handle] * len(self._peers)


def _accepted(store: Store, receivers: int, deadline: Deadline) -> list[socket.socket]:
    """Accept a connection from each receiver, tell all of them that the group is formed, and return the connections."""
    with TemporaryDirectory(prefix="headway-") as directory, _socket() as listener, _opened(directory) as place:
        listener.bind(f"/proc/self/fd/{place}/s")  # the directory's own path may be too long for a socket's name
        listener.listen(receivers)
        store.set("socket", f"/proc/{os.getpid()}/fd/{place}/s")
        peers: list[socket.socket] = []
        while len(peers) < receivers:
            with suppress(TimeoutError):
                peers.append(listener.accept()[0])
                peers[-1].settimeout(_POLL_S)
            deadline.check(f"an ipc group of which {len(peers)} of {receivers} members are there")
    for peer in peers:
        peer.send(_FORMED)
    return peers


def _connected(store: Store, deadline: Deadline) -> socket.socket:
    """Return a connection to the learner, once all members are there."""
    store.wait(["socket"], timedelta(seconds=deadline.remaining()))
    path = store.get("socket").decode()
    peer = _socket()
    try:
        peer.connect(path)
        _receive_message(peer, deadline, "an ipc group that forms")
    except BaseException:
        peer.close()
        raise
    return peer


def _socket() -> socket.socket:
    """Return a socket for whole messages whose calls time out soon, so that the caller can check its deadline."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made.settimeout(_POLL_S)
    return made


@contextmanager
def _opened(directory: str) -> Iterator[int]:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _receive_message(peer: socket.socket, deadline: Deadline, what: str) -> bytes:
    """Return the next message from `peer`. Raises WeightSyncError where it has closed, or the deadline is over."""
    while True:
        with _peer_errors(what):
            try:
                message = peer.recv(_MAX_MESSAGE_BYTES)
            except TimeoutError:
                deadline.check(what)
                continue
        if not message:
            raise WeightSyncError(f"{what}: the ipc group was closed by another member")
        return message


@contextmanager
def _peer_errors(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise WeightSyncError(f"{what}: the ipc group was closed by another member ({error})") from error


def _finish(tensor: torch.Tensor) -> None:
    """Wait until other processes can read the copy."""
    if tensor.is_cuda:
        torch.cuda.current_stream(tensor.device).synchronize()
