"""Masters and moments are saved by Hugging Face name and loaded under any layout; first weights are read the same way.

    param/  exp_avg/  exp_avg_sq/    fp32 safetensors files, each rank's own; together they name every tensor
    optimizer.json                   how many updates the moments have seen

So the training state is three sets of Hugging Face tensors, which every layout reads as it reads first weights.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from headway.broker.errors import ConfigError
from headway.learner.backends.hugging_face_files import Read, TensorFiles, file_parts
from headway.learner.backends.saving import NamedTensors, snapshot_gathered
from headway.learner.checkpoints.checkpoint import CheckpointError

from .model import PackedGpt
from .optimizer import MASTER, MOMENTS, MasterState, ShardedAdam, replicas_of
from .shards import HeldBinding

OPTIMIZER_FILE = "optimizer.json"


class OptimizerProgress(msgspec.Struct, frozen=True):
    """The content of optimizer.json."""

    step: int


@torch.no_grad()
def fill_frozen(chunks: Sequence[PackedGpt], frozen: Sequence[HeldBinding], read: Read) -> None:
    """Set this rank's parameters that no update changes, which have neither masters nor moments."""
    for parameter, its_places in _by_parameter(chunks, [place for place in frozen if place.is_here]):
        for place in its_places:
            place.view(parameter).copy_(place.split(read))


class TrainingState:
    """All state that an update changes."""

    def __init__(self, chunks: Sequence[PackedGpt], trained: Sequence[HeldBinding], adam: ShardedAdam) -> None:
        self._adam = adam
        self._masters = MasterState(adam)
        self._names = {name for place in trained for name in place.binding.names}
        self._held = _by_parameter(chunks, [place for place in trained if place.is_here])

    @torch.no_grad()
    def read(self, read: Read, key: str = MASTER) -> None:
        """Set one kind of state; masters are rounded into the parameters. Collective."""
        for parameter, its_places in self._held:
            whole = torch.empty(parameter.shape, dtype=torch.float32)
            for place in its_places:
                place.view(whole).copy_(place.split(read))
            self._masters.assign(parameter, key, whole)
        if key == MASTER:
            self._adam.masters_to_model()

    def snapshot(self, directory: Path, rank: int, *, is_copied: bool) -> list[Callable[[], object]]:
        """Return a function that writes this rank's share of the state. Collective."""
        writes: list[Callable[[], object]] = [
            snapshot_gathered(self._own_share(key), partial(_write, directory / key, rank), is_copied=is_copied)
            for key in (MASTER, *MOMENTS)
        ]
        if rank == 0:
            progress = msgspec.json.encode(OptimizerProgress(self._masters.step()))
            writes.append(partial((directory / OPTIMIZER_FILE).write_bytes, progress))
        return writes

    def load(self, directory: Path) -> None:
        """Load the state. Collective. Raises CheckpointError where `directory` holds another model's state."""
        try:
            progress = msgspec.json.decode((directory / OPTIMIZER_FILE).read_bytes(), type=OptimizerProgress)
            for key in (MASTER, *MOMENTS):
                self.read(self._open(directory / key), key)
        except (OSError, RuntimeError, ConfigError, msgspec.DecodeError) as error:
            raise CheckpointError(
                f"{directory} does not hold a training state that fits this model: {str(error).rstrip('.')}. Resume "
                "with the `model` section and the backend that the checkpoint was written with."
            ) from error
        self._masters.set_step(progress.step)

    def _open(self, directory: Path) -> TensorFiles:
        """Open the files. Raises ConfigError on every rank if the names are not the whole model's."""
        files = TensorFiles(sorted(directory.glob("*.safetensors")))
        missing, foreign = self._names - files.names, files.names - self._names
        if missing or foreign:
            raise ConfigError(
                f"{len(missing)} of the model's tensors are missing and {len(foreign)} are another's, such as"
                f" {min(missing | foreign)}."
            )
        return files

    def _own_share(self, key: str) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors that this rank writes; ranks that hold the same take turns. Collective."""
        for number, (parameter, its_places) in enumerate(self._held):
            whole = self._masters.whole(parameter, key)
            replicas = replicas_of(parameter)
            for place in its_places:
                tensors = () if place.is_copy else place.join(place.view(whole))
                if _turn(place.group, replicas, number):
                    yield from zip(place.binding.names, tensors, strict=False)


def _turn(sharing: dist.ProcessGroup, replicas: dist.ProcessGroup, number: int) -> bool:
    """Return whether this rank writes parameter `number`, among all ranks that have joined it."""
    own = replicas.rank() * sharing.size() + sharing.rank()
    return own == number % (replicas.size() * sharing.size())


def _by_parameter(
    chunks: Sequence[PackedGpt], here: Sequence[HeldBinding]
) -> list[tuple[torch.nn.Parameter, list[HeldBinding]]]:
    """Return each parameter of this rank with the bindings that fill it; several experts share a parameter."""
    key = lambda place: (place.chunk, place.binding.parameter)  # noqa: E731
    return [
        (chunks[chunk].get_parameter(name), list(run))
        for (chunk, name), run in itertools.groupby(sorted(here, key=key), key=key)
    ]


def _write(directory: Path, rank: int, tensors: NamedTensors) -> None:
    from safetensors.torch import save_file

    directory.mkdir(exist_ok=True)
    for number, part in enumerate(file_parts(tensors)):
        save_file(part, directory / f"rank_{rank:05d}_{number:05d}.safetensors")
