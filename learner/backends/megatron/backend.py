"""The megatron backend: Megatron Core's schedules, layers and optimizer behind the calls of `learner/backends/base.py`.

Every rank of a replica gets the whole batch and computes its part: its tokens, its layers, its rows of every matrix.
Only the last pipeline stage knows the results; it tells the others.
"""

import functools
import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from transformers import GenerationConfig

from broker.errors import ConfigError
from learner.backends.base import Backend, Likeliest, Snapshot, TokenLoss
from learner.backends.hugging_face_files import write_tensors
from learner.backends.off_device import OffDevice
from learner.backends.process_group import check_same_count, count_ranks, join_ranks
from learner.backends.rng import load_rng, snapshot_rng
from learner.backends.saving import NamedTensors, save, snapshot_gathered
from learner.config import ComputeConfig, LayoutConfig, ModelConfig, OptimizerConfig
from learner.models.layout import check_layout
from learner.models.model import load_config, load_tokenizer
from learner.rows.batch import PackedBatch

from .architecture import architecture_of
from .cpu_shim import install_cpu_shim
from .layout import join
from .source import open_source

Reports = list[dict[str, float]]


class MegatronBackend:
    """A `Backend`. All calls are collective; all replicas must pass the same number of micro-batches."""

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
        _import_megatron()
        self._hugging_face = load_config(model)
        self._tokenizer = load_tokenizer(model)
        self._architecture = architecture_of(self._hugging_face)
        self._dtype = torch.bfloat16 if model.dtype == "bfloat16" else torch.float32
        check_layout(layout, count_ranks(), self._architecture, self._dtype.itemsize)
        self._device = join_ranks(device)
        self._layout = layout
        here = join(layout)
        self.rank, self.world_size = here.rank, here.world_size
        self.replica, self.replicas, self.is_lead = here.replica, here.replicas, here.is_lead
        self._build(compute, optimizer)
        self._state.read(open_source(model, seed))

    def _build(self, compute: ComputeConfig, optimizer: OptimizerConfig) -> None:
        from .export import Exporter
        from .model import build, rotary_module, transformer_config
        from .optimizer import ShardedAdam
        from .router_load import take_router_load
        from .schedule import Schedule
        from .shards import places
        from .state import TrainingState

        config = transformer_config(self._architecture, self._layout, compute, self._dtype, self._device)
        chunks = build(config, self._architecture, self._device)
        all_places = list(places(self._architecture, self._layout))
        self._adam = ShardedAdam(config, chunks, optimizer)
        rotary, vocabulary = rotary_module(self._hugging_face), self._architecture.vocabulary
        self._schedule = Schedule(self._adam.models, rotary, self._layout, self._device, vocabulary)
        self._state = TrainingState(chunks, all_places, self._adam)
        self._exporter = Exporter(chunks, all_places)
        self._off_device = OffDevice()
        self._take_router_load = functools.partial(take_router_load, chunks)

    def logprobs(self, batches: Sequence[PackedBatch], temperature: float) -> list[torch.Tensor]:
        """[T] fp32 logprobs for every micro-batch; [0] for an empty one."""
        check_same_count(len(batches), self._device)
        return self._schedule.evaluate(batches, temperature)

    def likeliest(self, batches: Sequence[PackedBatch], count: int) -> list[Likeliest]:
        """Return, for every micro-batch, the `count` likeliest tokens in each place with their logprobs."""
        check_same_count(len(batches), self._device)
        return [Likeliest.of(found_TC2) for found_TC2 in self._schedule.evaluate(batches, 1.0, top=count)]

    def hidden(self, batch: PackedBatch) -> torch.Tensor:
        """[T, W] the input of the output head, for comparisons of logits."""
        return self._schedule.evaluate([batch], 1.0, wants_hidden=True)[0]

    def step(
        self, batches: Sequence[PackedBatch], loss: TokenLoss, temperature: float, learning_rate: float
    ) -> tuple[float, float, Reports]:
        """Make one update. The weights stay if the norm is not finite.

        Empty micro-batches report {}, but the first report always has the load of experts.
        """
        check_same_count(len(batches), self._device)
        self._adam.zero_gradients()
        total, reports = self._schedule.train(batches, temperature, loss)
        reports[0] |= self._take_router_load()
        return total, self._adam.step(learning_rate), reports

    @torch.no_grad()
    def follow(self, policy: Backend, decay: float) -> None:
        """Move each rank's masters in fp32; only the rounded parameters are sent."""
        assert isinstance(policy, MegatronBackend)
        for mine, theirs in zip(self._adam.parts(), policy._adam.parts(), strict=True):
            for own, other in zip(mine.get_parameters(), theirs.get_parameters(), strict=True):
                own.lerp_(other, 1 - decay)
        self._adam.masters_to_model()

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield what `save_pretrained` would write, in `model.dtype`, without a tied head."""
        return self._exporter.named_tensors()

    def snapshot(self, directory: Path, *, is_copied: bool) -> Snapshot:
        """Return a snapshot: ranks with the same part take turns in writing; rank 0 writes the Hugging Face model."""
        write = functools.partial(self._write_hugging_face, directory) if self.rank == 0 else None
        hugging_face = snapshot_gathered(self.named_tensors(), write, is_copied=is_copied)
        state = self._state.snapshot(directory, self.rank, is_copied=is_copied)
        return Snapshot((hugging_face, *state, snapshot_rng(directory, self.rank, self._device)))

    def save(self, directory: Path) -> None:
        """Save to `directory`, which appears with everything in it, or not at all."""
        save(self, directory)

    def load(self, directory: Path) -> None:
        """Load a state that any layout may have written, RNG states rank by rank. Collective."""
        self._state.load(directory)
        load_rng(directory, self.rank, self._device)

    def off_device(self) -> AbstractContextManager[None]:
        """Keep this rank's parameters, masters and moments in host memory; gradients are freed, as before every
        step."""
        self._adam.free_gradients()
        return self._off_device.away(self._adam.tensors(), self._device)

    def _write_hugging_face(self, directory: Path, tensors: NamedTensors) -> None:
        write_tensors(tensors, directory)
        self._hugging_face.save_pretrained(directory)
        GenerationConfig.from_model_config(self._hugging_face).save_pretrained(directory)
        self._tokenizer.save_pretrained(directory)


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
