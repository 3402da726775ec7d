"""Deltas restore every bit, and damaged or hostile ones are refused before they can do harm."""

import contextlib
import itertools
import math
import threading
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.broker.errors import WeightSyncError
from headway.broker.schema import WeightVersion
from headway.weightsync.limits import Deadline
from headway.weightsync.tensors import deltas
from headway.weightsync.tensors.buckets import DTYPES
from headway.weightsync.tensors.deltas import Delta, DeltaChain, by_bucket, encode, patch
from headway.weightsync.tensors.staging import StagedWeights, stage

FOREVER = Deadline(math.inf)
V = [WeightVersion(1, step) for step in range(12)]


def random_bits(nbytes: int, seed: int) -> torch.Tensor:
    """Return elements of every bit pattern: NaNs with payloads, both zeros, subnormal numbers."""
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def staged(raw: list[tuple[torch.dtype, torch.Tensor]]) -> StagedWeights:
    """Stage the tensors in buckets of 1,024 bytes; only larger tensors have larger ones."""
    return stage([(str(index), data.view(dtype)) for index, (dtype, data) in enumerate(raw)], 1024)


def changed(data: torch.Tensor, width: int, share: float, seed: int) -> torch.Tensor:
    """Return new bits for about `share` of the elements."""
    mask = np.random.default_rng(seed).random(data.numel() // width) < share
    fresh = random_bits(data.numel(), seed + 1).view(-1, width)
    return torch.where(torch.from_numpy(mask)[:, None], fresh, data.view(-1, width)).flatten()


def apply(base: StagedWeights, links: list[bytes]) -> tuple[torch.Tensor, ...]:
    """Return copies of the base's buckets, after all of `links`."""
    buckets = {index: bucket.clone() for index, bucket in enumerate(base.buckets)}
    for link in links:
        patch(buckets, base.tensors, link)
    return tuple(buckets.values())


def exact(found: tuple[torch.Tensor, ...], expected: StagedWeights) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, expected.buckets, strict=True))


@settings(max_examples=150, deadline=None)
@given(
    shapes=st.lists(st.tuples(st.sampled_from(sorted(DTYPES)), st.integers(0, 700)), min_size=1, max_size=6),
    share=st.sampled_from([0.0, 0.003, 0.2, 0.9]),
    seed=st.integers(0, 1 << 30),
    block=st.sampled_from([1, 7, 64, 1 << 20]),
)
def test_every_bit_comes_back(shapes: list[tuple[str, int]], share: float, seed: int, block: int) -> None:
    raw = [(DTYPES[name], random_bits(count * DTYPES[name].itemsize, seed + count)) for name, count in shapes]
    base = staged(raw)
    target = staged([(dtype, changed(data, dtype.itemsize, share, seed)) for dtype, data in raw])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deltas, "BLOCK_ELEMENTS", block)
        delta = encode(base, target, FOREVER)
        if delta is not None:
            assert len(delta) < target.nbytes
            assert exact(apply(base, [delta]), target)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.uint8])
def test_steps_of_a_unit_in_the_last_place_are_small(dtype: torch.dtype) -> None:
    data = random_bits(80_000, 1)
    moved = data.clone().view(-1, dtype.itemsize)
    moved[::50, 0] += 1  # the lowest byte
    base, target = staged([(dtype, data)]), staged([(dtype, moved.flatten())])
    delta = encode(base, target, FOREVER)
    assert delta is not None
    assert len(delta) < 80_000 / dtype.itemsize / 50  # less than a byte for each change
    assert exact(apply(base, [delta]), target)


def test_all_changed_and_none() -> None:
    data = random_bits(4096, 1).view(torch.int16)
    base, all_changed = staged([(torch.int16, data)]), staged([(torch.int16, data + 3)])
    for target in (base, all_changed):
        delta = encode(base, target, FOREVER)
        assert delta is not None
        assert len(delta) < 60
        assert exact(apply(base, [delta]), target)


