"""Lossless deltas: each turns one version's buckets into those of the next, bit for bit.

A delta is one block after another, each of at most `BLOCK_ELEMENTS` elements of one width; together they cover every
tensor. A block is a header, the gaps between changed elements and the steps from their old values to the new ones, both
taken as unsigned integers of the element's width, so that NaNs and -0.0 are bits like any others. An update moves most
numbers to a neighbour, which is an integer step of one: hence steps, which compress better than new values.
A delta carries no layout: both sides take it from the tensor specs, which must be the same for both versions.

A bounded chain of deltas ends at the newest version: the learner extends it, and a worker that follows by pull takes
those that it needs. Each incarnation of the learner starts a chain of its own.
"""

import itertools
import logging
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import zstandard
from numpy.typing import NDArray

from headway.broker.errors import WeightSyncError
from headway.broker.schema import WeightVersion
from headway.broker.schema.weights import DeltaSpec, TensorSpec, WeightManifest
from headway.weightsync.limits import Deadline

from .buckets import DTYPES, digest_bytes
from .staging import StagedWeights

BLOCK_ELEMENTS = 1 << 20
"""Bounds what encoding and patching need beside the buckets: about 30 bytes an element."""

_HEADER = struct.Struct("<III")  # changed elements, bytes of the compressed gaps, bytes of the compressed steps
_UNSIGNED: dict[int, np.dtype[Any]] = {width: np.dtype(f"<u{width}") for width in (1, 2, 4, 8)}
_GAP = _UNSIGNED[4]
_LEVEL = 1

Elements = NDArray[np.unsignedinteger[Any]]


class _Block(NamedTuple):
    """Bytes [start, end) of a bucket, in elements of `width` bytes."""

    bucket: int
    start: int
    end: int
    width: int


def encode(base: StagedWeights, target: StagedWeights, deadline: Deadline) -> bytes | None:
    """Return the delta from `base` to `target`, or None where their layouts differ or it is no smaller than `target`.

    Raises WeightSyncError once the deadline is over.
    """
    if (base.tensors, base.sizes) != (target.tensors, target.sizes):
        return None
    compressor = zstandard.ZstdCompressor(level=_LEVEL)
    parts: list[bytes] = []
    nbytes = 0
    for block in _blocks(target.tensors):
        deadline.check(f"encoding a delta, {nbytes} bytes so far")
        parts += _encode_block(
            _elements(base.buckets[block.bucket], block), _elements(target.buckets[block.bucket], block), compressor
        )
        nbytes += sum(map(len, parts[-3:]))
        if nbytes >= target.nbytes:
            break
    return b"".join(parts) if nbytes < target.nbytes else None


def patch(buckets: Mapping[int, torch.Tensor], tensors: Sequence[TensorSpec], delta: bytes | memoryview) -> None:
    """Bring `buckets`, by index, from the delta's base to its version. This happens in place: pass copies of buckets
    that an engine reads.

    Buckets that are not given are passed over. `tensors` must have passed `check_manifest`. Raises WeightSyncError
    where the delta does not fit, whatever its bytes are; the buckets are then of no use. A delta that fits may still be
    one of other weights: compare the result's fingerprints.
    """
    decompressor = zstandard.ZstdDecompressor()
    rest = memoryview(delta)
    for block in _blocks(tensors):
        elements = _elements(buckets[block.bucket], block) if block.bucket in buckets else None
        rest = _patch_block(elements, rest, decompressor)
    if rest:
        raise WeightSyncError(f"a delta of {len(delta)} bytes goes on for {len(rest)} after its last block")


