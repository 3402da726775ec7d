"""AdamW over shards: torch's own, or one whose moments live in CPU memory.

`RoundedWeights` are a single rank's weights in bfloat16, beside the fp32 masters that the optimizer updates. A
checkpoint holds the fp32 parameters and AdamW's moments besides the Hugging Face model (`StagedState`).
"""

import functools
import pickle
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from headway.learner.backends.quantization import is_quantized
from headway.learner.backends.snapshots import in_host_memory
from headway.learner.checkpoint import CheckpointError
from headway.learner.config import OptimizerConfig

from .sharding import local

MOMENTS = ("exp_avg", "exp_avg_sq")

STREAMS = 2
"""One stream sends moments back to the CPU while the other fetches the next ones, so both directions are busy."""


def open_optimizer(
    parameters: Sequence[torch.Tensor], config: OptimizerConfig, *, on_cpu: bool, offload: bool
) -> torch.optim.AdamW:
    """Return AdamW with a learning rate of 0, which every step sets."""
    kind = OffloadedAdamW if offload else torch.optim.AdamW
    return kind(
        parameters,
        lr=0.0,
        betas=(config.beta1, config.beta2),
        eps=config.epsilon,
        weight_decay=config.weight_decay,
        foreach=on_cpu,
        fused=not on_cpu,
    )


