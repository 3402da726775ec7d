"""Broadcast through a torch.distributed process group of its own, outside any default group.

It needs no `init_process_group` and does not touch a default group. Two facts shape this file. A gloo operation ends
only by success, its own timeout or a closed peer (`abort` does nothing). An NCCL operation ends by `abort`, which a
separate thread calls at the deadline, as the caller may by then wait for the whole device: an allocator that frees
does.

gloo listens as long as a group lives, accepts every connection, keeps it after the other end has gone, and ends the
process when it runs out of file descriptors. It needs the port only until its members are connected. This process
cannot close the port, as that would wake gloo for ever, but a socket filter can drop all packets that arrive for it.
"""

import ctypes
import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # torch's stubs do not re-export them
from torch.distributed.distributed_c10d import BroadcastOptions

from headway.broker.errors import WeightSyncError
from headway.weightsync.limits import Deadline

logger = logging.getLogger(__name__)
_DETECTING = threading.Lock()
_SO_ATTACH_FILTER = 26
_DROP_ALL = struct.pack("HBBI", 0x06, 0, 0, 0)
"""One instruction of a socket filter: return 0 bytes of the packet."""


class PortFilter:
    """The filter of a port that a library opens. Where another thread opens one at the same time, both are left alone,
    as it is not known which is the library's."""

    def __init__(self) -> None:
        self._inode = 0

    @contextmanager
    def detect(self) -> Iterator[None]:
        """Wrap the call that opens the port."""
        with _DETECTING:
            before = _listening()
            yield
            opened = _listening().keys() - before.keys()
        if len(opened) == 1:
            (self._inode,) = opened
        else:
            logger.debug("%d ports were opened at once: which one is ours is not known", len(opened))

    def drop_new_connections(self) -> None:
        """Drop all new connections; existing ones go on."""
        descriptor = _listening().get(self._inode)
        if descriptor is None:
            return
        program = ctypes.create_string_buffer(_DROP_ALL)
        with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as listener:  # not every system has filters
            listener.setsockopt(
                socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HxxxxxxP", 1, ctypes.addressof(program))
            )


def _listening() -> dict[int, int]:
    """Return the TCP sockets at which this process listens: {inode: file descriptor}."""
    found = {}
    with suppress(OSError):  # no /proc, or no descriptor left to read it
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):  # closed meanwhile, or not a socket
                if os.readlink(f"/proc/self/fd/{name}").startswith("socket:") and _is_listening(int(name)):
                    found[os.fstat(int(name)).st_ino] = int(name)
    return found


def _is_listening(descriptor: int) -> bool:
    with socket.socket(fileno=os.dup(descriptor)) as listener:
        is_tcp = listener.family in (socket.AF_INET, socket.AF_INET6)
        return is_tcp and bool(listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


_WAIT_S = 0.0005
_OVERDUE_S = 0.5
_SETTINGS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
}
"""Settings of torch's watchdog. Without them, when NCCL reports that a peer on another host died, the watchdog would
end this process, at once or eight minutes later, and the group could not be dropped for a minute. A group reads them
when it is made."""
_REMEDY = (
    "; between hosts NCCL_SOCKET_IFNAME names the network to take, and NCCL_DEBUG=INFO tells what NCCL tries, in the"
    " environments of learner and workers, which need the same NCCL_CUMEM_ENABLE"
)
_NEVER = timedelta(days=1)
"""The timeout of NCCL's own watchdog, which would end the process; the caller's deadline ends the group long before."""


class ProcessGroupTransport:
    """A formed group. Constructing it blocks until all ranks are there, or the deadline is over."""

    def __init__(self, name: str, store: Store, rank: int, size: int, interface: str, deadline: Deadline) -> None:
        self._kind = COLLECTIVES[name]
        self._device = _device_of(name)
        self._rank = rank
        self._name = name
        self._store = store  # torch keeps no store that is written in Python
        self._under_way = 0
        self._alarm: threading.Timer | None = None
        self._aborting = threading.Lock()
        try:
            self._backend = _open(name, PrefixStore("group", store), rank, size, interface, deadline)
            if self._kind.is_on_gpu:
                self._connect(deadline)
        except RuntimeError as error:  # torch raises nothing finer; DistStoreError is one too
            raise WeightSyncError(
                f"the {name} group of {size} processes could not be formed within {deadline.seconds:g} s: "
                f"{_first_line(error)}{self._kind.remedy}"
            ) from error

    def start(self, bucket: torch.Tensor, deadline: Deadline) -> Callable[[], None]:
        """See BroadcastGroupTransport. On a GPU the transfer waits for all work begun on the current stream."""
        what = f"{self._name} broadcast of {bucket.numel()} bytes"
        deadline.check(what)
        if bucket.numel() == 0:
            return _nothing
        backend = self._backend
        if backend is None:  # a worker leaves from another thread, as soon as the next group is there
            raise WeightSyncError(f"the {self._name} group was left")
        wire = bucket.to(self._device)
        with _translated(what, deadline):
            work = backend.broadcast([wire], _root_options(deadline))
        self._begin(backend, deadline)

        def finish() -> None:
            try:
                with _translated(what, deadline):
                    self._wait(work, backend, deadline)
            finally:
                self._end()
            if self._rank and wire is not bucket:
                bucket.copy_(wire)

        return finish

    def close(self) -> None:
        """Drop the connections: gloo closes them with the last reference, NCCL when told to."""
        backend, self._backend = self._backend, None
        if backend is not None and self._kind.is_on_gpu:
            self._abort(backend)

    def _connect(self, deadline: Deadline) -> None:
        """Connect a GPU's group now, while all ranks are known to be there. It connects in its first operation, in a
        call that no deadline ends, so that runs in a thread, which is abandoned if the call does not return."""
        backend, failed = self._backend, list[RuntimeError]()

        def connect() -> None:
            try:
                first = torch.zeros(1, dtype=torch.uint8, device=self._device)
                work = backend.broadcast([first], _root_options(deadline))
                while not work.is_completed() and not deadline.is_over():
                    time.sleep(_WAIT_S)
                if not work.is_completed():
                    raise RuntimeError("not all ranks took part")
            except RuntimeError as error:
                failed.append(error)

        connecting = threading.Thread(target=connect, name=f"weights-connect-{self._name}", daemon=True)
        connecting.start()
        connecting.join(deadline.remaining() + _OVERDUE_S)
        if connecting.is_alive():
            raise RuntimeError("a rank that had been there has not connected")
        if failed:
            raise failed[0]

    def _begin(self, backend: Any, deadline: Deadline) -> None:
        if self._kind.ends_by_abort and not self._under_way:
            self._alarm = threading.Timer(deadline.remaining(), self._abort, [backend])
            self._alarm.daemon = True
            self._alarm.start()
        self._under_way += 1

    def _end(self) -> None:
        self._under_way -= 1
        if self._alarm is not None and not self._under_way:
            self._alarm.cancel()

    def _wait(self, work: Any, backend: Any, deadline: Deadline) -> None:
        """Wait until the operation has ended. It polls, so that other threads run and Ctrl-C works."""
        while not work.is_completed():
            if self._kind.ends_by_abort and deadline.is_over():
                self._abort(backend)
                raise WeightSyncError(f"{self._name} broadcast not done within {deadline.seconds:g} s")
            time.sleep(_WAIT_S)
        work.wait()

    def _abort(self, backend: Any) -> None:
        with self._aborting:
            backend.abort()