def by_bucket(tensors: Sequence[TensorSpec], delta: bytes | memoryview) -> dict[int, memoryview]:
    """Return the part of a delta that `patch` takes for each bucket, together with that bucket's tensors only.

    Raises WeightSyncError where the delta does not fit, or tensors of one bucket do not follow on each other.
    """
    parts: dict[int, memoryview] = {}
    rest = memoryview(delta)
    for bucket, blocks in itertools.groupby(_blocks(tensors), lambda block: block.bucket):
        after = rest
        for _ in blocks:
            after = after[_measured(after).end :]
        if bucket in parts:
            raise WeightSyncError(f"the tensors of bucket {bucket} do not follow on each other")
        parts[bucket] = rest[: len(rest) - len(after)]
        rest = after
    if rest:
        raise WeightSyncError(f"a delta of {len(delta)} bytes goes on for {len(rest)} after its last block")
    return parts


def _blocks(tensors: Sequence[TensorSpec]) -> Iterator[_Block]:
    """Yield the blocks of all tensors. Neighbours of one width share blocks; padding between them is always zero."""
    for (bucket, width), run in itertools.groupby(tensors, lambda spec: (spec.bucket, DTYPES[spec.dtype].itemsize)):
        specs = list(run)
        end = specs[-1].offset + specs[-1].nbytes
        for start in range(specs[0].offset, end, BLOCK_ELEMENTS * width):
            yield _Block(bucket, start, min(end, start + BLOCK_ELEMENTS * width), width)


def _elements(bucket: torch.Tensor, block: _Block) -> Elements:
    """Return the block's memory as a view of the bucket."""
    return bucket.numpy()[block.start : block.end].view(_UNSIGNED[block.width])


def _encode_block(old: Elements, new: Elements, compressor: zstandard.ZstdCompressor) -> tuple[bytes, bytes, bytes]:
    changed = np.flatnonzero(old != new)
    if not changed.size:
        return _HEADER.pack(0, 0, 0), b"", b""
    gaps = np.diff(changed, prepend=-1) - 1
    gap_bytes = compressor.compress(_planes(gaps.astype(_GAP)))
    step_bytes = compressor.compress(_planes(_zigzag(new[changed] - old[changed])))
    return _HEADER.pack(changed.size, len(gap_bytes), len(step_bytes)), gap_bytes, step_bytes


class _Measured(NamedTuple):
    """A block's header: the number of elements that change, and where in the block its steps begin and end."""

    changed: int
    steps_at: int
    end: int


def _measured(rest: memoryview) -> _Measured:
    """Read the header of the block with which `rest` begins."""
    if len(rest) < _HEADER.size:
        raise WeightSyncError(f"a delta ends after {len(rest)} bytes of a block's header of {_HEADER.size}")
    count, gap_bytes, step_bytes = _HEADER.unpack_from(rest)
    steps_at, end = _HEADER.size + gap_bytes, _HEADER.size + gap_bytes + step_bytes
    if end > len(rest) or (not count and end > _HEADER.size):
        raise WeightSyncError(
            f"a delta changes {count} elements by {gap_bytes} + {step_bytes} bytes, with {len(rest)} left"
        )
    return _Measured(count, steps_at, end)


def _patch_block(elements: Elements | None, rest: memoryview, decompressor: zstandard.ZstdDecompressor) -> memoryview:
    """Apply the first block of `rest` to `elements`, unless they are None. Returns the bytes after the block."""
    count, steps_at, end = _measured(rest)
    if count and elements is not None:
        if count > elements.size:
            raise WeightSyncError(f"a delta changes {count} of {elements.size} elements")
        gaps = _inflate(rest[_HEADER.size : steps_at], count, _GAP, decompressor)
        steps = _inflate(rest[steps_at:end], count, elements.dtype, decompressor)
        _step(elements, gaps, steps)
    return rest[end:]


def _step(elements: Elements, gaps: Elements, steps: Elements) -> None:
    changed = np.cumsum(gaps, dtype=np.int64) + np.arange(gaps.size)
    if changed[-1] >= elements.size:
        raise WeightSyncError(f"a delta changes element {changed[-1]} of a block of {elements.size}")
    elements[changed] += _unzigzag(steps)


