"""fp32 parameters and AdamW's moments, which a checkpoint holds besides the Hugging Face model.

Every rank writes its shards by torch.distributed.checkpoint, so another number of ranks can load them. torch pickles
where the shards lie (`.metadata`), and would run whatever a changed file says: `_Reader` builds nothing but that.
"""

import pickle
import warnings
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.storage import WriteResult

from headway.learner.backends.saving import in_host_memory
from headway.learner.checkpoints.checkpoint import CheckpointError

from .optimizer import allocate_moments
from .quantized_base import is_quantized
from .sharding import local

STATE_FOLDER = "training_state"
MOST_METADATA_BYTES = 1 << 30
"""The largest `.metadata` that is read: a hundred bytes for each shard of each tensor."""
_BUILT: dict[tuple[str, str], Any] = {
    **{
        (one.__module__, one.__qualname__): one
        for one in (Metadata, MetadataIndex, StorageMeta, TensorStorageMetadata, TensorProperties, ChunkStorageMetadata)
    },
    **{("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
    (_MEM_FORMAT_ENCODING.__module__, _MEM_FORMAT_ENCODING.__qualname__): _MEM_FORMAT_ENCODING,
    (_StorageInfo.__module__, _StorageInfo.__qualname__): _StorageInfo,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    **{(module, "PosixPath"): Path for module in ("pathlib", "pathlib._local")},
}
"""All that a training state's metadata consists of, by module and name. None of it runs code or opens anything."""

Tensors = dict[str, torch.Tensor]


def _tensors(model: nn.Module, optimizer: torch.optim.AdamW) -> Tensors:
    """The live tensors by name: saving reads them, loading writes into them. What is frozen is as it was."""
    allocate_moments(optimizer)
    buffers = ((name, buffer) for name, buffer in model.named_buffers() if not is_quantized(name))
    tensors: Tensors = {f"model.{name}": buffer for name, buffer in buffers}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        tensors[f"model.{name}"] = parameter.detach()
        for key, value in optimizer.state[parameter].items():
            tensors[f"optimizer.{name}.{key}"] = value
    return tensors


class StagedState:
    """Parameters and moments that are about to be written.

    Its construction is collective and settles which rank writes which shard, so that writing needs no other rank.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.AdamW, directory: Path, *, is_copied: bool) -> None:
        tensors = _tensors(model, optimizer)
        self._folder = directory / STATE_FOLDER
        self._writer = FileSystemWriter(self._folder)
        self._planner = _Planner()
        with warnings.catch_warnings():
            _silence_torch()
            self._plan, self._metadata = self._planned(tensors)
        if is_copied:
            self._writer.per_thread_copy_ahead = 0  # nothing is left to be fetched from a device
            self._planner.copies = dict(in_host_memory((name, local(tensor)) for name, tensor in tensors.items()))
        self._results: list[WriteResult] = []

    def _planned(self, tensors: Tensors) -> tuple[SavePlan, Metadata]:
        """Return this rank's part of the plan, and the metadata of the whole. Every rank makes the same plan for
        all."""
        rank = dist.get_rank()
        self._planner.set_up_planner(tensors, self._writer.storage_meta(), is_coordinator=rank == 0)
        plans: list[SavePlan] = [SavePlan([])] * dist.get_world_size()
        dist.all_gather_object(plans, self._planner.create_local_plan())
        plans, metadata = self._planner.create_global_plan(plans)
        return self._planner.finish_plan(self._writer.prepare_global_plan(plans)[rank]), metadata

    def write(self) -> None:
        """Write this rank's shards."""
        self._folder.mkdir(exist_ok=True)
        self._results = self._writer.write_data(self._plan, self._planner).wait()

    def complete(self) -> None:
        """Let rank 0 write where in which file each shard is. Collective."""
        is_first = dist.get_rank() == 0
        everyones: list[list[WriteResult]] | None = [[]] * dist.get_world_size() if is_first else None
        dist.gather_object(self._results, everyones)
        if everyones is not None:
            self._writer.finish(self._metadata, everyones)


class _Planner(DefaultSavePlanner):
    """A planner that reads the copies, if there are any, in the place of the live model, which has trained on."""

    copies: Tensors | None = None

    def lookup_object(self, index: MetadataIndex) -> Any:
        return super().lookup_object(index) if self.copies is None else self.copies[index.fqn]


class _MetadataUnpickler(pickle._Unpickler):  # the one whose steps can be refused
    """Builds the objects of `_BUILT`, and refuses to look up or to change anything else."""

    dispatch: ClassVar[dict[int, Any]] = dict(pickle._Unpickler.dispatch)

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _BUILT:
            raise CheckpointError(f"it names {module}.{name}, which no training state has")
        return _BUILT[module, name]

    def _build(self) -> None:
        changed = type(self.stack[-2])  # type: ignore[attr-defined]
        if changed not in (Metadata, MetadataIndex, StorageMeta, *_VALUES):
            raise CheckpointError("it changes what is no part of it")
        self.load_build()  # type: ignore[attr-defined]

    dispatch[pickle.BUILD[0]] = _build


_VALUES = (TensorStorageMetadata, TensorProperties, ChunkStorageMetadata, _StorageInfo)


class _Reader(FileSystemReader):
    """Reads `.metadata` without running anything, and shards of this folder alone."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = Path(self.path, ".metadata")
        if (size := path.stat().st_size) > MOST_METADATA_BYTES:
            raise CheckpointError(f".metadata has {size >> 20} MiB; at most {MOST_METADATA_BYTES >> 20} are read")
        with path.open("rb") as file:
            found = _MetadataUnpickler(file).load()
        if type(found) is not Metadata or not all(
            type(one) is TensorStorageMetadata for one in found.state_dict_metadata.values()
        ):
            raise CheckpointError(".metadata describes something else than tensors")
        for place in (found.storage_data or {}).values():
            if type(place) is not _StorageInfo or Path(place.relative_path).name != place.relative_path:
                raise CheckpointError(".metadata names a file outside of its folder")
        found.storage_meta = StorageMeta(load_id=self.load_id)
        return found


def load_state(model: nn.Module, optimizer: torch.optim.AdamW, directory: Path) -> None:
    """Load parameters and moments. Collective. Raises CheckpointError where `directory` does not fit."""
    try:
        with warnings.catch_warnings():
            _silence_torch()
            load(_tensors(model, optimizer), storage_reader=_Reader(directory / STATE_FOLDER))
    except (OSError, CheckpointException) as error:
        raise CheckpointError(
            f"{directory} does not hold a training state that fits this model: {_first_line(error)}. "
            "Resume with the `model` section that the checkpoint was written with."
        ) from error


def _silence_torch() -> None:
    """Silence torch.distributed.checkpoint's warnings about its own deprecated calls, which a user cannot mend."""
    warnings.simplefilter("ignore", FutureWarning)
    warnings.simplefilter("ignore", UserWarning)


def _first_line(error: BaseException) -> str:
    if isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    if isinstance(error, pickle.UnpicklingError | UnicodeDecodeError | EOFError):  # torch advises to unpickle it then
        return "a file of it is damaged"
    return str(error).strip().splitlines()[0]
