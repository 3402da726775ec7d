"""A worker reads the first version from the model's files if they hold it, and asks the learner for all else."""

import asyncio
import math
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from msgspec.structs import replace
from safetensors import safe_open
from safetensors.torch import save_file

from headway.broker.errors import WeightSyncError
from headway.broker.schema import WeightVersion
from headway.broker.schema.weights import DeltaSpec, Probe, WeightManifest
from headway.weightsync import weights_from_files
from headway.weightsync.limits import Deadline
from headway.weightsync.tensors.buckets import allocate, verify, views
from headway.weightsync.tensors.staging import stage
from headway.weightsync.weights_from_files import FilesPull

from .conftest import CONFIG, InProcessWorker, Learner, served_bytes, weights

FOREVER = Deadline(math.inf)
Tensors = dict[str, torch.Tensor]


def trained() -> Tensors:
    """Return tensors of several buckets as a learner publishes them."""
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "embed": (40, 16),
        "norm": (16,),
        "layers.0.mlp.experts.gate_up_proj": (3, 12, 16),
        "layers.0.mlp.experts.down_proj": (3, 16, 6),
    }
    return {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}


def files_of(published: Tensors) -> dict[str, Tensors]:
    """Return the same in the form of a checkpoint: two files, one in float32, with expert by expert."""
    gate_up, down = (published[f"layers.0.mlp.experts.{part}"] for part in ("gate_up_proj", "down_proj"))
    experts = {}
    for number in range(len(down)):
        gate, up = gate_up[number].chunk(2)
        for part, tensor in (("gate_proj", gate), ("up_proj", up), ("down_proj", down[number])):
            experts[f"layers.0.mlp.experts.{number}.{part}.weight"] = tensor.clone()
    return {"1.safetensors": {name: published[name].float() for name in ("embed", "norm")}, "2.safetensors": experts}


def write(directory: Path, files: Mapping[str, Tensors]) -> Path:
    directory.mkdir()
    for name, tensors in files.items():
        save_file(tensors, directory / name)
    return directory


class Told:
    """A learner that serves a version, and notes which buckets it was asked for."""

    def __init__(self, published: Tensors, step: int = 0) -> None:
        self._staged = stage(published.items(), 1024)
        self.asked: list[int] = []
        self.manifest = WeightManifest(
            version=WeightVersion(1, step),
            tensors=self._staged.tensors,
            buckets=self._staged.sizes,
            probe=Probe(token_ids=[1], logprobs=[], tolerance=0.0),
            group_epoch=0,
            pull_url="",
            pull_token="",
            fingerprints=self._staged.fingerprints,
        )

    def pull_bucket(self, manifest: WeightManifest, index: int, bucket: torch.Tensor, deadline: Deadline) -> None:
        self.asked.append(index)
        bucket.copy_(self._staged.buckets[index])

    def pull_delta(self, manifest: WeightManifest, delta: DeltaSpec, deadline: Deadline) -> memoryview:
        raise AssertionError("there are none")

    def forget(self) -> None:
        """There is nothing to forget."""

    def pulled(self, pull: FilesPull) -> Tensors:
        """Pull the version, check it, and return it."""
        buckets = allocate(self.manifest.buckets)
        for index, bucket in enumerate(buckets):
            bucket.fill_(7)
            pull.pull_bucket(self.manifest, index, bucket, FOREVER)
        pull.forget()
        verify(self.manifest, dict(enumerate(buckets)))
        return dict(views(self.manifest.tensors, buckets))


def test_the_first_version_is_read_and_nothing_is_asked(tmp_path: Path) -> None:
    learner = Told(trained())
    found = learner.pulled(FilesPull(write(tmp_path / "model", files_of(trained())), learner))
    assert len(learner.manifest.buckets) > 2
    assert learner.asked == []
    assert all(torch.equal(found[name], tensor) for name, tensor in trained().items())


def test_only_the_first_version_is_read(tmp_path: Path) -> None:
    directory = write(tmp_path / "model", files_of(trained()))
    later = Told(trained(), step=1)
    pull = FilesPull(directory, later)
    later.pulled(pull)
    assert later.asked == list(range(len(later.manifest.buckets)))


