"""Models are written to the disk while training goes on.

The process-wide random generators of every rank are saved beside them, one file for each rank.

    snapshot  collective, between two steps: copies the checkpoint's content into CPU memory
    write     one rank's files, on a thread of its own
    finish    collective, between two later steps: once all ranks have written, the directory gets its name

The thread of torch's own `async_save` plans and finishes by collectives: two threads of a rank would use process groups
at once, in an order that ranks do not share. Here the thread only touches files, and ranks agree in collectives between
steps. Hugging Face files and critics are written in the same way.
"""

import random
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Executor, Future
from pathlib import Path

import msgspec
import numpy as np
import torch

from headway.learner.checkpoint import caught, could_not_write, partial_path, put_in_place, sync_tree
from headway.learner.ranks import Ranks

from .base import CheckpointPart, TrainableModel

NamedTensors = Iterable[tuple[str, torch.Tensor]]


class SnapshotWriter:
    """One directory that all ranks fill. All calls are collective."""

    def __init__(
        self, ranks: Ranks, directory: Path, models: Mapping[str, CheckpointPart], background: Executor | None
    ) -> None:
        """Take snapshots of `models`, each for a folder of its name, and begin to write them in `background`; without
        one, write them all now."""
        self._ranks = ranks
        self._directory = directory
        self._partial = partial_path(directory)
        self._agree(caught(lambda: self._make_folders(models)) if ranks.is_first else None)
        is_copied = background is not None
        self._snapshots = [model.snapshot(self._partial / name, is_copied=is_copied) for name, model in models.items()]
        self._written = background.submit(self._write) if background else _done_now(self._write)

    def is_written(self) -> bool:
        """True once every rank has finished or failed; `finish` will not wait then."""
        return not self._ranks.any(not self._written.done())

    def finish(self, seal: Callable[[Path], None] = lambda _: None) -> None:
        """Give the directory its name and make it durable, after `seal` has added rank 0's last files to it.

        Raises CheckpointError on every rank if one could not write, and removes the directory.
        """
        self._agree(self._written.exception())
        for snapshot in self._snapshots:
            self._agree(caught(snapshot.complete))
        self._agree(caught(lambda: self._put_in_place(seal)) if self._ranks.is_first else None)

    def _make_folders(self, models: Iterable[str]) -> None:
        shutil.rmtree(self._partial, ignore_errors=True)
        for name in models:
            (self._partial / name).mkdir(parents=True, exist_ok=True)

    def _write(self) -> None:
        failures = [caught(write) for snapshot in self._snapshots for write in snapshot.writes]
        for failure in filter(None, failures):
            raise failure
        sync_tree(self._partial)

    def _put_in_place(self, seal: Callable[[Path], None]) -> None:
        seal(self._partial)
        put_in_place(self._partial, self._directory)

    def _agree(self, failure: BaseException | None) -> None:
        if not self._ranks.any(failure is not None):
            return
        if self._ranks.is_first:
            shutil.rmtree(self._partial, ignore_errors=True)
        raise could_not_write(self._directory, failure) from failure


def save(model: TrainableModel, directory: Path) -> None:
    """Collective; durable when it returns. `directory` appears with everything in it, or not at all."""
    SnapshotWriter(Ranks.of(model), directory, {"": model}, background=None).finish()


def in_host_memory(tensors: NamedTensors) -> list[tuple[str, torch.Tensor]]:
    """Yield contiguous copies in CPU memory. Pages for a GPU's tensors are locked, so that it sends at full bus
    speed."""
    copies = [(name, _host_copy(tensor)) for name, tensor in tensors]
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return copies


def _host_copy(tensor: torch.Tensor) -> torch.Tensor:
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return copy.copy_(tensor, non_blocking=True)


def snapshot_gathered(
    tensors: NamedTensors, write: Callable[[NamedTensors], None] | None, *, is_copied: bool
) -> Callable[[], None]:
    """Return a function that passes `write` the tensors. All ranks gather them: now if `is_copied`, else in its call.

    A rank that writes nothing (None), or whose disk is full, takes part to the end: the others would wait for it.
    """
    if is_copied and write is None:
        tensors = deque(tensors, maxlen=0)
    elif is_copied:
        tensors = in_host_memory(tensors)

    def write_gathered() -> None:
        try:
            if write is not None:
                write(tensors)
        finally:
            deque(tensors, maxlen=0)

    return write_gathered


def _done_now(work: Callable[[], None]) -> Future[None]:
    future: Future[None] = Future()
    failure = caught(work)
    future.set_exception(failure) if failure else future.set_result(None)
    return future


RNG_FOLDER = "rng"


class RngState(msgspec.Struct, frozen=True, kw_only=True):
    """The states of one rank's process-wide generators."""

    torch_cpu: bytes
    torch_cuda: bytes
    """The state of the rank's own device; empty on a CPU."""
    numpy_key: list[int]
    numpy_position: int
    numpy_gauss: tuple[int, float]
    python_version: int
    python_key: list[int]
    python_gauss: float | None


def capture_rng(device: torch.device) -> RngState:
    _, numpy_key, numpy_position, has_gauss, cached = np.random.get_state(legacy=True)
    python_version, python_key, python_gauss = random.getstate()
    is_cuda = device.type == "cuda"
    return RngState(
        torch_cpu=torch.get_rng_state().numpy().tobytes(),
        torch_cuda=torch.cuda.get_rng_state(device).numpy().tobytes() if is_cuda else b"",
        numpy_key=np.asarray(numpy_key).tolist(),
        numpy_position=int(numpy_position),
        numpy_gauss=(int(has_gauss), float(cached)),
        python_version=python_version,
        python_key=list(python_key),
        python_gauss=python_gauss,
    )


def restore_rng(state: RngState, device: torch.device) -> None:
    torch.set_rng_state(torch.frombuffer(bytearray(state.torch_cpu), dtype=torch.uint8))
    if state.torch_cuda and device.type == "cuda":
        torch.cuda.set_rng_state(torch.frombuffer(bytearray(state.torch_cuda), dtype=torch.uint8), device)
    key = np.asarray(state.numpy_key, dtype=np.uint32)
    np.random.set_state(("MT19937", key, state.numpy_position, *state.numpy_gauss))
    random.setstate((state.python_version, tuple(state.python_key), state.python_gauss))


def snapshot_rng(directory: Path, rank: int, device: torch.device) -> Callable[[], None]:
    """Return a function that writes the generators' states as they are now."""
    encoded = msgspec.msgpack.encode(capture_rng(device))
    path = directory / RNG_FOLDER / f"rank_{rank}.msgpack"

    def write() -> None:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(encoded)

    return write


def load_rng(directory: Path, rank: int, device: torch.device) -> None:
    """Restore this rank's generators. Ranks that the saving run did not have keep theirs."""
    path = directory / RNG_FOLDER / f"rank_{rank}.msgpack"
    if path.exists():
        restore_rng(msgspec.msgpack.decode(path.read_bytes(), type=RngState), device)
