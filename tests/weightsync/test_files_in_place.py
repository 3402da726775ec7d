"""The base of adapters is mapped from the model's files, or is not there."""

import json
import math
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from headway.broker.errors import WeightSyncError
from headway.weightsync.limits import Deadline
from headway.weightsync.tensors.shared_memory import handle_of
from headway.weightsync.weights_from_files import base_in_files, verify_base

from .test_model_files import Tensors, Told, trained


def forever() -> Deadline:
    """Return a deadline of its own for each call, which ends it where it fails."""
    return Deadline(math.inf)


def files_of(published: Tensors) -> dict[str, Tensors]:
    """Return the tensors in two files, with one that the learner does not publish, in another order."""
    names = sorted(published)
    return {
        "1.safetensors": {name: published[name] for name in names[2:]} | {"more": torch.ones(3)},
        "2.safetensors": {name: published[name] for name in names[:2]},
    }


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    for name, tensors in files_of(trained()).items():
        save_file(tensors, tmp_path / name, metadata={"format": "pt"})
    return tmp_path


def test_the_base_lies_in_the_files(directory: Path) -> None:
    published = Told(trained()).manifest
    found = base_in_files(directory, published, forever())
    assert found is not None
    assert [name for name, _ in found.tensors] == [spec.name for spec in published.tensors]
    assert all(torch.equal(tensor, trained()[name]) for name, tensor in found.tensors)
    assert len({handle_of(tensor) for _, tensor in found.tensors} - {None}) == 2
    assert found.manifest.fingerprints == published.fingerprints
    assert not found.is_verified
    verify_base(found, forever())


def test_other_bits_in_the_files_are_found(directory: Path) -> None:
    path = directory / "1.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    found = base_in_files(directory, Told(trained()).manifest, forever())
    assert found is not None
    with pytest.raises(WeightSyncError, match="norm is another tensor than was published"):
        verify_base(found, forever())


def _written(content: bytes) -> Callable[[Path], None]:
    def damage(directory: Path) -> None:
        (directory / "1.safetensors").write_bytes(content)

    return damage


def _saved(change: Callable[[Tensors], object]) -> Callable[[Path], None]:
    def damage(directory: Path) -> None:
        published = trained()
        change(published)
        for name, tensors in files_of(published).items():
            save_file(tensors, directory / name)

    return damage


def _header(change: Callable[[dict[str, dict[str, object]]], object]) -> Callable[[Path], None]:
    def damage(directory: Path) -> None:
        path = directory / "1.safetensors"
        content = path.read_bytes()
        end = 8 + int.from_bytes(content[:8], "little")
        header = json.loads(content[8:end])
        change(header)
        told = json.dumps(header).encode()
        path.write_bytes(len(told).to_bytes(8, "little") + told + content[end:])

    return damage


def _pipe(directory: Path) -> None:
    (directory / "1.safetensors").unlink()
    os.mkfifo(directory / "1.safetensors")


DAMAGES: dict[str, Callable[[Path], None]] = {
    "other weights": _saved(lambda published: published["layers.0.mlp.experts.gate_up_proj"].add_(1)),
    "another shape": _saved(lambda published: published.update(norm=published["norm"].view(4, 4))),
    "another number format": _saved(lambda published: published.update(norm=published["norm"].half())),
    "a tensor less": lambda directory: (directory / "2.safetensors").unlink(),
    "cut": lambda directory: os.truncate(directory / "1.safetensors", 300),
    "cut within its header": lambda directory: os.truncate(directory / "1.safetensors", 20),
    "empty": lambda directory: os.truncate(directory / "1.safetensors", 0),
    "junk": _written(b"junk" * 100),
    "a header that is no object": _written(b"\2" + bytes(7) + b"[]"),
    "a place outside of the file": _header(lambda header: header["norm"].update(data_offsets=[0, 1 << 50])),
    "a place before the tensors": _header(lambda header: header["norm"].update(data_offsets=[-32, 0])),
    "a place that ends before it begins": _header(lambda header: header["norm"].update(data_offsets=[32, 0])),
    "a shape that is not that long": _header(lambda header: header["norm"].update(data_offsets=[0, 30])),
    "an entry without a place": _header(lambda header: header["norm"].pop("data_offsets")),
    "an odd place": _header(lambda header: header["norm"].update(data_offsets=[1, 33])),
    "a pipe": _pipe,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_files_that_hold_no_such_tensors_are_of_no_use(
    directory: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    DAMAGES[damage](directory)
    with caplog.at_level("INFO"):
        assert base_in_files(directory, Told(trained()).manifest, forever()) is None
    assert f"the base of adapters is not in {directory}: " in caplog.text


def test_a_directory_that_is_gone_is_of_no_use(tmp_path: Path) -> None:
    assert base_in_files(tmp_path / "gone", Told(trained()).manifest, forever()) is None


def test_reading_ends_when_it_is_cancelled(directory: Path) -> None:
    cancelled = threading.Event()
    cancelled.set()
    found = base_in_files(directory, Told(trained()).manifest, forever())
    assert found is not None
    over = Deadline(math.inf, cancelled)
    with pytest.raises(WeightSyncError, match="cancelled"):
        verify_base(found, over)
    assert base_in_files(directory, Told(trained()).manifest, over) is None
