# mypy: disable-error-code="misc"
"""Buckets carry tensors bit for bit, aligned and fingerprinted."""

import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest
import torch

from headway.broker.errors import WeightSyncError
from headway.broker.schema import WeightVersion
from headway.broker.schema.weights import Probe, TensorSpec, WeightManifest
from headway.weightsync.deliveries import BufferPool
from headway.weightsync.tensors.buckets import ALIGNMENT, check_manifest, verify, views
from headway.weightsync.tensors.fingerprint import fingerprint
from headway.weightsync.tensors.staging import OtherTensorsError, StagedWeights, Staging, stage

BUCKET_BYTES = 4096


def awkward_tensors() -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    noise = torch.randn(70, 33, generator=generator)
    return [
        ("float32", noise),
        ("float16", noise.half()),
        ("bfloat16", noise.bfloat16()),
        ("int64", torch.arange(-3, 40)),
        ("transposed", noise.t()),
        ("strided", noise[::2, 1::3]),
        ("scalar", torch.tensor(3.25)),
        ("empty", torch.empty(0, 5)),
        ("odd", torch.arange(7, dtype=torch.uint8)),
        ("special", torch.tensor([float("nan"), float("inf"), -0.0, 1e-45])),
        ("flags", torch.tensor([True, False, True])),
        ("larger than a bucket", torch.randn(3000, generator=generator)),
        ("last", noise[0]),
    ]


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def staged() -> StagedWeights:
    return stage(awkward_tensors(), BUCKET_BYTES)


def test_round_trip_is_exact() -> None:
    weights = staged()
    received = [bucket.clone() for bucket in weights.buckets]
    found = views(weights.tensors, received)
    assert [name for name, _ in found] == [name for name, _ in awkward_tensors()]
    for (name, sent), (_, got) in zip(awkward_tensors(), found, strict=True):
        assert (got.dtype, got.shape) == (sent.dtype, sent.shape), name
        assert bits(got) == bits(sent), name


def test_buckets_are_bounded_but_for_single_larger_tensors() -> None:
    weights = staged()
    assert sum(weights.sizes) == weights.nbytes
    for index, nbytes in enumerate(weights.sizes):
        held = [spec for spec in weights.tensors if spec.bucket == index]
        assert nbytes <= BUCKET_BYTES or len(held) == 1
        assert all(spec.offset % ALIGNMENT == 0 for spec in held)


def test_fingerprints_are_those_of_the_tensors_one_by_one() -> None:
    assert staged().fingerprints == tuple(fingerprint(tensor) for _, tensor in awkward_tensors())


def test_tensors_are_copied_when_they_are_yielded() -> None:
    scratch = torch.empty(10)
    weights = stage(((str(value), scratch.fill_(value)) for value in range(3)), BUCKET_BYTES)
    assert [tensor[0].item() for _, tensor in views(weights.tensors, weights.buckets)] == [0, 1, 2]


def manifest(weights: StagedWeights, tensors: tuple[TensorSpec, ...] | None = None) -> WeightManifest:
    return WeightManifest(
        version=WeightVersion(1, 0),
        tensors=weights.tensors if tensors is None else tensors,
        buckets=weights.sizes,
        probe=Probe(token_ids=[], logprobs=[], tolerance=0.0),
        group_epoch=0,
        pull_url="",
        pull_token="",
        fingerprints=weights.fingerprints,
    )


def test_one_flipped_bit_is_found() -> None:
    weights = staged()
    for index, bucket in enumerate(weights.buckets):
        verify(manifest(weights), {index: bucket})
        spec = next(spec for spec in weights.tensors if spec.bucket == index and spec.nbytes)
        damaged = bucket.clone()
        damaged[spec.offset + spec.nbytes - 1] ^= 1
        with pytest.raises(WeightSyncError, match=f"{spec.name} in bucket {index} arrived damaged"):
            verify(manifest(weights), {index: damaged})


def test_a_truncated_bucket_is_found() -> None:
    weights = staged()
    with pytest.raises(WeightSyncError, match="published were"):
        verify(manifest(weights), {0: weights.buckets[0][:-ALIGNMENT]})


@pytest.mark.parametrize(
    "change",
    [
        {"offset": 1 << 40},
        {"offset": -256},
        {"offset": 8},
        {"bucket": 99},
        {"bucket": -1},
        {"nbytes": 4},
        {"dtype": "object"},
        {"shape": (-70, -33)},
        {"shape": (0, -1), "nbytes": 0},
    ],
)
def test_a_manifest_that_lies_is_refused(change: dict[str, object]) -> None:
    weights = staged()
    assert weights.tensors[0].shape == (70, 33)
    check_manifest(manifest(weights))
    lying: TensorSpec = msgspec.structs.replace(weights.tensors[0], **change)
    with pytest.raises(WeightSyncError, match="float32"):
        check_manifest(manifest(weights, (lying, *weights.tensors[1:])))
    with pytest.raises(WeightSyncError, match="contradicts itself"):
        check_manifest(manifest(weights, weights.tensors[1:]))


def test_a_bucket_of_less_than_nothing_is_refused() -> None:
    lying = msgspec.structs.replace(
        manifest(staged()), buckets=(-ALIGNMENT, *staged().sizes[1:]), tensors=(), fingerprints=()
    )
    with pytest.raises(WeightSyncError, match="contradicts itself"):
        check_manifest(lying)


