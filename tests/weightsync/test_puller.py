# mypy: disable-error-code="assignment"
"""A follower fetches and updates only the tensors that it lacks, over a transport that the test controls."""

import itertools
import math
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection

import pytest
import torch
from msgspec.structs import replace

from headway.broker.errors import WeightSyncError
from headway.broker.schema import WeightVersion
from headway.broker.schema.weights import DeltaSpec, Probe, WeightManifest
from headway.weightsync.limits import Deadline
from headway.weightsync.puller import Puller, PullResult
from headway.weightsync.tensors.buckets import digest_bytes
from headway.weightsync.tensors.deltas import encode
from headway.weightsync.tensors.staging import StagedWeights, stage
from headway.weightsync.transports.base import SupersededError, UnreachableError
from tests.weightsync.processes import ForkedProcess

FOREVER = Deadline(math.inf)
BUCKETS = 4


def weights(step: int) -> StagedWeights:
    """Return four buckets; every step changes some elements of each."""
    values = torch.arange(BUCKETS * 500, dtype=torch.int16)
    values[step % 7 :: 31] += step
    return stage(((str(index), part) for index, part in enumerate(values.split(500))), 1024)


class Line:
    """A learner that has published some versions, and the requests that it got."""

    def __init__(self, steps: int) -> None:
        self.versions = [weights(step) for step in range(steps)]
        self.deltas: dict[int, bytes] = {}
        for step, (base, target) in enumerate(itertools.pairwise(self.versions), 1):
            delta = encode(base, target, FOREVER)
            assert delta is not None
            self.deltas[step] = delta
        self.asked: list[str] = []
        self.left = 1000
        """The number of requests until the line is cut, or the version superseded."""
        self.end: Exception = SupersededError("gone")

    def manifest(self, step: int, chain: int) -> WeightManifest:
        """Return the manifest of version `step` with the last `chain` deltas."""
        staged = self.versions[step]
        return WeightManifest(
            version=WeightVersion(1, step),
            tensors=staged.tensors,
            buckets=staged.sizes,
            probe=Probe(token_ids=[1], logprobs=[], tolerance=0.0),
            group_epoch=0,
            pull_url="",
            pull_token="",
            fingerprints=staged.fingerprints,
            deltas=tuple(self._spec(link) for link in range(step - chain + 1, step + 1)),
        )

    def pull_bucket(self, manifest: WeightManifest, index: int, bucket: torch.Tensor, deadline: Deadline) -> None:
        self._ask(str(index))
        bucket.copy_(self.versions[manifest.version.step].buckets[index])

    def pull_delta(self, manifest: WeightManifest, delta: DeltaSpec, deadline: Deadline) -> memoryview:
        self._ask(f"delta {delta.version.step}")
        return memoryview(self.deltas[delta.version.step])

    def forget(self) -> None:
        """There is nothing to forget."""

    def _ask(self, what: str) -> None:
        if self.left == 0:
            self.left = 1000
            raise self.end
        self.left -= 1
        self.asked.append(what)

    def _spec(self, step: int) -> DeltaSpec:
        data = self.deltas[step]
        return DeltaSpec(WeightVersion(1, step - 1), WeightVersion(1, step), len(data), digest_bytes(data))


def pull(line: Line, puller: Puller, manifest: WeightManifest) -> tuple[PullResult, list[str]]:
    """Pull, assert that the tensors are right, and return them with the requests that it took."""
    line.asked = []
    pulled = puller.pull(manifest, FOREVER)
    expected = line.versions[manifest.version.step].buckets
    assert all(torch.equal(a, b) for a, b in zip(pulled.buckets, expected, strict=True))
    return pulled, line.asked


def all_buckets() -> list[str]:
    return [str(index) for index in range(BUCKETS)]


def whole_is_fetched(line: Line, puller: Puller, manifest: WeightManifest) -> bool:
    pulled, asked = pull(line, puller, manifest)
    return asked == all_buckets() and (pulled.deltas, pulled.failure) == (0, "")


def follower(line: Line, step: int) -> Puller:
    """Return a puller that holds version `step`."""
    puller = Puller(line, keeps_base=True)
    assert whole_is_fetched(line, puller, line.manifest(step, 0))
    return puller


