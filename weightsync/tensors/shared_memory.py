"""Memory that several processes of one machine map: host memory as a file in RAM, the bytes of a file that is there
already, GPU memory by CUDA IPC.

The process that makes a buffer sends its handle, a few bytes. A process that attaches it has the same memory, and must
be told when it may read. GPU memory lasts until both processes have let go of it. The file in RAM never has a name, so
it is gone with the last process that maps it, however that process ends; others reach it through its maker's
/proc/PID/fd.
"""

import mmap
import os
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import IO, Any

import msgspec
import torch

from headway.broker.errors import NoRoomError, WeightSyncError

IN_RAM = "/dev/shm"


class _HostHandle(msgspec.Struct, frozen=True, array_like=True, tag="host"):
    path: str
    nbytes: int
    device: int
    inode: int
    """The file's inode: in another container the same path may lead to another file."""
    is_private: bool
    """Whether a process only reads it: what it writes there reaches neither the file nor another process."""


class _GpuHandle(msgspec.Struct, frozen=True, array_like=True, tag="gpu"):
    """The values that torch needs to map a storage of another process."""

    uuid: str
    """The GPU's UUID: its number differs between processes that see different GPUs."""
    memory: bytes
    nbytes: int
    offset: int
    counter: bytes
    counter_offset: int
    event: bytes
    waits_for_event: bool


_decode = msgspec.msgpack.Decoder(_HostHandle | _GpuHandle).decode


_attachable: dict[int, bytes] = {}
"""The handles of memory that `attachable_memory` and `attachable_file` have returned, by its address here."""


@contextmanager
def host_buffer(nbytes: int) -> Iterator[tuple[torch.Tensor, bytes]]:
    """Yield uint8 host memory and its handle. After the block no process can attach it; those that have keep it.

    Raises NoRoomError.
    """
    with _file(nbytes) as file:
        yield _bytes_of(_mapped(file.fileno(), nbytes), nbytes), _handle(file, nbytes)


def attachable_memory(nbytes: int) -> torch.Tensor:
    """Return uint8 host memory that processes of this machine can attach by its `handle_of`, for as long as a tensor of
    it lives here. Raises NoRoomError. Every page is written once, which takes a while for gigabytes."""
    if not os.path.isdir(IN_RAM):
        raise NoRoomError(f"there is no {IN_RAM}")
    with ExitStack() as until_forgotten:
        file = until_forgotten.enter_context(_file(nbytes))
        return _remembered(_mapped(file.fileno(), nbytes), _handle(file, nbytes), nbytes, until_forgotten)


def attachable_file(path: str | os.PathLike[str]) -> torch.Tensor:
    """Return a file's bytes, as uint8, which processes of this machine can attach like `attachable_memory`. Nothing is
    read until it is used, and writes reach neither the file nor another process. If the file is cut off later, a
    process that reads beyond its end dies. Raises OSError, and NoRoomError where it cannot be mapped, as an empty
    one."""
    with ExitStack() as until_forgotten:
        file = until_forgotten.enter_context(open(path, "rb"))
        nbytes = os.fstat(file.fileno()).st_size
        memory = _mapped(file.fileno(), nbytes, is_private=True)
        return _remembered(memory, _handle(file, nbytes, is_private=True), nbytes, until_forgotten)


def _remembered(memory: mmap.mmap, handle: bytes, nbytes: int, opened: ExitStack) -> torch.Tensor:
    """Return the mapped bytes, whose handle is known and whose file stays open until the last tensor of them is
    gone."""
    buffer = _bytes_of(memory, nbytes)
    address = buffer.untyped_storage().data_ptr()
    _attachable[address] = handle
    weakref.finalize(memory, _forget, address, handle, opened.pop_all())
    return buffer


def handle_of(tensor: torch.Tensor) -> bytes | None:
    """Return the handle of the memory in which a tensor lies, from the beginning of its storage; None unless that is
    of `attachable_memory` or `attachable_file`."""
    return None if tensor.is_cuda else _attachable.get(tensor.untyped_storage().data_ptr())


def _forget(address: int, handle: bytes, opened: ExitStack) -> None:
    if _attachable.get(address) == handle:  # other memory may have come to lie there
        del _attachable[address]
    opened.close()


def gpu_handle(buffer: torch.Tensor) -> bytes:
    """Return the handle of a GPU tensor's whole storage, which must outlive its use by other processes."""
    storage: Any = buffer.untyped_storage()
    _, memory, nbytes, offset, counter, counter_offset, event, waits = storage._share_cuda_()
    handle = _GpuHandle(_uuid(buffer.device), memory, nbytes, offset, counter, counter_offset, event, waits)
    return msgspec.msgpack.encode(handle)


