"""The megatron backend: Megatron Core's schedules, layers and optimizer behind the calls of `learner/backends/base.py`.

Every rank of a replica is given the whole batch and takes its part: its tokens, its layers, its rows of every matrix.
Only the last pipeline stage knows the results; it tells the others.
"""

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import GenerationConfig

from broker.errors import ConfigError
from learner.backends.base import Backend, TokenLoss
from learner.backends.fsdp.export import write_tensors
from learner.backends.fsdp.training_state import load_rng, save_rng
from learner.batch import PackedBatch
from learner.checkpoint import partial_path, put_in_place, sync_tree, writing
from learner.config import ComputeConfig, LayoutConfig, ModelConfig, OptimizerConfig
from learner.model import load_config, load_tokenizer

from .architecture import architecture_of
from .cpu_shim import install_cpu_shim
from .layout import check_layout, count_ranks, join, use_device
from .source import open_source

Reports = list[dict[str, float]]


class MegatronBackend:
    """A `Backend`. All calls are collective; every replica must pass the same number of micro-batches."""

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
        _check_installed()
        install_cpu_shim()
        self._hugging_face = load_config(model)
        self._tokenizer = load_tokenizer(model)
        self._architecture = architecture_of(self._hugging_face)
        check_layout(layout, self._architecture, count_ranks())
        self._device = use_device(device)
        self._layout = layout
        here = join(layout, device)
        self.rank, self.world_size = here.rank, here.world_size
        self.replica, self.replicas, self.is_lead = here.replica, here.replicas, here.is_lead
        self._dtype = torch.bfloat16 if model.dtype == "bfloat16" else torch.float32
        self._build(compute, optimizer)
        self._state.read(open_source(model, seed))

    def _build(self, compute: ComputeConfig, optimizer: OptimizerConfig) -> None:
        from .export import Exporter
        from .model import build, rotary_module, transformer_config
        from .optimizer import ShardedAdam
        from .schedule import Schedule
        from .shards import places
        from .state import TrainingState

        config = transformer_config(self._architecture, self._layout, compute, self._dtype, self._device)
        chunks = build(config, self._architecture, self._device)
        all_places = list(places(self._architecture, self._layout))
        self._adam = ShardedAdam(config, chunks, optimizer)
        self._schedule = Schedule(self._adam.models, rotary_module(self._hugging_face), self._layout, self._device)
        self._state = TrainingState(chunks, all_places, self._adam)
        self._exporter = Exporter(chunks, all_places)

    def logprobs(self, batches: Sequence[PackedBatch], temperature: float) -> list[torch.Tensor]:
        """[T] fp32 logprobs for every micro-batch; [0] for an empty one."""
        self._check_same_count(len(batches))
        return self._schedule.evaluate(batches, temperature)

    def hidden(self, batch: PackedBatch) -> torch.Tensor:
        """[T, W] what the output head is given: for comparing logits."""
        return self._schedule.evaluate([batch], 1.0, wants_hidden=True)[0]

    def step(
        self, batches: Sequence[PackedBatch], loss: TokenLoss, temperature: float, learning_rate: float
    ) -> tuple[float, float, Reports]:
        """One update. Empty micro-batches report {}. A norm that is not finite: the weights stay."""
        self._check_same_count(len(batches))
        self._adam.zero_gradients()
        total, reports = self._schedule.train(batches, temperature, loss)
        return total, self._adam.step(learning_rate), reports

    @torch.no_grad()
    def follow(self, policy: Backend, decay: float) -> None:
        """Shard by shard, in fp32: nothing is sent but the rounded parameters."""
        assert isinstance(policy, MegatronBackend)
        for mine, theirs in zip(self._adam.parts(), policy._adam.parts(), strict=True):
            for own, other in zip(mine.get_parameters(), theirs.get_parameters(), strict=True):
                own.lerp_(other, 1 - decay)
        self._adam.masters_to_model()

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What `save_pretrained` would write, in `model.dtype`: a tied head left out."""
        return self._exporter.named_tensors()

    def save(self, directory: Path) -> None:
        """`directory` appears with everything in it, or not at all."""
        partial = partial_path(directory)
        with writing(directory, partial):
            if self.rank == 0:
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir(parents=True)
            dist.barrier()
            self._state.save(partial, self.rank)
            save_rng(partial, self.rank, self._device)
            self._save_hugging_face(partial)
            dist.barrier()  # others would list what rank 0 is still writing
            sync_tree(partial)
            dist.barrier()
            if self.rank == 0:
                put_in_place(partial, directory)
            dist.barrier()

    def load(self, directory: Path) -> None:
        """Collective. Whatever layout wrote it; RNG states rank by rank."""
        self._state.load(directory)
        load_rng(directory, self.rank, self._device)

    def _save_hugging_face(self, directory: Path) -> None:
        if self.rank:
            for _ in self.named_tensors():
                pass
            return
        write_tensors(self.named_tensors(), directory)
        self._hugging_face.save_pretrained(directory)
        GenerationConfig.from_model_config(self._hugging_face).save_pretrained(directory)
        self._tokenizer.save_pretrained(directory)

    def _check_same_count(self, count: int) -> None:
        """Replicas with different numbers of micro-batches would wait for each other for ever."""
        if self.world_size > 1:
            extremes = torch.tensor([count, -count], device=self._device)
            dist.all_reduce(extremes, op=dist.ReduceOp.MAX)
            most, least = extremes[0].item(), -extremes[1].item()
            assert most == least, f"replicas have between {least} and {most} micro-batches"


def _check_installed() -> None:
    try:
        import megatron.core  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "learner.backend=megatron needs Megatron Core: pip install 'headway[megatron]' (or megatron-core==0.16.1)."
        ) from error
