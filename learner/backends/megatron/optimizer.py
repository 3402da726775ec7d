"""AdamW over Megatron's gradient buffers, its master weights and moments sharded over replicas.

`TrainingState` saves masters and moments by Hugging Face name and loads them under any layout.

Every rank holds a run of each parameter's elements in fp32. `MasterState` gathers a parameter's whole state, and sets
it, for checkpoints and a moving reference.
"""

import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import ChainedOptimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.transformer import TransformerConfig

from headway.broker.errors import ConfigError
from headway.learner.backends.hugging_face_files import Read, TensorFiles, file_parts
from headway.learner.backends.snapshots import NamedTensors, snapshot_gathered
from headway.learner.checkpoint import CheckpointError
from headway.learner.config import OptimizerConfig

from . import groups
from .hugging_face import PlacedBinding
from .model import PackedGpt

MASTER, MOMENTS = "param", ("exp_avg", "exp_avg_sq")
"""Megatron's and torch's names of a parameter's state."""


class ShardedAdam:
    """AdamW whose state is sharded over replicas. All calls are collective."""

    def __init__(self, config: TransformerConfig, chunks: list[PackedGpt], settings: OptimizerConfig) -> None:
        overlap = next(chunks[0].parameters()).is_cuda
        ddp = DistributedDataParallelConfig(
            use_distributed_optimizer=True, overlap_grad_reduce=overlap, grad_reduce_in_fp32=True
        )
        self.models = [
            DistributedDataParallel(config, ddp, chunk, disable_bucketing=number > 0)
            for number, chunk in enumerate(chunks)
        ]
        if overlap:
            config.no_sync_func = _single([model.no_sync for model in self.models])
            if config.pipeline_model_parallel_size > 1:
                config.grad_sync_func = _single([model.start_grad_sync for model in self.models])
        self._max_norm = settings.max_grad_norm
        self._optimizer: ChainedOptimizer = get_megatron_optimizer(
            MegatronOptimizerConfig(
                optimizer="adam",
                lr=0.0,
                min_lr=0.0,
                weight_decay=settings.weight_decay,
                adam_beta1=settings.beta1,
                adam_beta2=settings.beta2,
                adam_eps=settings.epsilon,
                clip_grad=settings.max_grad_norm,
                bf16=config.bf16,
                params_dtype=config.params_dtype,
                use_distributed_optimizer=True,
            ),
            self.models,
            config_overrides={},  # decay for norms and biases too, as for every other backend
            use_gloo_process_groups=False,
        )

        if overlap:
            for part in self.parts():
                for group in part.optimizer.param_groups:  # one kernel in the place of a dozen passes over the state
                    group["fused"], group["foreach"] = True, False
        self._on_device = overlap
        self.free_gradients()

    def free_gradients(self) -> None:
        """Free the gradients' buffers until `zero_gradients` is called."""
        for model in self.models:
            with _silenced():
                model.offload_grad_buffers(synchronize=self._on_device, empty_cache=self._on_device)

    def tensors(self) -> Iterator[torch.Tensor]:
        """Parameters, masters and moments: all state between two steps; some tensors are views of one storage."""
        for model in self.models:
            yield from model.parameters()
        for part in self.parts():
            for master in part.get_parameters():
                yield master.detach()
                yield from part.optimizer.state.get(master, {}).values()

    def zero_gradients(self) -> None:
        """Zero the gradients, and allocate their buffers if needed; a reference, which is not trained, never has
        any."""
        for model in self.models:
            with _silenced():
                model.restore_grad_buffers(synchronize=self._on_device)
            model.zero_grad_buffer()
        self._optimizer.zero_grad()

    def step(self, learning_rate: float) -> float:
        """Make one update; return the gradients' norm before clipping. The weights stay if it is not finite."""
        self._optimizer.prepare_grads()
        norm = float(self._optimizer.get_grad_norm())
        if not math.isfinite(norm):
            return norm
        for optimizer in self.parts():
            for group in optimizer.param_groups:
                group["lr"] = learning_rate
            clip_grad_by_total_norm_fp32(optimizer.get_parameters(), self._max_norm, norm)
        self._optimizer.step_with_ready_grads()
        return norm

    def parts(self) -> Iterator[DistributedOptimizer]:
        """Megatron's optimizers: one for parameters that all ranks share, one for experts."""
        for optimizer in self._optimizer.chained_optimizers:
            if optimizer.get_parameters():
                yield optimizer

    def masters_to_model(self) -> None:
        """Set the parameters to the rounded masters."""
        for optimizer in self.parts():
            optimizer._copy_main_params_to_model_params()
        for model in self.models:
            model.start_param_sync(force_sync=True)

    def model_to_masters(self) -> None:
        """Set the masters to the parameters."""
        self._optimizer.reload_model_params()