def _other_weights(directory: Path) -> None:
    files = files_of(trained())
    files["1.safetensors"]["embed"][3, 4] += 1
    for name, tensors in files.items():
        save_file(tensors, directory / name)


def _other_shapes(directory: Path) -> None:
    save_file({"embed": torch.zeros(16, 40), "norm": torch.zeros(8)}, directory / "1.safetensors")


def _cut(directory: Path) -> None:
    file = directory / "1.safetensors"
    file.write_bytes(file.read_bytes()[:-5])


def _a_pipe(directory: Path) -> None:
    (directory / "1.safetensors").unlink()
    os.mkfifo(directory / "1.safetensors")


def _junk(directory: Path) -> None:
    (directory / "1.safetensors").write_bytes(b"junk" * 100)


def _nothing(directory: Path) -> None:
    for file in directory.iterdir():
        file.unlink()


DAMAGES: dict[str, Callable[[Path], None]] = {
    "other weights": _other_weights,
    "other shapes": _other_shapes,
    "a tensor less": lambda directory: (directory / "1.safetensors").unlink(),
    "cut": _cut,
    "no safetensors": _junk,
    "a pipe": _a_pipe,
    "no files": _nothing,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_files_with_anything_else_are_not_used(tmp_path: Path, damage: str) -> None:
    directory = write(tmp_path / "model", files_of(trained()))
    DAMAGES[damage](directory)
    learner = Told(trained())
    pull = FilesPull(directory, learner)
    found = learner.pulled(pull)
    assert all(torch.equal(found[name], tensor) for name, tensor in trained().items())
    assert learner.asked
    first = len(learner.asked)
    learner.pulled(pull)  # the files are not looked at again
    assert len(learner.asked) == first + len(learner.manifest.buckets)


class Noted:
    """A safetensors file that notes which tensors are read."""

    read: ClassVar[list[str]] = []

    def __init__(self, *arguments: Any, **more: Any) -> None:
        self._file = safe_open(*arguments, **more)

    def __enter__(self) -> Any:
        return self._file.__enter__()

    def __exit__(self, *raised: Any) -> None:
        self._file.__exit__(*raised)

    def get_slice(self, name: str) -> Any:
        return self._file.get_slice(name)

    def get_tensor(self, name: str) -> Any:
        self.read.append(name)
        return self._file.get_tensor(name)


@pytest.mark.parametrize("shape", [(40, 16), (16, 40), (1, 16), (640,), (1,), (4000, 16), (2, 40, 16)])
def test_a_tensor_of_another_shape_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...]
) -> None:
    monkeypatch.setattr(weights_from_files, "safe_open", Noted)
    monkeypatch.setattr(Noted, "read", [])
    files = files_of(trained())
    files["1.safetensors"]["embed"] = torch.zeros(shape)
    learner = Told(trained())
    learner.pulled(FilesPull(write(tmp_path / "model", files), learner))
    assert ("embed" in Noted.read) is (shape == trained()["embed"].shape)
    assert learner.asked


def test_files_are_used_after_a_pull_that_was_stopped(tmp_path: Path) -> None:
    learner, cancelled = Told(trained()), threading.Event()
    pull = FilesPull(write(tmp_path / "model", files_of(trained())), learner)
    cancelled.set()
    with pytest.raises(WeightSyncError, match="cancelled"):
        pull.pull_bucket(learner.manifest, 0, allocate(learner.manifest.buckets)[0], Deadline(math.inf, cancelled))
    learner.pulled(pull)
    assert learner.asked == []


@pytest.mark.parametrize("seed", [0, 1], ids=["the run's model", "another model of these shapes"])
async def test_a_worker_beside_the_files_takes_no_byte_of_the_learner(
    learner: Learner, start_inside: Callable[..., InProcessWorker], tmp_path: Path, seed: int
) -> None:
    directory = write(tmp_path / "model", {"model.safetensors": {name: one.clone() for name, one in weights(seed)}})
    served = served_bytes(learner)
    worker = start_inside("w", replace(CONFIG, follow="pull"), directory)
    for step in range(2):
        await asyncio.to_thread(learner.publish)
        assert await worker.next() == WeightVersion(1, step)
        assert (sum(served) == 0) == (seed == 0 and step == 0)
