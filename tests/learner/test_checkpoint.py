import logging
import os
import pickle
import random
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata
from transformers import AutoModelForCausalLM, AutoTokenizer

from headway.learner.backends import open_backend
from headway.learner.backends.fsdp import optimizer
from headway.learner.backends.fsdp.backend import FsdpBackend
from headway.learner.batching.packing import pack
from headway.learner.checkpoint import (
    MOST_DESCRIBING_BYTES,
    CheckpointError,
    CheckpointStore,
    LearnerState,
    add_digests,
    load_first,
)
from headway.learner.ranks import Ranks
from headway.learner.stages.stage_checkpoints import CheckpointWriter
from tests.broker.topologies import wait_until
from tests.damage import flip_bits
from tests.learner.full_disk import no_file_larger_than
from tests.learner.tiny import OPTIMIZER, model_config, ratio_loss, sequences


def open_tiny(seed: int = 0, architecture: str = "qwen3_moe") -> FsdpBackend:
    backend = open_backend("fsdp", model_config(architecture), OPTIMIZER, seed=seed)
    assert isinstance(backend, FsdpBackend)
    return backend


def train(backend: FsdpBackend, steps: range) -> None:
    """Train on batches and with learning rates that depend on the process's generators."""
    for _ in steps:
        given = sequences([9, 14, 6], seed=int(np.random.randint(1000)))
        batches = pack(given, 0, 1, 16)
        rate = 1e-3 * (1 + random.random() + torch.rand(()).item())
        backend.step(batches, ratio_loss(batches, 10.0), 1.0, rate)


def everything(backend: FsdpBackend) -> list[torch.Tensor]:
    """Return parameters, moments, step counters and the next numbers of the generators."""
    moments = [value for state in backend._optimizer.state.values() for value in state.values()]
    parameters = [tensor for _, tensor in backend.named_tensors()]
    draws = torch.tensor([random.gauss(0, 1), np.random.standard_normal(), torch.rand(()).item()], dtype=torch.float64)
    return [getattr(tensor, "full_tensor", tensor.clone)().clone() for tensor in [*parameters, *moments]] + [draws]


def seed_everything() -> None:
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize("steps_before", [0, 2])
def test_a_resumed_run_ends_bit_for_bit_where_an_uninterrupted_one_does(
    architecture: str, steps_before: int, tmp_path: Path
) -> None:
    seed_everything()
    random.gauss(0, 1)
    np.random.standard_normal()  # both generators now hold a second normal back
    backend = open_tiny(5, architecture)
    train(backend, range(steps_before))
    backend.save(tmp_path / "saved")
    train(backend, range(2))
    uninterrupted = everything(backend)
    resumed = open_tiny(99, architecture)
    torch.manual_seed(77)
    resumed.load(tmp_path / "saved")
    train(resumed, range(2))
    for got, expected in zip(everything(resumed), uninterrupted, strict=True):
        assert torch.equal(got, expected)


def test_checkpoint_is_a_hugging_face_model(tmp_path: Path) -> None:
    backend = open_tiny()
    train(backend, range(1))
    backend.save(tmp_path / "saved")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32).eval()
    (batch,) = pack(sequences([17]), 0, 1, 100)
    logits = model(input_ids=batch.token_ids_T[None]).logits[0, :-1]
    expected = logits.log_softmax(-1).gather(1, batch.token_ids_T[1:, None])[:, 0]
    torch.testing.assert_close(backend.logprobs([batch], 1.0)[0][1:], expected, rtol=0, atol=1e-5)
    assert AutoTokenizer.from_pretrained(tmp_path / "saved")("4*5").input_ids == [4, 12, 5]
    assert model.config.eos_token_id == 18
    again = open_tiny(1)
    again.load(tmp_path / "saved")
    weights = model.state_dict()
    for name, tensor in again._policy.model.state_dict().items():
        assert torch.equal(tensor, weights[name])


def state(incarnation: int, step: int) -> LearnerState:
    return LearnerState(
        incarnation=incarnation,
        step=step,
        cursor={"epoch": 1, "position": 40, "order": [3, 1]},
    )


@pytest.fixture(scope="module")
def backend() -> FsdpBackend:
    return open_tiny()


def write(store: CheckpointStore, backend: FsdpBackend, state: LearnerState, *, asynchronous: bool = False) -> Path:
    writer = CheckpointWriter(store, Ranks.of(backend), asynchronous=asynchronous)
    writer.begin({"": backend}, state)
    assert writer.wait() == state.step
    return store.path(state.incarnation, state.step)


def names(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.glob("*/*"))