class OffloadedAdamW(torch.optim.AdamW):
    """AdamW whose moments live in CPU memory; each parameter's visit its device for the update.

    Only the moments travel, once a step. torch's `CPUOffloadPolicy` would send parameters for every
    micro-batch too, and update them on the CPU, which takes several times as long as the transfer.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Make one update. When this returns, the moments are back in CPU memory."""
        assert closure is None
        allocate_moments(self)
        for group in self.param_groups:
            updated = [parameter for parameter in group["params"] if parameter.grad is not None]
            streams = _new_streams() if group["fused"] else []
            for stream in streams:
                stream.wait_stream(torch.cuda.current_stream())
            for number, parameter in enumerate(updated):
                with torch.cuda.stream(streams[number % STREAMS] if streams else None):
                    self._update(parameter, group)
            for stream in streams:
                stream.synchronize()

    def _update(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        shard = local(parameter)
        kept = [local(self.state[parameter][name]) for name in MOMENTS]
        exp_avg, exp_avg_sq = moments = [moment.to(shard.device, non_blocking=True, copy=True) for moment in kept]
        assert parameter.grad is not None
        adamw(
            [shard],
            [local(parameter.grad)],
            [exp_avg],
            [exp_avg_sq],
            [],
            [self.state[parameter]["step"]],
            foreach=False,
            fused=group["fused"],
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
        for moment, updated in zip(kept, moments, strict=True):
            moment.copy_(updated, non_blocking=True)


def _new_streams() -> list[torch.cuda.Stream]:
    return [torch.cuda.Stream() for _ in range(STREAMS)]  # type: ignore[no-untyped-call]


def allocate_moments(optimizer: torch.optim.AdamW) -> None:
    """Make AdamW's state now: torch makes it with the first step, but saving before that, and loading, need it."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter not in optimizer.state:
                device = parameter.device if group["fused"] else torch.device("cpu")
                moment = _zeros_on_cpu if isinstance(optimizer, OffloadedAdamW) else torch.zeros_like
                optimizer.state[parameter] = {
                    "step": torch.zeros((), dtype=torch.float32, device=device),
                    **{name: moment(parameter) for name in MOMENTS},
                }


def _zeros_on_cpu(parameter: torch.Tensor) -> torch.Tensor:
    """Return zeros shaped and sharded like the parameter, in pinned memory if the parameter is on a GPU."""
    shard = local(parameter.detach())
    zeros = torch.zeros(shard.shape, dtype=shard.dtype, pin_memory=shard.is_cuda)
    if isinstance(parameter, DTensor):
        return DTensor(zeros, parameter._spec, requires_grad=False)  # type: ignore[no-untyped-call]
    return zeros


class RoundedWeights:
    """The copies of a module's trained parameters and the sums of their gradients. Both are made when they are first
    needed. Frozen parameters stay in their places, rounded once: they are held as they are computed with."""

    def __init__(self, module: nn.Module, dtype: torch.dtype, *, stays: bool = True) -> None:
        """`stays`: copies and sums keep their memory, for kernels that were recorded; else they are freed between calls
        and between updates."""
        self._dtype = dtype
        self._stays = stays
        self._places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
        for part in module.modules():
            for name, parameter in part.named_parameters(recurse=False):
                if parameter.requires_grad:
                    self._places.setdefault(parameter, []).append((part, name))
                elif parameter.is_floating_point():
                    parameter.data = parameter.data.to(dtype)
        self._sums: list[torch.Tensor | None] = []
        """None: that parameter has got no gradient yet, and the sum has no memory."""
        self.copies: list[nn.Parameter] = []
        self._reached: set[int] = set()
        """The parameters that have got a gradient in this update. The optimizer leaves the others as they are."""

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """A context in which the module computes with the masters as they are now, rounded."""
        if not self.copies:
            self.copies = [self._copy(index, master) for index, master in enumerate(self._places)]
        for copy in () if self._stays else self.copies:  # resizing moves memory, even to the size that it has
            copy.untyped_storage().resize_(copy.numel() * copy.element_size())
        with torch.no_grad():
            torch._foreach_copy_([*self.copies], [*self._places])
        self._put(self.copies)
        try:
            yield
        finally:
            self._put(list(self._places))
            for copy in () if self._stays else self.copies:
                copy.untyped_storage().resize_(0)  # what the compiler has seen stays

    def begin(self) -> None:
        """Start the sums of an update's gradients at zero."""
        self._reached.clear()
        if not self._stays:
            self._sums = [None] * len(self._places)
            return
        if not self._sums:
            self._sums = [torch.zeros_like(master) for master in self._places]
        torch._foreach_zero_([total for total in self._sums if total is not None])

    def add(self, gradients: Sequence[torch.Tensor | None]) -> set[int]:
        """Add the gradients of all copies to the sums, and return which parameters have one; see `reach`."""
        for total, gradient in zip(self._sums, gradients, strict=True):
            if gradient is not None:
                assert total is not None
                total.add_(gradient)
        return {index for index, gradient in enumerate(gradients) if gradient is not None}

    def reach(self, parameters: set[int]) -> None:
        """Say that these parameters have got a gradient."""
        self._reached |= parameters

    def give(self) -> None:
        """Make the sums the masters' gradients."""
        for index, (master, total) in enumerate(zip(self._places, self._sums, strict=True)):
            master.grad = total if index in self._reached else None
        if not self._stays:
            self._sums = []

    def release(self) -> None:
        """Free the memory of copies and sums, which have addresses of their own in each call from now on."""
        if self._stays:
            self.copies, self._stays = [], False
        self._sums = []

    def _copy(self, index: int, master: nn.Parameter) -> nn.Parameter:
        copy = nn.Parameter(torch.empty_like(master, dtype=self._dtype))
        # Added up as soon as it is there, so that no pass holds the gradients of all parameters.
        hook = functools.partial(self._add_own, index)
        copy.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        return copy

    def _add_own(self, index: int, copy: torch.Tensor) -> None:
        assert copy.grad is not None
        total = self._sums[index]
        if total is None:
            self._sums[index] = copy.grad.float()
        else:
            total.add_(copy.grad)
        self._reached.add(index)
        copy.grad = None

    def _put(self, parameters: Sequence[nn.Parameter]) -> None:
        for parameter, places in zip(parameters, self._places.values(), strict=True):
            for part, name in places:
                part._parameters[name] = parameter


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