def _device_of(name: str) -> torch.device:
    return torch.device("cuda" if COLLECTIVES[name].is_on_gpu else "cpu")


def _open(
    name: str, store: Store, rank: int, size: int, interface: str, deadline: Deadline
) -> Any:  # torch has no common type with `broadcast` for the three
    timeout = timedelta(seconds=max(0.001, deadline.remaining()))
    kind = backend_class(name)
    store.set_timeout(timeout)
    return COLLECTIVES[name].open(kind, store, rank, size, interface, timeout)


def _open_ucc(kind: Any, store: Store, rank: int, size: int, interface: str, timeout: timedelta) -> Any:
    return kind(store, rank, size, timeout)


def _open_nccl(kind: Any, store: Store, rank: int, size: int, interface: str, timeout: timedelta) -> Any:
    options = kind.Options()
    options._timeout = _NEVER
    with _without_watchdog():
        return kind(store, rank, size, options)


def _open_gloo(kind: Any, store: Store, rank: int, size: int, interface: str, timeout: timedelta) -> Any:
    options, port = kind._Options(), PortFilter()
    options._timeout = timeout
    with port.detect():
        # By default gloo would take the interface that the host's name resolves to, which is often loopback.
        options._devices = [kind.create_device(hostname=interface)]
    group = kind(store, rank, size, options)
    port.drop_new_connections()
    return group


@dataclass(frozen=True, kw_only=True)
class _Collective:
    """The differences between torch's process groups."""

    class_name: str
    """The name of the class in torch.distributed."""
    open: Callable[[Any, Store, int, int, str, timedelta], Any]
    """(class, store, rank, size, interface, timeout) -> the group."""
    is_on_gpu: bool = True
    """Whether it moves GPU memory, connects in its first operation, and must be told to drop its connections."""
    ends_by_abort: bool = False
    """No timeout of its own ends an operation."""
    remedy: str = ""
    """The things that a user should check where no group can be formed."""


COLLECTIVES = {
    "gloo": _Collective(class_name="ProcessGroupGloo", open=_open_gloo, is_on_gpu=False),
    "nccl": _Collective(class_name="ProcessGroupNCCL", open=_open_nccl, ends_by_abort=True, remedy=_REMEDY),
    "ucc": _Collective(class_name="ProcessGroupUCC", open=_open_ucc),
}


@contextmanager
def _without_watchdog() -> Iterator[None]:
    """A group that is made in this block does not end the process when a peer dies."""
    before = {name: os.environ.get(name) for name in _SETTINGS}
    os.environ.update(_SETTINGS)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def backend_class(name: str) -> Any:
    """Return torch's class for a backend. Raises WeightSyncError with the remedy where this process cannot use it."""
    kind = getattr(torch.distributed, COLLECTIVES[name].class_name, None)
    if kind is None:
        raise WeightSyncError(
            f"weights.transport is {name}, but torch {torch.__version__} was built without it; "
            "use weights.transport=gloo, or a torch build that has it"
        )
    if COLLECTIVES[name].is_on_gpu and not torch.cuda.is_available():
        raise WeightSyncError(
            f"weights.transport is {name}, which needs a GPU, and torch sees none; use weights.transport=gloo"
        )
    return kind


def _nothing() -> None:
    """Wait for the transfer of an empty bucket, which has nothing to send."""


@contextmanager
def _translated(what: str, deadline: Deadline) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise WeightSyncError(f"{what} failed (deadline {deadline.seconds:g} s): {_first_line(error)}") from error


def _root_options(deadline: Deadline) -> BroadcastOptions:
    options = BroadcastOptions()
    options.rootRank = 0
    options.rootTensor = 0
    options.timeout = timedelta(seconds=max(0.001, deadline.remaining()))
    return options


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