def test_the_base_stays_as_it_is() -> None:
    line = Line(2)
    puller = Puller(line, keeps_base=True)
    held, _ = pull(line, puller, line.manifest(0, 0))
    pulled, asked = pull(line, puller, line.manifest(1, 1))
    assert (asked, pulled.deltas, pulled.failure) == (["delta 1"], 1, "")
    assert all(torch.equal(a, b) for a, b in zip(held.buckets, line.versions[0].buckets, strict=True))


def test_what_came_before_a_version_was_superseded_is_not_fetched_again() -> None:
    line = Line(5)
    puller = Puller(line, keeps_base=True)
    for step, chain, expected in ((0, 0, ["0", "1"]), (1, 1, ["delta 1", "2"]), (3, 3, ["delta 2", "delta 3"])):
        line.asked, line.left = [], len(expected)
        with pytest.raises(SupersededError):
            puller.pull(line.manifest(step, chain), FOREVER)
        assert line.asked == expected
    pulled, asked = pull(line, puller, line.manifest(4, 4))
    assert asked == ["delta 4", "3"]
    assert pulled.deltas == 1


def test_a_line_that_is_cut_costs_no_whole_version() -> None:
    line = Line(3)
    puller = follower(line, 0)
    line.left, line.end = 1, UnreachableError("cut")
    with pytest.raises(UnreachableError):
        puller.pull(line.manifest(2, 2), FOREVER)
    assert pull(line, puller, line.manifest(2, 2))[1] == ["delta 1", "delta 2"]


def test_the_same_version_again_is_verified_and_not_fetched() -> None:
    line = Line(1)
    puller = follower(line, 0)
    pulled, asked = pull(line, puller, line.manifest(0, 0))
    assert asked == []
    pulled.buckets[2][7] ^= 1  # a bit of the tensor named 2
    pulled, asked = pull(line, puller, line.manifest(0, 0))
    assert asked == all_buckets()
    assert "2 in bucket 2 arrived damaged" in pulled.failure


def test_who_missed_more_than_the_chain_has_fetches_all() -> None:
    line = Line(6)
    assert whole_is_fetched(line, follower(line, 1), line.manifest(5, 3))


def test_who_keeps_no_base_fetches_all() -> None:
    line = Line(2)
    puller = Puller(line, keeps_base=False)
    assert whole_is_fetched(line, puller, line.manifest(0, 0))
    assert whole_is_fetched(line, puller, line.manifest(1, 1))


def with_deltas(manifest: WeightManifest, deltas: Sequence[DeltaSpec]) -> WeightManifest:
    return replace(manifest, deltas=tuple(deltas))


def test_a_chain_that_saves_nothing_or_lies_is_not_taken() -> None:
    line = Line(4)
    told = line.manifest(3, 3)
    first, second, third = told.deltas
    for deltas in (
        (first, replace(second, nbytes=4000), third),
        (first, replace(second, nbytes=-1), third),
        (first, third),
        (first, second),
    ):
        assert whole_is_fetched(line, follower(line, 0), with_deltas(told, deltas))


def test_another_layout_is_fetched_whole() -> None:
    line = Line(2)
    puller = follower(line, 0)
    told = line.manifest(1, 1)
    renamed = replace(told, tensors=(replace(told.tensors[0], name="other"), *told.tensors[1:]))
    assert whole_is_fetched(line, puller, renamed)


def test_specs_that_lie_outside_of_their_buckets_are_refused() -> None:
    line = Line(2)
    told = line.manifest(0, 0)
    beyond = replace(told, tensors=(replace(told.tensors[0], offset=1 << 40), *told.tensors[1:]))
    with pytest.raises(WeightSyncError, match="lies outside of its bucket"):
        Puller(line, keeps_base=True).pull(beyond, FOREVER)
    assert line.asked == []


def end_while_it_pulls(connection: Connection) -> None:
    """Live as a process whose pull hangs."""
    line, is_asked = Line(1), threading.Event()

    def hang(*_: object) -> None:
        is_asked.set()
        threading.Event().wait()

    line.pull_bucket = hang
    puller = Puller(line, keeps_base=False)
    threading.Thread(target=puller.pull, args=(line.manifest(0, 0), FOREVER), daemon=True).start()
    is_asked.wait()


def test_a_pull_that_hangs_does_not_keep_its_process() -> None:
    process = ForkedProcess(end_while_it_pulls)
    try:
        process.until_ended()
    finally:
        process.close()
