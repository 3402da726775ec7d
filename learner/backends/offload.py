"""A model leaves its device's memory to others for a while: its tensors lie in host memory, their storages are empty.

Storages are emptied, not tensors, so all views of them (FSDP's padded shards, Megatron's buffers, moments) are right
again afterwards. On a CPU the same is done, so that code which touches a tensor meanwhile fails there, too.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

CHUNK_BYTES = 1 << 28
"""Host memory is pinned in pieces of this size: torch rounds each up to a power of two."""


class _Piece(NamedTuple):
    """A run of a storage's bytes, and its place in host memory."""

    storage: int
    start: int
    end: int
    chunk: int
    offset: int


class HostOffload:
    """The host memory of one model, which is pinned once and kept for the next time."""

    def __init__(self) -> None:
        self._chunks: list[torch.Tensor] = []

    @contextmanager
    def away(self, tensors: Iterable[torch.Tensor], device: torch.device) -> Iterator[None]:
        """Free the memory on `device` of those `tensors` that lie there while the context is open. Afterwards they are
        back, at other addresses, unless the body raised."""
        storages = _storages(tensors, device)
        sizes = [storage.nbytes() for storage in storages]
        pieces = list(_pieces(sizes))
        self._reserve(sum(sizes), is_pinned=device.type == "cuda")
        flat = [_bytes(storage, device) for storage in storages]
        for piece in pieces:
            self._host(piece).copy_(flat[piece.storage][piece.start : piece.end], non_blocking=True)
        _finish(device)
        del flat
        for storage in storages:
            storage.resize_(0)
        if device.type == "cuda":
            torch.cuda.empty_cache()
        yield
        for storage, size in zip(storages, sizes, strict=True):
            storage.resize_(size)
        flat = [_bytes(storage, device) for storage in storages]
        for piece in pieces:
            flat[piece.storage][piece.start : piece.end].copy_(self._host(piece), non_blocking=True)
        _finish(device)

    def _reserve(self, nbytes: int, *, is_pinned: bool) -> None:
        while len(self._chunks) * CHUNK_BYTES < nbytes:
            self._chunks.append(torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=is_pinned))

    def _host(self, piece: _Piece) -> torch.Tensor:
        return self._chunks[piece.chunk][piece.offset : piece.offset + piece.end - piece.start]


def _storages(tensors: Iterable[torch.Tensor], device: torch.device) -> list[torch.UntypedStorage]:
    """The storages of the tensors on `device`, each once even if several tensors share it."""
    found = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage()
        for tensor in tensors
        if tensor.device.type == device.type
    }
    return [storage for storage in found.values() if storage.nbytes()]


def _pieces(sizes: Sequence[int]) -> Iterator[_Piece]:
    """Lay storages of these sizes one after another, and cut them where chunks end."""
    position = 0
    for storage, size in enumerate(sizes):
        start = 0
        while start < size:
            chunk, offset = divmod(position, CHUNK_BYTES)
            end = min(size, start + CHUNK_BYTES - offset)
            yield _Piece(storage, start, end, chunk, offset)
            position += end - start
            start = end


def _bytes(storage: torch.UntypedStorage, device: torch.device) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