def test_a_chain_is_applied_in_order() -> None:
    versions = [staged([(torch.bfloat16, random_bits(2048, 0))])]
    for seed in range(4):
        versions.append(staged([(torch.bfloat16, changed(versions[-1].buckets[0], 2, 0.1, seed))]))
    links = [encode(old, new, FOREVER) for old, new in itertools.pairwise(versions)]
    assert all(link is not None for link in links)
    assert exact(apply(versions[0], [link for link in links if link]), versions[-1])


def test_what_a_delta_cannot_do_has_none() -> None:
    data = random_bits(4096, 1)
    base = staged([(torch.int16, data)])
    assert encode(base, staged([(torch.int16, random_bits(4096, 2))]), FOREVER) is None  # it would save no byte
    assert encode(base, staged([(torch.bfloat16, data)]), FOREVER) is None
    assert encode(base, staged([(torch.int16, data[:-2])]), FOREVER) is None
    assert encode(base, replace(base, buckets=(base.buckets[0][:-2],)), FOREVER) is None


def test_encoding_ends_with_its_deadline() -> None:
    cancelled = threading.Event()
    cancelled.set()
    base = staged([(torch.int16, random_bits(4096, 1))])
    with pytest.raises(WeightSyncError, match=r"encoding a delta.*cancelled"):
        encode(base, base, Deadline(1, cancelled))


def sample() -> tuple[StagedWeights, StagedWeights, bytes]:
    raw = [(torch.bfloat16, random_bits(3000, 1)), (torch.float32, random_bits(800, 2))]
    base = staged(raw)
    target = staged([(dtype, changed(data, dtype.itemsize, 0.1, 3)) for dtype, data in raw])
    delta = encode(base, target, FOREVER)
    assert delta is not None
    return base, target, delta


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_damage_gives_an_error_or_wrong_numbers_and_nothing_else(data: st.DataObject) -> None:
    base, _, delta = sample()
    damaged = bytearray(delta)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(delta) - 1))] ^= data.draw(st.integers(1, 255))
    with contextlib.suppress(WeightSyncError):
        apply(base, [bytes(damaged)])


def test_every_truncation_and_every_appendix_is_refused() -> None:
    base, _, delta = sample()
    for end in range(len(delta)):
        with pytest.raises(WeightSyncError):
            apply(base, [delta[:end]])
    with pytest.raises(WeightSyncError, match="goes on for 1 after its last block"):
        apply(base, [delta + b"\0"])


def block(count: int, gaps: bytes, steps: bytes) -> bytes:
    return deltas._HEADER.pack(count, len(gaps), len(steps)) + gaps + steps


def packed(*values: int, dtype: str = "<u4") -> bytes:
    return zstandard.ZstdCompressor().compress(deltas._planes(np.array(values, dtype)))


BOMB = zstandard.ZstdCompressor().compress(bytes(1 << 28))


