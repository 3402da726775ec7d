"""A placement that is kept on disk saves the trace, and nothing that stands in the file is believed."""

import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from headway.broker.installation import cache_directory
from headway.rollout_workers.engines.weight_loading.direct_loading import DirectLoading
from headway.rollout_workers.engines.weight_loading.weight_placement import (
    Block,
    Placement,
    PlacementCache,
    placement_cache,
)

from .test_placement import SHAPES, Shard, published, version

DTYPE = torch.bfloat16
TRACED, PROVED = 6, 2
"""Loads of the first version: four that trace, one of its weights, one that scribbles; and where a placement was kept,
one of its weights and one of tensors that differ everywhere."""


class Engine:
    """An engine that has just started, and counts its loads."""

    def __init__(self, directory: Path, kind: str = "engine 1", rank: int = 0, size: int = 2) -> None:
        self.shard, self.loads = Shard(rank, size, DTYPE), 0
        self.kept = PlacementCache(directory, kind)
        self.direct = DirectLoading(self._load, lambda: self.shard.parameters, kept=self.kept)

    def _load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.loads += 1
        self.shard.load(tensors)

    def holds(self, tensors: dict[str, torch.Tensor]) -> bool:
        """Load a version; whether the parameters are what the loader alone makes of them, bit for bit."""
        self.direct.load(tensors)
        expected = Shard(self.shard.rank, self.shard.size, DTYPE)
        expected.load(tensors.items())
        return all(torch.equal(self.shard.parameters[name], one) for name, one in expected.parameters.items())


def beginning() -> dict[str, torch.Tensor]:
    """Return a version in which many tensors are the same, as those of a model that has not been trained."""
    return {name: torch.ones(shape, dtype=DTYPE) for name, shape in SHAPES.items()}


def placement_of(engine: Engine) -> Placement:
    found = engine.kept.read(published(DTYPE), engine.shard.parameters)
    assert found is not None
    return found


def test_the_next_engine_does_not_trace_its_loader(tmp_path: Path) -> None:
    first, second = Engine(tmp_path), Engine(tmp_path)
    assert first.holds(beginning())
    assert second.holds(beginning())
    assert (first.loads, second.loads) == (TRACED, PROVED)
    for engine in (first, second):
        assert engine.holds(version(DTYPE, 1))
        assert engine.direct.is_direct
    assert (first.loads, second.loads) == (TRACED, PROVED)
    assert first.direct.held() is not None
    assert [mode.stat().st_mode & 0o077 for mode in tmp_path.iterdir()] == [0]


@pytest.mark.parametrize(
    ("kind", "rank", "size"), [("engine 2", 0, 2), ("engine 1", 0, 1)], ids=["other version", "other shapes"]
)
def test_another_engine_traces_its_own(tmp_path: Path, kind: str, rank: int, size: int) -> None:
    assert Engine(tmp_path).holds(beginning())
    other = Engine(tmp_path, kind, rank, size)
    assert other.holds(version(DTYPE, 1))
    assert other.loads == TRACED


def test_what_another_process_of_the_engine_kept_is_found_to_be_wrong(tmp_path: Path) -> None:
    """The parameters of both have the same names and shapes, and this version's weights are the same everywhere."""
    assert Engine(tmp_path, rank=0).holds(beginning())
    other = Engine(tmp_path, rank=1)
    assert other.holds(beginning())
    assert other.loads == PROVED + TRACED
    assert other.holds(version(DTYPE, 1))
    again = Engine(tmp_path, rank=1)
    assert again.holds(version(DTYPE, 1))
    assert again.loads == PROVED, "it was written anew"


def _swapped(blocks: tuple[Block, ...]) -> list[Block]:
    other = {"gate.0": "gate.1", "gate.1": "gate.0"}
    return [replace(one, source=other.get(one.source, one.source)) for one in blocks]


CHANGES: dict[str, Callable[[tuple[Block, ...]], list[Block]]] = {
    "two tensors swapped": _swapped,
    "one row further": lambda blocks: [replace(one, offset=one.offset + 1) for one in blocks],
    "a block less": lambda blocks: list(blocks[1:]),
    "nothing": lambda blocks: [],
    "beyond its source": lambda blocks: [replace(one, offset=1 << 20) for one in blocks],
    "beyond its parameter": lambda blocks: [replace(one, first_row=one.first_row + 1) for one in blocks],
    "backwards": lambda blocks: [replace(one, row_step=-1, offset=100) for one in blocks],
    "without end": lambda blocks: [replace(one, column_step=1 << 39, rows=1 << 39) for one in blocks],
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_wrong_placement_is_found_out_and_written_anew(tmp_path: Path, change: str) -> None:
    first = Engine(tmp_path)
    assert first.holds(beginning())
    right = placement_of(first)
    first.kept.write(published(DTYPE), first.shard.parameters, Placement(tuple(CHANGES[change](right.blocks))))
    second = Engine(tmp_path)
    assert second.holds(beginning())
    assert second.holds(version(DTYPE, 1))
    assert second.loads >= TRACED
    assert placement_of(second) == right


@pytest.mark.parametrize("damage", [b"", b"junk", None, "cut", "flipped"])
def test_a_damaged_file_is_not_read(tmp_path: Path, damage: bytes | str | None) -> None:
    first = Engine(tmp_path)
    assert first.holds(beginning())
    (file,) = tmp_path.iterdir()
    whole = file.read_bytes()
    match damage:
        case "cut":
            file.write_bytes(whole[:-1])
        case "flipped":
            file.write_bytes(whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:])
        case None:
            file.unlink()
            file.mkdir()
        case _:
            assert isinstance(damage, bytes)
            file.write_bytes(damage)
    second = Engine(tmp_path)
    assert second.holds(version(DTYPE, 1))
    assert second.loads == TRACED
    assert damage is None or file.read_bytes() == whole


def test_it_needs_no_disk(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    engine = Engine(tmp_path / "file" / "below")
    assert engine.holds(version(DTYPE, 1))
    assert engine.direct.is_direct


def test_the_oldest_files_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.rollout_workers.engines.weight_loading.weight_placement.MOST_FILES", 2)
    engine = Engine(tmp_path)
    assert engine.holds(beginning())
    (first,) = tmp_path.iterdir()
    os.utime(first, (0, 0))
    for kind in ("b", "c"):
        assert Engine(tmp_path, kind).holds(beginning())
    assert len(list(tmp_path.iterdir())) == 2
    assert not first.exists()


def test_the_directory_is_that_of_the_users_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_directory() == tmp_path / "headway"
    for unset in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", unset)
        assert cache_directory() == Path.home() / ".cache" / "headway"
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("os.getuid", lambda: 2**31 - 2)  # a user of whom the system knows nothing
    assert placement_cache("engine 1") is None