def _inflate(
    compressed: memoryview, count: int, dtype: np.dtype[Any], decompressor: zstandard.ZstdDecompressor
) -> Elements:
    expected = count * dtype.itemsize
    try:
        # The decompressor allocates the size that the frame states, so that is checked first.
        stated = zstandard.frame_content_size(compressed)
        if stated != expected:
            raise WeightSyncError(f"a delta's block unpacks to {stated} bytes where {expected} belong")
        planes = decompressor.decompress(compressed, max_output_size=expected, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise WeightSyncError(f"a delta's block does not decompress: {error}") from error
    if len(planes) != expected:
        raise WeightSyncError(f"a delta's block unpacks to {len(planes)} bytes where {expected} belong")
    return np.frombuffer(planes, np.uint8).reshape(dtype.itemsize, count).T.copy().view(dtype).reshape(count)


def _planes(values: Elements) -> bytes:
    """Return all lowest bytes, then all second ones, and so on: the high ones are mostly alike and compress well."""
    return values.view(np.uint8).reshape(values.size, values.itemsize).T.tobytes()


def _zigzag(steps: Elements) -> Elements:
    """Return 0, -1, 1, -2 ... as 0, 1, 2, 3 ..., so that small steps in either direction have high bytes of zero."""
    signed = steps.view(f"<i{steps.itemsize}")
    return ((signed << 1) ^ (signed >> (8 * steps.itemsize - 1))).view(steps.dtype)


def _unzigzag(values: Elements) -> Elements:
    steps: Elements = (values >> 1) ^ np.negative(values & 1)
    return steps


logger = logging.getLogger(__name__)


class Delta(NamedTuple):
    """An encoded delta and its place in the manifest."""

    spec: DeltaSpec
    data: bytes


class DeltaChain:
    """At most `longest` deltas, which together are smaller than the weights themselves."""

    def __init__(self, longest: int) -> None:
        self._longest = longest
        self._newest: tuple[WeightVersion, StagedWeights] | None = None
        self._deltas: tuple[Delta, ...] = ()

    def extended(self, version: WeightVersion, staged: StagedWeights, deadline: Deadline) -> tuple[Delta, ...]:
        """Return the chain to `version`, empty where there is none. Changes nothing: see `advance`."""
        delta = self._encode(version, staged, deadline)
        return () if delta is None else _bounded((*self._deltas, delta), self._longest, staged.nbytes)

    def advance(self, version: WeightVersion, staged: StagedWeights | None, deltas: tuple[Delta, ...]) -> None:
        """Note that `version` was announced with `deltas`. The next delta starts from `staged`, if it is given."""
        self._newest = None if staged is None else (version, staged)
        self._deltas = deltas

    def _encode(self, version: WeightVersion, staged: StagedWeights, deadline: Deadline) -> Delta | None:
        if self._newest is None or not self._longest:
            return None
        base, base_staged = self._newest
        try:
            data = encode(base_staged, staged, deadline)
        except WeightSyncError as error:
            logger.warning(
                "Version %s is announced without deltas, those who follow by pull fetch all of it: %s", version, error
            )
            return None
        return None if data is None else Delta(DeltaSpec(base, version, len(data), digest_bytes(data)), data)


def chain_from(base: WeightVersion, manifest: WeightManifest) -> tuple[DeltaSpec, ...]:
    """Return the manifest's deltas from `base` to its version; empty where there is no such chain."""
    chain = tuple(itertools.dropwhile(lambda delta: delta.base != base, manifest.deltas))
    if not chain or chain[-1].version != manifest.version or any(delta.nbytes < 0 for delta in chain):
        return ()
    return () if any(a.version != b.base for a, b in itertools.pairwise(chain)) else chain


def _bounded(deltas: tuple[Delta, ...], longest: int, whole_bytes: int) -> tuple[Delta, ...]:
    """Return the newest of `deltas` within both bounds. A worker that would need more fetches the whole version."""
    kept = deltas[-longest:]
    while sum(delta.spec.nbytes for delta in kept) >= whole_bytes:
        kept = kept[1:]
    return kept
