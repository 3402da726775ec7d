"""`weights.trust: none`: a worker takes only the bytes that the learner has signed, wherever they come from."""

import asyncio
import hashlib
import math
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import save_file

from headway.broker import Broker
from headway.broker.errors import WeightSyncError
from headway.broker.schema.weights import DeltaSpec, WeightManifest
from headway.weightsync.limits import Deadline
from headway.weightsync.puller import Puller
from headway.weightsync.tensors.buckets import check_manifest, fingerprints, sha256_of, verify
from headway.weightsync.tensors.staging import StagedWeights, describe_base, manifest_of_base, stage
from headway.weightsync.transports.http_connections import Content
from headway.weightsync.weights_from_files import FilesPull

from .conftest import CONFIG, InProcessWorker, Learner, announced, weights
from .test_transports import V0, manifest
from .worker_process import HEARTBEAT_TTL_S, worker_info

UNTRUSTED = replace(CONFIG, trust="none")
STAGED = stage(weights(0), 1 << 16)


def one_bit(bucket: torch.Tensor) -> torch.Tensor:
    changed = bucket.clone()
    changed[len(bucket) // 2] ^= 1
    return changed


def forged(bucket: torch.Tensor) -> torch.Tensor:
    """Change four numbers of fp32 so that both sums of the fingerprint stay."""
    changed = bucket.clone()
    changed.view(torch.int32)[:4] += torch.tensor([1, -1, -1, 1], dtype=torch.int32)
    return changed


ALTERED = {"one bit": one_bit, "forged": forged}


def signed(staged: StagedWeights) -> WeightManifest:
    return replace(
        manifest(V0),
        tensors=staged.tensors,
        buckets=staged.sizes,
        fingerprints=staged.fingerprints,
        digests=tuple(map(sha256_of, staged.buckets)),
    )


def test_a_fingerprint_is_no_defence_and_a_digest_is_one() -> None:
    promised = signed(STAGED)
    assert promised.digests[0] == hashlib.sha256(STAGED.buckets[0].numpy().tobytes()).hexdigest()
    verify(promised, dict(enumerate(STAGED.buckets)))
    changed = {0: forged(STAGED.buckets[0])}
    assert fingerprints(STAGED.tensors, changed).items() <= dict(enumerate(STAGED.fingerprints)).items()
    verify(replace(promised, digests=()), changed)
    for alter in ALTERED.values():
        with pytest.raises(WeightSyncError, match="was altered on its way"):
            verify(promised, {0: alter(STAGED.buckets[0])})


@pytest.mark.parametrize("digests", [("0" * 64,), ("0" * 64,) * 99])
def test_a_version_is_signed_as_a_whole_or_not_at_all(digests: tuple[str, ...]) -> None:
    assert len(STAGED.buckets) not in (1, 99)
    with pytest.raises(WeightSyncError, match="contradicts itself"):
        check_manifest(replace(signed(STAGED), digests=digests))


class Relay:
    """Something between a learner and a worker that alters one bucket, or a delta."""

    def __init__(self, alter: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.alter = alter
        self.asked: list[int] = []

    def pull_bucket(self, wanted: WeightManifest, index: int, bucket: torch.Tensor, deadline: Deadline) -> None:
        self.asked.append(index)
        bucket.copy_(self.alter(STAGED.buckets[0]) if index == 0 else STAGED.buckets[index])
        verify(wanted, {index: bucket})

    def pull_delta(self, wanted: WeightManifest, delta: DeltaSpec, deadline: Deadline) -> memoryview:
        raise AssertionError("there are none")

    def forget(self) -> None:
        """There is nothing to forget."""


@pytest.mark.parametrize("of", ["version", "base of adapters"])
@pytest.mark.parametrize("kind", ALTERED)
def test_altered_model_files_are_not_taken(tmp_path: Path, kind: str, of: str) -> None:
    """They may lie on a disk that other users write."""
    promised, honest = signed(STAGED), Relay(torch.clone)
    if of != "version":
        base = describe_base(STAGED, promised.digests)
        promised = manifest_of_base(replace(promised, base=base, digests=()))
    changed = dict(weights(0))
    flat = ALTERED[kind](changed["a"].reshape(-1).view(torch.uint8))
    changed["a"] = flat.view(torch.float32).view_as(changed["a"])
    save_file(changed, tmp_path / "model.safetensors")
    pulled = Puller(FilesPull(tmp_path, honest), keeps_base=False).pull(promised, Deadline(math.inf))
    assert all(torch.equal(a, b) for a, b in zip(pulled.buckets, STAGED.buckets, strict=True))
    assert 0 in honest.asked


@pytest.fixture
def learner(url: str, run_name: str) -> Iterator[Learner]:
    started = Learner(url, run_name, UNTRUSTED)
    yield started
    started.close()


async def test_no_worker_gets_into_a_group_and_each_pulls_over_tls(
    broker: Broker, learner: Learner, start_inside: Callable[..., InProcessWorker]
) -> None:
    await broker.status.heartbeat(worker_info("hostile", V0, 0), HEARTBEAT_TTL_S)  # it says that it takes broadcasts
    worker = start_inside("w", replace(UNTRUSTED, follow="broadcast"))
    assert not worker.subscriber.joins_groups
    for step in range(3):
        report = await asyncio.to_thread(learner.publish)
        assert (report.members, report.failed) == ((), "")
        assert await worker.next() == learner.version
        promised = await announced(broker)
        assert promised.version.step == step
        assert promised.pull_url.startswith("https:")
        assert promised.pull_certificate
        staged = stage(weights(step), UNTRUSTED.bucket_bytes)
        assert list(promised.digests) == [hashlib.sha256(b.numpy().tobytes()).hexdigest() for b in staged.buckets]
    assert learner.epoch() == 0
    assert (await announced(broker)).deltas  # it follows by pull


@pytest.mark.parametrize("kind", ALTERED)
async def test_what_was_altered_on_its_way_is_refused_and_fetched_again(
    learner: Learner, start_inside: Callable[..., InProcessWorker], kind: str
) -> None:
    find, once = learner.publisher._pull_server.find, threading.Event()

    def between(path: str) -> Content | None:
        found = find(path)
        if found is None or once.is_set() or not path.endswith("/0"):
            return found
        once.set()
        bucket = torch.frombuffer(bytearray(found.data), dtype=torch.uint8)
        return Content(memoryview(ALTERED[kind](bucket).numpy().tobytes()), found.being_read)

    learner.publisher._pull_server.find = between  # type: ignore[method-assign]
    worker = start_inside("w", UNTRUSTED)
    await asyncio.to_thread(learner.publish)
    waiting = asyncio.create_task(worker.next())
    await worker.until_error("was altered on its way")
    assert await waiting == learner.version  # with the published tensors
    assert once.is_set()