class MasterState:
    """The whole fp32 state of every parameter, gathered over the ranks that hold runs of it."""

    def __init__(self, adam: ShardedAdam) -> None:
        self._owner = {
            parameter: optimizer for optimizer in adam.parts() for parameter in optimizer.model_param_gbuf_map
        }

    @torch.no_grad()
    def whole(self, parameter: torch.nn.Parameter, key: str) -> torch.Tensor:
        """Return state shaped like the parameter; moments before the first step are 0. Collective over its replicas."""
        state = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
        run, part = self._run(parameter, key)
        if part is not None:
            state[run] = part
        dist.all_reduce(state, group=replicas_of(parameter))
        return state.view(parameter.shape)

    @torch.no_grad()
    def assign(self, parameter: torch.nn.Parameter, key: str, state: torch.Tensor) -> None:
        """Set this rank's run from a whole state."""
        run, part = self._run(parameter, key)
        if part is not None:
            part.copy_(state.flatten()[run])

    def set_step(self, step: int) -> None:
        """Set the number of updates that the moments have seen."""
        for optimizer in {id(optimizer): optimizer for optimizer in self._owner.values()}.values():
            for state in optimizer.optimizer.state.values():
                state["step"] = torch.tensor(float(step), device=state["exp_avg"].device)

    def step(self) -> int:
        """The number of updates, according to this rank's moments."""
        states = [state for optimizer in self._owner.values() for state in optimizer.optimizer.state.values()]
        return int(states[0]["step"]) if states and "step" in states[0] else 0

    def _run(self, parameter: torch.nn.Parameter, key: str) -> tuple[slice, torch.Tensor | None]:
        """The elements that this rank holds, and their state."""
        optimizer = self._owner.get(parameter)
        if optimizer is None or parameter not in optimizer.model_param_group_index_map:
            return slice(0), None
        group, order = optimizer.model_param_group_index_map[parameter]
        master = optimizer.optimizer.param_groups[group]["params"][order]
        held = optimizer._get_model_param_range_map(parameter)["param"]
        if key == MASTER:
            return slice(held.start, held.end), master.detach()
        return slice(held.start, held.end), _moments(optimizer, master)[key]


def _moments(optimizer: DistributedOptimizer, master: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return AdamW's moments, made now if there are none: saving before the first step, and loading, need them."""
    state: dict[str, torch.Tensor] = optimizer.optimizer.state[master]
    if not state:
        state["step"] = torch.tensor(0.0, device=master.device)
        state |= {key: torch.zeros_like(master) for key in MOMENTS}
    return state


@contextmanager
def _silenced() -> Iterator[None]:
    """A context without warnings: Megatron sizes buffers by a call that torch deprecates."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="TypedStorage is deprecated", category=UserWarning)
        yield


def replicas_of(parameter: torch.nn.Parameter) -> dist.ProcessGroup:
    """The ranks that hold the same part of the model: experts have replicas of their own."""
    if getattr(parameter, "allreduce", True):
        return groups.alike()
    return groups.expert_alike()


def _single(functions: list) -> object:  # type: ignore[type-arg]
    """Return the only function, or the list: Megatron takes a list only if stages are interleaved."""
    return functions if len(functions) > 1 else functions[0]


OPTIMIZER_FILE = "optimizer.json"


class OptimizerProgress(msgspec.Struct, frozen=True):
    """The content of optimizer.json."""

    step: int


@torch.no_grad()
def fill_frozen(chunks: Sequence[PackedGpt], frozen: Sequence[PlacedBinding], read: Read) -> None:
    """Set this rank's parameters that no update changes, which have neither masters nor moments."""
    for parameter, its_places in _by_parameter(chunks, [place for place in frozen if place.is_here]):
        for place in its_places:
            place.view(parameter).copy_(place.split(read))


class TrainingState:
    """All state that an update changes."""

    def __init__(self, chunks: Sequence[PackedGpt], trained: Sequence[PlacedBinding], adam: ShardedAdam) -> None:
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
    chunks: Sequence[PackedGpt], here: Sequence[PlacedBinding]
) -> list[tuple[torch.nn.Parameter, list[PlacedBinding]]]:
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