def attach(handle: bytes) -> torch.Tensor:
    """Return the same memory as a flat uint8 tensor. Raises WeightSyncError where this process cannot reach it."""
    try:
        decoded = _decode(handle)
    except msgspec.MsgspecError as error:
        raise WeightSyncError(
            f"{len(handle)} bytes are no handle of shared memory ({error}): learner and workers must run the same "
            "version of Headway"
        ) from error
    return _attach_host(decoded) if isinstance(decoded, _HostHandle) else _attach_gpu(decoded)


def _attach_host(handle: _HostHandle) -> torch.Tensor:
    try:
        descriptor = os.open(handle.path, (os.O_RDONLY if handle.is_private else os.O_RDWR) | os.O_CLOEXEC)
    except (OSError, ValueError) as error:  # ValueError: a path with a zero in it
        raise WeightSyncError(_unreachable(handle, str(error))) from error
    try:
        status = os.fstat(descriptor)
        if (status.st_dev, status.st_ino) != (handle.device, handle.inode):
            raise WeightSyncError(_unreachable(handle, "it leads to another file"))
        if not 0 <= handle.nbytes <= status.st_size:
            raise WeightSyncError(_unreachable(handle, f"it has {status.st_size} bytes, promised were {handle.nbytes}"))
        return _bytes_of(_mapped(descriptor, handle.nbytes, handle.is_private), handle.nbytes)
    finally:
        os.close(descriptor)


def _unreachable(handle: _HostHandle, why: str) -> str:
    return (
        f"{handle.path} cannot be mapped here ({why}): its writer is gone, or runs on another machine, as another user "
        "or in a container with processes of its own (share them: --pid, shareProcessNamespace)"
    )


def _attach_gpu(handle: _GpuHandle) -> torch.Tensor:
    device = _device(handle.uuid)
    try:
        storage = _shared_storage(handle, device)
    except RuntimeError as error:  # torch has no finer class
        raise WeightSyncError(
            f"{handle.nbytes} bytes of GPU {handle.uuid} cannot be mapped here "
            f"({str(error).partition(chr(10))[0]}): their writer is gone, or runs in a container with processes of its "
            "own (share them: --pid, shareProcessNamespace, --ipc)"
        ) from error
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


def _shared_storage(handle: _GpuHandle, device: torch.device) -> Any:
    with torch.cuda.device(device):
        return torch.UntypedStorage._new_shared_cuda(
            device.index,
            handle.memory,
            handle.nbytes,
            handle.offset,
            handle.counter,
            handle.counter_offset,
            handle.event,
            handle.waits_for_event,
        )


def _device(uuid: str) -> torch.device:
    for index in range(torch.cuda.device_count()):
        if _uuid(torch.device("cuda", index)) == uuid:
            return torch.device("cuda", index)
    raise WeightSyncError(f"this process does not see GPU {uuid}: its memory belongs to a process that does")


def _uuid(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)


@contextmanager
def _file(nbytes: int) -> Iterator[IO[bytes]]:
    """Yield an open file in RAM without a name, of at least one byte. Raises NoRoomError."""
    directory = IN_RAM if os.path.isdir(IN_RAM) else tempfile.gettempdir()
    with tempfile.TemporaryFile(dir=directory) as file:
        _reserve(file.fileno(), nbytes, directory)
        yield file


def _handle(file: IO[bytes], nbytes: int, is_private: bool = False) -> bytes:
    status = os.fstat(file.fileno())
    path = f"/proc/{os.getpid()}/fd/{file.fileno()}"
    return msgspec.msgpack.encode(_HostHandle(path, nbytes, status.st_dev, status.st_ino, is_private))


def _reserve(descriptor: int, nbytes: int, directory: str) -> None:
    """Reserve all of the file now: a write to unreserved pages of a full file system kills the process."""
    try:
        os.posix_fallocate(descriptor, 0, max(1, nbytes))
    except (OSError, OverflowError) as error:
        raise NoRoomError(
            f"no room for {nbytes} bytes of weights in {directory} ({error}); give it more (in a container: --shm-size)"
        ) from error


def _mapped(descriptor: int, nbytes: int, is_private: bool = False) -> mmap.mmap:
    """Map a file, at least its first byte, as nothing can be mapped of none."""
    try:
        return mmap.mmap(descriptor, max(1, nbytes), access=mmap.ACCESS_COPY if is_private else mmap.ACCESS_WRITE)
    except (OSError, ValueError) as error:  # ValueError: the file is shorter
        raise NoRoomError(f"{nbytes} bytes of weights cannot be mapped ({error})") from error


def _bytes_of(memory: mmap.mmap, nbytes: int) -> torch.Tensor:
    return torch.frombuffer(memory, dtype=torch.uint8)[:nbytes]