@pytest.mark.parametrize(
    ("hostile", "complaint"),
    [
        (block(11, packed(*range(11)), packed(*range(11), dtype="<u2")), "changes 11 of 10 elements"),
        (block(2, packed(3, 6), packed(1, 1, dtype="<u2")), "changes element 10 of a block of 10"),
        (block(2, packed(0xFFFFFFFF, 0), packed(1, 1, dtype="<u2")), "changes element 4294967296"),
        (block(0, packed(1), b""), "changes 0 elements by 13"),
        (block(1, BOMB, packed(1, dtype="<u2")), "unpacks to 268435456 bytes where 4 belong"),
        (block(1, packed(1), BOMB), "unpacks to 268435456 bytes where 2 belong"),
        (block(1, packed(1), b"no zstd"), "does not decompress"),
        (block(1, packed(1) + b"x", packed(1, dtype="<u2")), "does not decompress"),
        (deltas._HEADER.pack(1, 0xFFFFFFFF, 0xFFFFFFFF), "with 12 left"),
    ],
)
def test_hostile_blocks_are_refused_before_they_are_written(hostile: bytes, complaint: str) -> None:
    base = staged([(torch.bfloat16, random_bits(20, 1))])
    tracemalloc.start()
    try:
        with pytest.raises(WeightSyncError, match=complaint):
            apply(base, [hostile])
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_delta_comes_apart_by_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deltas, "BLOCK_ELEMENTS", 100)
    raw = [
        (torch.bfloat16, random_bits(500, 1)),
        (torch.uint8, random_bits(70, 2)),
        (torch.int64, random_bits(2400, 3)),
    ]
    base = staged(raw)
    target = staged([(dtype, changed(data, dtype.itemsize, 0.1, 5)) for dtype, data in raw])
    delta = encode(base, target, FOREVER)
    assert delta is not None
    parts = by_bucket(base.tensors, delta)
    assert b"".join(parts[index] for index in range(len(base.buckets))) == delta
    for index, bucket in enumerate(base.buckets):
        patch({index: bucket}, [spec for spec in base.tensors if spec.bucket == index], parts[index])
    assert exact(base.buckets, target)
    for damaged in (delta[:-1], delta + b"x"):
        with pytest.raises(WeightSyncError, match="a delta "):
            by_bucket(base.tensors, damaged)
    with pytest.raises(WeightSyncError, match="the tensors of bucket 0 do not follow on each other"):
        by_bucket([base.tensors[0], base.tensors[2], base.tensors[1]], delta)


def test_buckets_that_are_missing_are_passed_over() -> None:
    base, target, delta = sample()
    assert len(base.buckets) > 1
    for index, bucket in enumerate(base.buckets):
        alone = {index: bucket.clone()}
        patch(alone, base.tensors, delta)
        assert torch.equal(alone[index], target.buckets[index])


def grown(longest: int, versions: list[StagedWeights]) -> list[tuple[Delta, ...]]:
    """Return the chain at each of `versions`, published one after the other."""
    growing, chains = DeltaChain(longest), []
    for version, weights in zip(V, versions, strict=False):
        chains.append(growing.extended(version, weights, FOREVER))
        growing.advance(version, weights, chains[-1])
    return chains


def drifting(count: int, share: float) -> list[StagedWeights]:
    versions = [staged([(torch.int16, random_bits(4096, 0))])]
    for seed in range(1, count):
        versions.append(staged([(torch.int16, changed(versions[-1].buckets[0], 2, share, seed))]))
    return versions


def test_a_chain_is_bounded_by_its_number() -> None:
    chains = grown(3, drifting(6, 0.01))
    assert [len(links) for links in chains] == [0, 1, 2, 3, 3, 3]
    assert [(link.spec.base, link.spec.version) for link in chains[-1]] == list(itertools.pairwise(V[2:6]))
    assert [len(links) for links in grown(0, drifting(3, 0.01))] == [0, 0, 0]


def test_a_chain_is_smaller_than_the_weights() -> None:
    chains = grown(8, drifting(8, 0.15))
    for links in chains:
        assert sum(len(link.data) for link in links) < 4000
    assert 1 <= len(chains[-1]) < 7


def test_other_tensors_and_a_deadline_that_is_missed_begin_a_chain_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b, c = drifting(3, 0.01)
    other = staged([(torch.int16, random_bits(100, 0))])
    assert [len(links) for links in grown(8, [a, b, other, other, a, b])] == [0, 1, 0, 1, 0, 1]

    growing = DeltaChain(8)
    growing.advance(V[0], a, ())
    assert growing.extended(V[1], b, Deadline(0.0)) == ()
    growing.advance(V[1], b, ())
    assert len(growing.extended(V[2], c, FOREVER)) == 1
    monkeypatch.setattr(deltas, "encode", lambda *_: None)
    assert growing.extended(V[2], c, FOREVER) == ()
