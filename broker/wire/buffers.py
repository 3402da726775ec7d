"""Arrays <-> compressed bytes: tokens, and the experts that were chosen for them.

Unpacking any bytes ends in an array of the expected size or in a FrameError, and takes no more memory than that array.
"""

import threading
from typing import Annotated

import msgspec
import numpy as np
import zstandard
from msgspec import Meta
from numpy.typing import NDArray

from headway.broker.errors import FrameError
from headway.broker.schema import Experts

MAX_EXPERT_BYTES = 128 << 20
"""The most bytes of one array. 48 layers that choose 8 of at most 256 experts take 384 bytes a token: 350,000
tokens."""
MAX_EXPERTS = 1 << 15
"""The most experts of one layer, so that the learner may hold the choices as signed 16-bit integers."""


class ExpertsHead(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A frame's description of its `Experts`."""

    tokens: Annotated[int, Meta(ge=1, lt=1 << 31)]
    layers: Annotated[int, Meta(ge=1, lt=1 << 15)]
    per_token: Annotated[int, Meta(ge=1, lt=1 << 15)]
    itemsize: Annotated[int, Meta(ge=1, le=2)]
    compressed_bytes: Annotated[int, Meta(ge=0, lt=1 << 31)]

    @property
    def unpacked_bytes(self) -> int:
        """The bytes of the array."""
        return self.tokens * self.layers * self.per_token * self.itemsize


class _Zstd(threading.local):
    """Contexts of one thread, which are kept, since to make one takes longer than to pack a small frame."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(level=1)
        self.decompressor = zstandard.ZstdDecompressor()


_zstd = _Zstd()


def pack_tokens(*parts: NDArray[np.int32]) -> bytes:
    """Return the tokens compressed, as a plane of low 16 bits and one of high bytes."""
    tokens = np.concatenate(parts).astype("<i4", copy=False)
    planes = np.empty(3 * len(tokens), np.uint8)
    planes[: 2 * len(tokens)].view("<u2")[:] = tokens.view("<u2")[::2]
    planes[2 * len(tokens) :] = tokens.view(np.uint8)[2::4]
    return _zstd.compressor.compress(planes.data)


def unpack_tokens(compressed: memoryview, total: int) -> NDArray[np.int32]:
    """Return the tokens: [total]. Raises FrameError."""
    planes = _decompress(compressed, 3 * total, "token planes")
    tokens = np.frombuffer(planes, "<u2", total).astype(np.int32)
    high = np.frombuffer(planes, np.uint8, total, 2 * total)
    if high.any():  # vocabularies below 65,536 have none
        tokens |= high.astype(np.int32) << 16
    return tokens


def pack_experts(experts: Experts | None) -> tuple[ExpertsHead | None, bytes]:
    """Return head and compressed bytes of the array, in its own order: no compressor of this speed gains by another
    one. None: (None, b"")."""
    if experts is None:
        return None, b""
    flat = np.ascontiguousarray(experts, experts.dtype.newbyteorder("<")).reshape(-1).view(np.uint8)
    packed = _zstd.compressor.compress(flat.data)
    tokens, layers, per_token = experts.shape
    return ExpertsHead(tokens, layers, per_token, experts.itemsize, len(packed)), packed


def unpack_experts(head: ExpertsHead | None, compressed: memoryview) -> Experts | None:
    """Return the array, read-only: it is the largest part of a trajectory, and is not copied. Raises FrameError."""
    if head is None:
        return None
    if head.unpacked_bytes > MAX_EXPERT_BYTES:
        raise FrameError(f"experts of {head.unpacked_bytes} bytes; at most {MAX_EXPERT_BYTES} are allowed")
    content = _decompress(compressed, head.unpacked_bytes, "experts")
    shape = head.tokens, head.layers, head.per_token
    return np.frombuffer(content, np.uint8 if head.itemsize == 1 else "<u2").reshape(shape)


def check_experts(name: str, experts: Experts) -> None:
    """Raises FrameError unless the array's shape, type, size in bytes and experts (below `MAX_EXPERTS`) are allowed."""
    if experts.ndim != 3 or experts.dtype not in (np.uint8, np.uint16) or not experts.size:
        raise FrameError(
            f"{name}: experts of shape {experts.shape} and type {experts.dtype}; expected [tokens, layers, experts per"
            " token] as uint8 or uint16"
        )
    if experts.nbytes > MAX_EXPERT_BYTES:
        raise FrameError(
            f"{name}: experts of {experts.nbytes} bytes; at most {MAX_EXPERT_BYTES} are allowed. Lower"
            " sampling.max_new_tokens, or set algorithm.router_replay=false"
        )
    if experts.itemsize > 1 and experts.max() >= MAX_EXPERTS:
        raise FrameError(f"{name}: expert {experts.max()}; a layer may have {MAX_EXPERTS}, numbered from 0")


def _decompress(compressed: memoryview, size: int, what: str) -> bytes:
    """Return `size` decompressed bytes. The decompressor allocates the size that the frame states, so that is checked
    first."""
    try:
        stated = zstandard.frame_content_size(compressed)
        if stated != size:
            raise FrameError(f"{what} of {stated} bytes, not {size}")
        content = _zstd.decompressor.decompress(compressed, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise FrameError(f"{what} that do not decompress: {error}") from error
    if len(content) != size:
        raise FrameError(f"{what} of {len(content)} bytes, not {size}")
    return content
