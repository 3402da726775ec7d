"""One rank that saves while it trains, run by torchrun, for each backend named.

python -m torch.distributed.run --nproc-per-node 2 -m tests.learner.async_saving_rank DIRECTORY fsdp megatron
"""

import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file

from headway.learner.backends import open_backend
from headway.learner.backends.base import Backend, Snapshot
from headway.learner.batching.packing import pack
from headway.learner.checkpoint import CheckpointError, CheckpointStore, LearnerState
from headway.learner.config import LayoutConfig
from headway.learner.ranks import Ranks
from headway.learner.stages.stage_checkpoints import CheckpointWriter
from tests.learner.tiny import OPTIMIZER, model_config, ratio_loss, sequences

LAYOUTS = {"fsdp": LayoutConfig(), "megatron": LayoutConfig(tensor=2)}


class Held:
    """A backend whose last rank waits for the test before it writes to its disk, or fails to write."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.gate = threading.Event()
        self.is_broken = False

    def snapshot(self, directory: Path, *, is_copied: bool) -> Snapshot:
        snapshot = self._backend.snapshot(directory, is_copied=is_copied)
        return Snapshot((self._wait, *snapshot.writes), snapshot.complete)

    def load(self, directory: Path) -> None:
        self._backend.load(directory)

    def _wait(self) -> None:
        if self._backend.rank == self._backend.world_size - 1:
            assert self.gate.wait(240)
            if self.is_broken:
                raise OSError("No space left on device")


def open_tiny(kind: str, seed: int) -> Backend:
    opened = open_backend(kind, model_config("qwen3", tied=False), OPTIMIZER, seed=seed, layout=LAYOUTS[kind])
    assert not hasattr(opened, "values")
    return opened


def train(backend: Backend, numbers: range) -> None:
    for number in numbers:
        packable = sequences([20, 6, 7, 19], seed=number)
        batches = pack(packable, backend.replica, backend.replicas, 40)
        backend.step(batches, ratio_loss(batches, 10.0), 1.0, 1e-3)


def tensors(backend: Backend) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in backend.named_tensors()}


def run(kind: str, root: Path) -> None:
    backend = open_tiny(kind, 3)
    held, ranks = Held(backend), Ranks.of(backend)
    store = CheckpointStore(root / "checkpoints", keep=5)
    writer = CheckpointWriter(store, ranks, asynchronous=True)
    train(backend, range(2))
    at_two = tensors(backend)
    writer.begin({"": held}, LearnerState(incarnation=1, step=2))
    train(backend, range(2, 4))
    assert writer.poll() is None
    assert store.latest() is None
    held.gate.set()
    assert writer.wait() == 2
    assert writer.wait() is None
    _fails_everywhere(writer, held, store)
    resumed = open_tiny(kind, 99)
    resumed.load(store.path(1, 2))
    train(resumed, range(2, 4))
    for name, expected in tensors(backend).items():
        assert torch.equal(tensors(resumed)[name], expected), name
    if ranks.is_first:
        save_file(at_two, root / "two.safetensors")


def _fails_everywhere(writer: CheckpointWriter, held: Held, store: CheckpointStore) -> None:
    held.is_broken = True
    writer.begin({"": held}, LearnerState(incarnation=1, step=4))
    with pytest.raises(CheckpointError, match="Older checkpoints are untouched"):
        writer.wait()
    dist.barrier()
    assert [path.name for path in store.path(1, 2).parent.iterdir()] == ["step_2"]


def main(directory: Path, kinds: list[str]) -> None:
    torch.set_num_threads(1)
    for kind in kinds:
        run(kind, directory / kind)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
