"""The base of the megatron backends: this rank's part of a model, its optimizer and its training state."""

import functools
import logging
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch

from headway.broker.errors import ConfigError
from headway.learner.backends.base import Snapshot, TokenLoss
from headway.learner.backends.hugging_face_files import Read
from headway.learner.backends.off_device import OffDevice
from headway.learner.backends.process_group import check_same_count, count_ranks, join_ranks
from headway.learner.backends.saving import save
from headway.learner.config import AdapterConfig, ComputeConfig, LayoutConfig, ModelConfig, OptimizerConfig
from headway.learner.models.adapters import check_recomputation
from headway.learner.models.layout import check_layout
from headway.learner.models.model import load_config
from headway.learner.rows.batch import PackedBatch

from .architecture import Head, architecture_of
from .cpu_shim import install_cpu_shim
from .layout import join
from .source import open_source

Reports = list[dict[str, float]]


class TrainedParts:
    """A model that all ranks hold together. All calls are collective; all replicas must pass the same number of
    micro-batches."""

    head: Head = "policy"

    def __init__(
        self,
        model: ModelConfig,
        optimizer: OptimizerConfig,
        *,
        device: str = "cpu",
        seed: int = 0,
        layout: LayoutConfig = LayoutConfig(),
        compute: ComputeConfig = ComputeConfig(),
    ) -> None:
        """Open the model. The process's generators of random numbers stay as they are."""
        _import_megatron()
        self._hugging_face = load_config(model)
        self._architecture = architecture_of(self._hugging_face, self.head)
        self._dtype = torch.bfloat16 if model.dtype == "bfloat16" else torch.float32
        check_layout(layout, count_ranks(), self._architecture, self._dtype.itemsize)
        check_recomputation(model.adapter, compute)
        self._device = join_ranks(device)
        self._layout = layout
        # Megatron seeds the process's generators, and layers draw weights that are replaced.
        with torch.random.fork_rng(devices=[self._device] if self._device.type == "cuda" else []):
            here = join(layout)
            self._build(compute, optimizer, model.adapter)
        self.rank, self.world_size = here.rank, here.world_size
        self.replica, self.replicas, self.is_lead = here.replica, here.replicas, here.is_lead
        self._fill(self._source(model, seed), seed)

    def _source(self, model: ModelConfig, seed: int) -> Read:
        """Return a reader of the model's first weights."""
        return open_source(model, seed)

    def _build(self, compute: ComputeConfig, optimizer: OptimizerConfig, adapter: AdapterConfig | None) -> None:
        from .adapter_export import AdapterExport
        from .adapters import LayerAdapters
        from .export import Exporter
        from .model import build, rotary_module, transformer_config
        from .optimizer import ShardedAdam
        from .router_load import take_router_load
        from .schedule import Schedule
        from .shards import places
        from .state import TrainingState, fill_frozen

        config = transformer_config(self._architecture, self._layout, compute, self._dtype, self._device)
        chunks = build(config, self._architecture, self._device)
        trained = all_places = list(places(self._architecture, self._layout))
        self._exporter = Exporter(chunks, all_places)
        self._adapters: LayerAdapters | None = None
        self._fill_frozen: Callable[[Read], None] | None = None
        if adapter is not None:
            self._adapters = LayerAdapters(self._hugging_face, self._architecture, self._layout, adapter)
            self._adapters.add(chunks)
            self._adapter_export = AdapterExport(self._adapters, self._exporter)
            self._fill_frozen = functools.partial(fill_frozen, chunks, all_places)
            trained = [place for layer in range(self._architecture.layers) for place in self._adapters.bindings(layer)]
        self._adam = ShardedAdam(config, chunks, optimizer)
        rotary, vocabulary = rotary_module(self._hugging_face), self._architecture.vocabulary
        self._schedule = Schedule(self._adam.models, rotary, self._layout, self._device, vocabulary)
        self._state = TrainingState(chunks, trained, self._adam)
        self._off_device = OffDevice()
        self._take_router_load = functools.partial(take_router_load, chunks)

    def _fill(self, source: Read, seed: int) -> None:
        """Set the first weights."""
        if self._adapters is None or self._fill_frozen is None:
            self._state.read(source)
            return
        self._fill_frozen(source)
        self._state.read(self._adapters.first_factors(seed))

    def _evaluated(
        self, batches: Sequence[PackedBatch], temperature: float, *, wants_hidden: bool = False, top: int = 0
    ) -> list[torch.Tensor]:
        """[T, ...] the head's outputs for every micro-batch, as `Schedule.evaluate` gives them."""
        check_same_count(len(batches), self._device)
        return self._schedule.evaluate(batches, temperature, wants_hidden, top)

    def _update(
        self, batches: Sequence[PackedBatch], loss: TokenLoss, temperature: float, learning_rate: float
    ) -> tuple[float, float, Reports]:
        """Make one update. Empty micro-batches report {}. The weights stay if the norm is not finite."""
        check_same_count(len(batches), self._device)
        self._adam.zero_gradients()
        with nullcontext() if self._adapters is None else self._adapters.dropping():
            total, reports = self._schedule.train(batches, temperature, loss)
        return total, self._adam.step(learning_rate), reports

    def snapshot(self, directory: Path, *, is_copied: bool) -> Snapshot:
        """Return a snapshot: ranks with the same part take turns in writing."""
        more = self._stage_more(directory, is_copied=is_copied)
        return Snapshot((*more, *self._state.snapshot(directory, self.rank, is_copied=is_copied)))

    def _stage_more(self, directory: Path, *, is_copied: bool) -> tuple[Callable[[], None], ...]:
        """Return the writers of what else belongs in a checkpoint; none for a critic."""
        return ()

    def save(self, directory: Path) -> None:
        """Save to `directory`, which appears with everything in it, or not at all."""
        save(self, directory)

    def load(self, directory: Path) -> None:
        """Load a state that any layout may have written. Collective."""
        self._state.load(directory)

    def off_device(self) -> AbstractContextManager[None]:
        """Keep this rank's parameters, masters and moments in host memory; gradients are freed, as before every
        step."""
        self._adam.free_gradients()
        return self._off_device.away(self._adam.tensors(), self._device)


def _import_megatron() -> None:
    """Import Megatron and our modules built on it, without its warnings that Transformer Engine is missing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            import megatron.core  # noqa: F401
        except ImportError as error:
            raise ConfigError(
                "learner.backend=megatron needs Megatron Core: pip install 'headway[megatron]' (or"
                " megatron-core==0.16.1)."
            ) from error
        install_cpu_shim()
        from . import export, router_load, schedule, state  # noqa: F401
    # Deprecated calls of torch in Megatron's own code, which a user cannot mend.
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning)
    warnings.filterwarnings("ignore", message="full scope is deprecated", category=UserWarning)
    warnings.filterwarnings("ignore", message=r"The \.grad attribute of a Tensor that is not", category=UserWarning)
    # Megatron logs every layer whose block is not one of its own classes.
    logging.getLogger("megatron.core.transformer.transformer_layer").setLevel(logging.ERROR)