def test_latest_is_the_highest_incarnation_then_step(backend: FsdpBackend, tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints", keep=10)
    assert store.latest() is None
    for incarnation, step in ((1, 4), (1, 20), (2, 10), (2, 9)):
        write(store, backend, state(incarnation, step))
    latest = store.latest()
    assert latest is not None
    assert latest.path == tmp_path / "checkpoints" / "2" / "step_10"
    assert latest.state == state(2, 10)


def test_the_lineage_leaves_out_what_a_later_incarnation_abandoned(backend: FsdpBackend, tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=10)
    assert (store.lineage(), store.oldest_step()) == ([], 0)
    for incarnation, step in ((1, 4), (1, 8), (1, 20), (2, 8), (2, 12), (3, 16)):
        write(store, backend, state(incarnation, step))
    marks = [(one.state.incarnation, one.state.step) for one in store.lineage()]
    assert marks == [(1, 4), (2, 8), (2, 12), (3, 16)]
    assert store.oldest_step() == 4


def test_only_the_newest_are_kept(backend: FsdpBackend, tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    for incarnation, step in ((1, 10), (1, 20), (2, 15), (2, 30)):
        write(store, backend, state(incarnation, step))
    assert names(tmp_path) == ["2/step_15", "2/step_30"]
    write(store, backend, state(2, 30))
    assert names(tmp_path) == ["2/step_15", "2/step_30"]


@pytest.mark.parametrize("damage", ["no state", "no list", "short file", "missing file", "unfinished"])
def test_damaged_checkpoints_are_skipped_and_said_so(
    damage: str, backend: FsdpBackend, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    whole, broken = write(store, backend, state(1, 10)), write(store, backend, state(1, 20))
    match damage:
        case "no state":
            (broken / "learner.json").write_bytes(b"{")
        case "no list":
            (broken / "files.json").unlink()
        case "short file":
            with (broken / "model.safetensors").open("r+b") as file:
                file.truncate(100)
        case "missing file":
            shutil.rmtree(broken / "training_state")
        case "unfinished":
            broken.rename(broken.with_name(".step_20.partial"))
    with caplog.at_level(logging.WARNING):
        latest = store.latest()
    assert latest is not None
    assert latest.path == whole
    assert (f"{broken} is not whole" in caplog.text) is (damage != "unfinished")
    write(store, backend, state(1, 30))
    assert names(tmp_path) == ["1/step_10", "1/step_30"]


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("name", ["training_state/__0_0.distcp", "training_state/.metadata", "rng/rank_0.msgpack"])
def test_the_newest_checkpoint_with_the_bytes_that_were_written_is_loaded(
    asynchronous: bool, name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    backend, store = open_tiny(), CheckpointStore(tmp_path, keep=2)
    whole = write(store, backend, state(1, 10))
    expected = everything(backend)
    train(backend, range(1))
    broken = write(store, backend, state(1, 20), asynchronous=asynchronous)
    wait_until((broken / "digests.json").exists)
    flip_bits(broken / name)
    with caplog.at_level(logging.WARNING):
        found = load_first(store.lineage()[::-1], backend.load, Ranks.of(backend))
    assert (found.path, found.state) == (whole, state(1, 10))
    assert f"{broken} is damaged: {name} has other bytes than were written. Going back" in caplog.text
    for got, wanted in zip(everything(backend)[:-1], expected[:-1], strict=True):
        assert torch.equal(got, wanted)
    flip_bits(whole / name)
    with pytest.raises(CheckpointError, match=rf"{broken} is damaged: {name} .* None of the 1 before it .*--overwrite"):
        load_first(store.lineage()[::-1], backend.load, Ranks.of(backend))


class OfTwo(Ranks):
    """Rank 0 of two; the other rank cannot load the first checkpoint."""

    def __init__(self, failure: int) -> None:
        super().__init__(rank=0, world_size=2, replica=0, replicas=1, is_lead=True)
        self._asked = -1
        self._failure = failure

    def any(self, claim: bool) -> bool:
        self._asked += 1
        return claim or self._asked == self._failure


@pytest.mark.parametrize("failure", [0, 1])  # its share of the files is damaged; its load fails
def test_what_one_rank_cannot_load_none_goes_on_from(failure: int, backend: FsdpBackend, tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    for step in (10, 20):
        write(store, backend, state(1, step))
    found = load_first(store.lineage()[::-1], backend.load, OfTwo(failure))
    assert found.state.step == 10
    with pytest.raises(CheckpointError, match="another rank says why"):
        load_first([found], backend.load, OfTwo(failure))


def test_damage_without_digests_is_told_in_our_words(backend: FsdpBackend, tmp_path: Path) -> None:
    path = write(CheckpointStore(tmp_path, keep=1), backend, state(1, 10))
    (path / "digests.json").unlink()
    file = path / "training_state" / "__0_0.distcp"
    file.write_bytes(file.read_bytes().replace(b"torch._utils", b"torch.nowhere"[:12]))
    with pytest.raises(CheckpointError, match="a file of it is damaged") as caught:
        load_first(CheckpointStore(tmp_path, keep=1).lineage(), backend.load, Ranks.of(backend))
    assert "weights_only" not in str(caught.value)


class Call:
    """Pickled, it is a call of a function."""

    def __init__(self, call: Callable[..., Any], *arguments: Any) -> None:
        self._call = call, arguments

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self._call


def a_call(metadata: Metadata, mark: Path) -> bytes:
    return pickle.dumps(Call(os.mkdir, str(mark)))


def a_call_by_its_path(metadata: Metadata, mark: Path) -> bytes:
    """Reach a function through one of the classes that are known."""
    known = b"ctorch.distributed.checkpoint.filesystem\n_StorageInfo.__init__.__globals__\n."
    return b"\x80\x04" + known


def a_call_within_the_metadata(metadata: Metadata, mark: Path) -> bytes:
    metadata.planner_data = Call(os.mkdir, str(mark))
    return pickle.dumps(metadata)


def another_class(metadata: Metadata, mark: Path) -> bytes:
    """Set an attribute of a class itself."""
    return b"\x80\x02ctorch.distributed.checkpoint.metadata\nMetadata\n(N}X\x01\x00\x00\x00xK\x01stb."


def bytes_that_torch_unpickles(metadata: Metadata, mark: Path) -> bytes:
    metadata.state_dict_metadata[next(iter(metadata.state_dict_metadata))] = BytesStorageMetadata()
    return pickle.dumps(metadata)


def a_file_outside(metadata: Metadata, mark: Path) -> bytes:
    """Name files that hold what is asked for, and lie beside the folder."""
    assert metadata.storage_data is not None
    (folder,) = mark.parent.glob("*/*/training_state")
    for place in metadata.storage_data.values():
        shutil.copy(folder / place.relative_path, folder.parent)
        place.relative_path = f"../{place.relative_path}"
    return pickle.dumps(metadata)


def no_metadata(metadata: Metadata, mark: Path) -> bytes:
    return pickle.dumps({"state_dict_metadata": {}})


@pytest.mark.parametrize("has_digests", [False, True])
@pytest.mark.parametrize(
    "written",
    [
        a_call,
        a_call_by_its_path,
        a_call_within_the_metadata,
        another_class,
        bytes_that_torch_unpickles,
        a_file_outside,
        no_metadata,
    ],
)
def test_what_stands_in_a_checkpoint_runs_nothing(
    written: Callable[[Metadata, Path], bytes], has_digests: bool, backend: FsdpBackend, tmp_path: Path
) -> None:
    path = write(CheckpointStore(tmp_path, keep=1), backend, state(1, 10))
    file, mark = path / "training_state" / ".metadata", tmp_path / "ran"
    file.write_bytes(written(FileSystemReader(file.parent).read_metadata(), mark))
    if has_digests:  # the one who changed the file has changed its digest, too
        (path / "digests.json").unlink()
        add_digests(path)
    else:
        (path / "digests.json").unlink()
    with pytest.raises(CheckpointError, match="does not hold a training state"):
        backend.load(path)
    assert not mark.exists()
    assert not hasattr(Metadata, "x")


@pytest.mark.parametrize("name", ["files.json", "learner.json", "digests.json"])
def test_what_describes_a_checkpoint_is_not_read_beyond_its_bound(
    name: str, backend: FsdpBackend, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    path = write(store, backend, state(1, 10))
    write(store, backend, state(1, 20))
    os.truncate(store.path(1, 20) / name, MOST_DESCRIBING_BYTES + 1)
    tracemalloc.start()
    try:
        found = load_first(store.lineage()[::-1], backend.load, Ranks.of(backend))
        assert tracemalloc.get_traced_memory()[1] < MOST_DESCRIBING_BYTES / 8
    finally:
        tracemalloc.stop()
    assert found.path == path
    assert f"step_20/{name}" in caplog.text


def test_the_metadata_of_a_training_state_is_not_read_beyond_its_bound(
    backend: FsdpBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(CheckpointStore(tmp_path, keep=1), backend, state(1, 10))
    file = path / "training_state" / ".metadata"
    (path / "digests.json").unlink()
    monkeypatch.setattr(optimizer, "MOST_METADATA_BYTES", file.stat().st_size)
    backend.load(path)
    os.truncate(file, file.stat().st_size + 1)  # behind the end of the pickle
    with pytest.raises(CheckpointError, match="does not hold a training state"):
        backend.load(path)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("room", [0, 3000, 40_000])
def test_a_full_disk_costs_nothing_that_was_there(
    room: int, asynchronous: bool, backend: FsdpBackend, tmp_path: Path
) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    write(store, backend, state(1, 10))
    with no_file_larger_than(room), pytest.raises(CheckpointError, match="Older checkpoints are untouched"):
        write(store, backend, state(1, 20), asynchronous=asynchronous)
    latest = store.latest()
    assert latest is not None
    assert latest.state == state(1, 10)
    assert names(tmp_path) == ["1/step_10"]
    write(store, backend, state(1, 20))
    assert names(tmp_path) == ["1/step_20"]


def test_another_model_is_refused_in_words(backend: FsdpBackend, tmp_path: Path) -> None:
    backend.save(tmp_path / "moe")
    with pytest.raises(CheckpointError, match="does not hold a training state that fits this model"):
        open_tiny(0, "qwen3").load(tmp_path / "moe")
    with pytest.raises(CheckpointError, match="does not hold"):
        backend.load(tmp_path / "nowhere")