def test_a_name_twice_and_an_unknown_dtype_are_refused() -> None:
    one = torch.ones(1)
    with pytest.raises(WeightSyncError, match="w is published twice"):
        stage([("w", one), ("w", one)], BUCKET_BYTES)
    with pytest.raises(WeightSyncError, match="complex64, which cannot be sent"):
        stage([("w", one.to(torch.complex64))], BUCKET_BYTES)


def gathered(staging: Staging, given: Iterable[tuple[str, torch.Tensor]]) -> StagedWeights:
    gathering = staging.begin(given)
    gathering.take()
    return gathering.staged()


@pytest.mark.parametrize("memory_is_reused", [True, False])
def test_versions_of_the_same_tensors_are_gathered_to_the_same_places(memory_is_reused: bool) -> None:
    staging = Staging(BUCKET_BYTES, torch.device("cpu"), memory_is_reused=memory_is_reused)
    first = gathered(staging, awkward_tensors())
    memory = [bucket.data_ptr() for bucket in first.buckets]
    changed = [(name, tensor.flip(0) if tensor.dim() else tensor) for name, tensor in awkward_tensors()]
    for given in (changed, awkward_tensors()):
        fresh, gathering = stage(given, BUCKET_BYTES), staging.begin(iter(given))
        gathering.take()
        for bucket, expected in zip(gathering.buckets(), fresh.buckets, strict=True):
            assert torch.equal(bucket, expected)
        again = gathering.staged()
        assert ([bucket.data_ptr() for bucket in again.buckets] == memory) == memory_is_reused
        assert (again.tensors, again.fingerprints) == (fresh.tensors, fresh.fingerprints)


def test_a_bucket_is_there_before_the_next_ones_tensors_are_taken() -> None:
    staging = Staging(BUCKET_BYTES, torch.device("cpu"), memory_is_reused=False)
    gathered(staging, awkward_tensors())
    taken, seen = list[str](), list[list[str]]()
    goes_on = threading.Semaphore(0)

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in awkward_tensors():
            while {spec.name: spec.bucket for spec in places.tensors}[name] > len(seen):
                assert goes_on.acquire(timeout=30)
            taken.append(name)
            yield name, tensor

    gathering = staging.begin(tensors())
    places = gathering.places()

    def send() -> None:
        for _ in gathering.buckets():
            seen.append(list(taken))
            goes_on.release()

    assert not taken
    with ThreadPoolExecutor() as other_thread:
        sent = other_thread.submit(send)
        gathering.take()
    sent.result()
    assert seen == [
        [spec.name for spec in places.tensors if spec.bucket <= number] for number in range(len(places.sizes))
    ]
    assert gathering.staged().fingerprints == staged().fingerprints
    assert [bucket.data_ptr() for bucket in gathering.buckets()] == [b.data_ptr() for b in gathering.staged().buckets]


@pytest.mark.parametrize("is_sent", [True, False])
def test_other_tensors_get_other_places(is_sent: bool) -> None:
    staging = Staging(BUCKET_BYTES, torch.device("cpu"), memory_is_reused=True)
    for given in (
        awkward_tensors(),
        awkward_tensors()[:4],
        awkward_tensors()[:2] + awkward_tensors()[3:],
        [*awkward_tensors(), ("x", torch.ones(3))],
        awkward_tensors(),
    ):
        gathering = staging.begin(iter(given))
        with ThreadPoolExecutor() as other_thread:
            sent = other_thread.submit(lambda of=gathering: list(of.buckets())) if is_sent else None
            gathering.take()
        if sent is not None and (error := sent.exception()) is not None:
            assert isinstance(error, OtherTensorsError)
        assert gathering.staged().fingerprints == stage(given, BUCKET_BYTES).fingerprints


def test_tensors_that_fail_to_come_are_no_version() -> None:
    staging = Staging(BUCKET_BYTES, torch.device("cpu"), memory_is_reused=True)
    gathered(staging, awkward_tensors())

    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield from awkward_tensors()[:3]
        raise RuntimeError("a rank is gone")

    gathering = staging.begin(broken())
    with pytest.raises(RuntimeError, match="a rank is gone"):
        gathering.take()
    for ask in (gathering.staged, lambda: list(gathering.buckets())):
        with pytest.raises(WeightSyncError, match="could not be gathered"):
            ask()


def test_memory_that_was_given_back_is_used_again() -> None:
    landing = BufferPool(torch.device("cpu"))
    first, second = landing.take((256, 512)), landing.take((256, 512))
    assert first is not second
    landing.give_back(first)
    assert landing.take((256, 512)) is first
    landing.give_back(first)
    assert landing.take((256,)) is not first
    weights = staged()
    landed = landing.take(weights.sizes)
    named = landed.tensors(weights.tensors)
    assert landed.tensors(tuple(weights.tensors)) is named
    assert landed.tensors(weights.tensors[:1]) is not named


def test_no_room_is_said_with_a_remedy() -> None:
    with pytest.raises(WeightSyncError, match=r"no memory on cpu for 4611686018427387904 bytes.*weights\.staging=host"):
        BufferPool(torch.device("cpu")).take((1 << 62,))
