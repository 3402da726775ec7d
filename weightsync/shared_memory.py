"""Memory that several processes of one machine look at: host memory as a file in RAM, GPU memory by CUDA IPC.

Who makes a buffer sends its handle, a few bytes; who attaches it has the same memory, and must be told when it may be
read. GPU memory stays there until both have let go of it.
"""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import torch

from broker.errors import WeightSyncError

IN_RAM = "/dev/shm"


class _HostHandle(msgspec.Struct, frozen=True, array_like=True, tag="host"):
    path: str
    nbytes: int


class _GpuHandle(msgspec.Struct, frozen=True, array_like=True, tag="gpu"):
    """What torch needs to map a storage of another process."""

    uuid: str
    """Of the GPU: processes count the GPUs that they see."""
    memory: bytes
    nbytes: int
    offset: int
    counter: bytes
    counter_offset: int
    event: bytes
    waits_for_event: bool


_decode = msgspec.msgpack.Decoder(_HostHandle | _GpuHandle).decode


@contextmanager
def host_buffer(nbytes: int) -> Iterator[tuple[torch.Tensor, bytes]]:
    """uint8 host memory and its handle. Afterwards nobody can attach it any more; those who did keep it."""
    directory = IN_RAM if os.path.isdir(IN_RAM) else None
    descriptor, path = tempfile.mkstemp(prefix="headway-weights-", dir=directory)
    try:
        _reserve(descriptor, nbytes, path)
        yield _mapped(path, nbytes), msgspec.msgpack.encode(_HostHandle(path, nbytes))
    finally:
        os.close(descriptor)
        with suppress(FileNotFoundError):
            os.unlink(path)


def gpu_handle(buffer: torch.Tensor) -> bytes:
    """The handle of a GPU tensor's whole storage, which must outlive its use by others."""
    storage: Any = buffer.untyped_storage()
    _, memory, nbytes, offset, counter, counter_offset, event, waits = storage._share_cuda_()
    handle = _GpuHandle(_uuid(buffer.device), memory, nbytes, offset, counter, counter_offset, event, waits)
    return msgspec.msgpack.encode(handle)


def attach(handle: bytes) -> torch.Tensor:
    """The same memory as a flat uint8 tensor. Raises WeightSyncError where it cannot be reached from here."""
    match _decode(handle):
        case _HostHandle(path, nbytes):
            if not Path(path).exists():
                raise WeightSyncError(f"{path} is not on this machine, or gone: its writer runs elsewhere")
            return _mapped(path, nbytes)
        case gpu:
            return _attach_gpu(gpu)


def _attach_gpu(handle: _GpuHandle) -> torch.Tensor:
    device = _device(handle.uuid)
    with torch.cuda.device(device):
        storage = torch.UntypedStorage._new_shared_cuda(
            device.index,
            handle.memory,
            handle.nbytes,
            handle.offset,
            handle.counter,
            handle.counter_offset,
            handle.event,
            handle.waits_for_event,
        )
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


def _device(uuid: str) -> torch.device:
    for index in range(torch.cuda.device_count()):
        if _uuid(torch.device("cuda", index)) == uuid:
            return torch.device("cuda", index)
    raise WeightSyncError(f"this process does not see GPU {uuid}: its memory belongs to a process that does")


def _uuid(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)


def _reserve(descriptor: int, nbytes: int, path: str) -> None:
    """All of it now: a write into a full file system that was not reserved kills the process."""
    try:
        os.posix_fallocate(descriptor, 0, max(1, nbytes))
    except OSError as error:
        raise WeightSyncError(
            f"no room for {nbytes} bytes of weights in {Path(path).parent} ({error}); give it more (in a container: "
            "--shm-size)"
        ) from error


def _mapped(path: str, nbytes: int) -> torch.Tensor:
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8)
    return torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8)
