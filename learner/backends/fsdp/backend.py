"""The fsdp backends: a policy, which is published and saved for engines, a critic, which stays in the learner, and
their base: a module in shards with its optimizer, updated over packed micro-batches.
"""

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Unpack

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from headway.broker.errors import ConfigError
from headway.learner.backends import BACKENDS, BackendOptions
from headway.learner.backends.adapter import HuggingFaceSnapshot
from headway.learner.backends.base import Backend, Snapshot, TokenLoss, TopTokens
from headway.learner.backends.moe import disagreement
from headway.learner.backends.offload import HostOffload
from headway.learner.backends.score_head import SCORE_WEIGHT, first_head
from headway.learner.backends.snapshots import load_rng, save, snapshot_rng
from headway.learner.batching.batch import PackedBatch
from headway.learner.config import ComputeConfig, LayoutConfig, ModelConfig, OptimizerConfig
from headway.learner.models.lora import check_recomputation, zeroed
from headway.learner.models.model_files import check_classifier, classifier_files, kept_files
from headway.learner.models.parallel_layout import check_ranks, check_splits
from headway.learner.models.pretrained import load_model
from headway.learner.models.shape import has_window, num_experts
from headway.learner.ranks import check_same_count, count_ranks, join_ranks, sum_over_ranks

from .adapter import Adapters
from .cuda_graphs import CudaGraphReplay, PassRecorder, open_recorder, why_launched
from .hugging_face import HuggingFaceExport, allocate_shards, can_stream, fill_shards, meta_model
from .optimizer import RoundedWeights, StagedState, load_state, open_optimizer
from .policy import PackedModel, Policy, ScoreModel, ValueModel, prepare_layers
from .row import ContextGroup, placeholder
from .sharding import (
    clip_gradients,
    copy_rows,
    gathering,
    join_context,
    local,
    shard,
    stays_whole,
    sync_gradients,
    whole,
)

log = logging.getLogger(__name__)

Reports = list[dict[str, float]]


class ShardedModel:
    """A module in shards with its optimizer. All calls are collective; ranks pass the same number of micro-batches."""

    def __init__(
        self,
        kind: type[PackedModel],
        model: ModelConfig,
        optimizer: OptimizerConfig,
        *,
        device: str = "cpu",
        seed: int = 0,
        layout: LayoutConfig = LayoutConfig(),
        compute: ComputeConfig = ComputeConfig(),
    ) -> None:
        check_splits("fsdp", BACKENDS["fsdp"].abilities.splits, layout)
        check_ranks(layout, count_ranks())
        _check_compute(device, compute)
        check_recomputation(model.adapter, compute)
        self._device = join_ranks(device)
        mesh = init_device_mesh(device, (dist.get_world_size(),))
        context = join_context(layout, device)
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.replica, self.is_lead = self.rank // context.size, context.rank == 0
        self.replicas = self.world_size // context.size
        self._dtype = torch.bfloat16 if model.dtype == "bfloat16" else torch.float32
        self._adapters: Adapters | None = None
        self._rounded: RoundedWeights | None = None
        self._replayed: CudaGraphReplay | None = None
        self._module = self._open(kind, model, seed, mesh, context, compute)
        self._parameters = [p for p in self._module.parameters() if p.requires_grad]
        self._max_grad_norm = optimizer.max_grad_norm
        self._off_device = HostOffload()
        self._optimizer = open_optimizer(
            self._parameters, optimizer, on_cpu=device == "cpu", offload=compute.offload_optimizer
        )

    def _open(
        self,
        kind: type[PackedModel],
        model: ModelConfig,
        seed: int,
        mesh: DeviceMesh,
        context: ContextGroup,
        compute: ComputeConfig,
    ) -> PackedModel:
        """Return the module in shards. Files are read directly into these; random weights are made whole first."""
        on_cpu, is_half = self._device.type == "cpu", self._dtype is not torch.float32
        is_streamed = can_stream(model)
        whole = meta_model(model) if is_streamed else load_model(model, seed)
        module = kind(whole, on_cpu=on_cpu, half_precision=is_half, context=context)
        if model.adapter is not None:
            self._adapters = Adapters(module.model, model.adapter, self._dtype)
        prepare_layers(module.layers, compute)
        recorder = self._recorder(module, compute)
        module.keeps_logits = compute.recompute == "none" and (recorder is None or compute.cuda_graphs == "always")
        is_whole = isinstance(module, Policy) and (recorder is not None or stays_whole(module, mesh, self._dtype))
        if not is_whole:
            shard(module, mesh, half_precision=is_half)
        if is_streamed:
            allocate_shards(module, self._device)
            fill_shards(whole, model.path, None if self._adapters is None else self._adapters.base)
        if self._adapters is not None:
            self._adapters.fill(seed)
        if is_whole and isinstance(module, Policy):
            module.to(self._device)
            self._rounded = RoundedWeights(module, self._dtype, stays=recorder is not None)
            if recorder is not None:
                self._replayed = CudaGraphReplay(module, self._rounded, recorder, picks=compute.cuda_graphs == "always")
        return module

    def _recorder(self, module: PackedModel, compute: ComputeConfig) -> PassRecorder | None:
        """Return what records the passes of this model, which then is not sharded; None if they are launched."""
        recorder = open_recorder(self._device) if isinstance(module, Policy) else None
        if recorder is None or compute.cuda_graphs == "never":
            return None
        reason = why_launched(
            compute,
            ranks=self.world_size,
            parameters=sum(parameter.numel() for parameter in module.parameters()),
            is_rounded=self._dtype is not torch.float32,
            has_adapter=self._adapters is not None,
            drops_activations=self._adapters is not None and self._adapters.config.dropout > 0,
            is_quantized=self._adapters is not None and self._adapters.base is not None,
            has_experts=num_experts(module.model.config) > 0,
            has_window=has_window(module.model.config),
        )
        if reason and self.rank == 0:
            log.info("kernels are launched one by one, not replayed as CUDA graphs: %s", reason)
        return None if reason else recorder

    def snapshot(self, directory: Path, *, is_copied: bool) -> Snapshot:
        """Return a snapshot in which each rank writes its shards."""
        more = self._stage_more(directory, is_copied=is_copied)
        state = StagedState(self._module.state, self._optimizer, directory, is_copied=is_copied)
        return Snapshot((*more, state.write), state.complete)

    def save(self, directory: Path) -> None:
        """Save to `directory`, which appears with everything in it, or not at all."""
        save(self, directory)

    def load(self, directory: Path) -> None:
        """Load parameters and moments, into any number of ranks."""
        load_state(self._module.state, self._optimizer, directory)

    def off_device(self) -> AbstractContextManager[None]:
        """Keep this rank's shards in host memory; moments that are there anyway stay."""
        if self._replayed is not None:
            self._replayed.stop("the model leaves its device at times, and then comes back to other memory")
        if self._rounded is not None:
            self._rounded.release()
        return self._off_device.away(self._held(), self._device)

    def _passing(self) -> AbstractContextManager[None]:
        """Return a context around all passes of a call."""
        return gathering(self._module) if self._rounded is None else self._rounded.in_place()

    def _held(self) -> Iterator[torch.Tensor]:
        if self._adapters is not None and self._adapters.base is not None:
            yield from self._adapters.base.tensors()
        for parameter in self._module.parameters():
            yield local(parameter.detach())
            for state in self._optimizer.state.get(parameter, {}).values():
                yield local(state)

    def _stage_more(self, directory: Path, *, is_copied: bool) -> tuple[Callable[[], None], ...]:
        """Return the writers of what else belongs in a checkpoint; none for a critic."""
        return ()

    @torch.no_grad()
    def _run(self, batches: Sequence[PackedBatch], *options: float) -> list[torch.Tensor]:
        """[T] results of every micro-batch without gradient, on the batch's device; [0] for an empty one.

        `options`: further arguments of the module's forward pass.
        """
        with self._passing():
            return [self._forward(batch, *options)[: batch.num_tokens] for batch in batches]

    def _update(
        self, batches: Sequence[PackedBatch], loss: TokenLoss, learning_rate: float, *options: float
    ) -> tuple[float, float, Reports]:
        """Make one update. Empty micro-batches report {}. The weights stay if the norm is not finite."""
        check_same_count(len(batches), self._device)
        self._optimizer.zero_grad(set_to_none=True)
        if self._rounded is not None:
            self._rounded.begin()
        shares, reports = [], Reports()
        with self._passing(), nullcontext() if self._adapters is None else self._adapters.dropping():
            for index, batch in enumerate(batches):
                sync_gradients(self._module, is_last=index == len(batches) - 1)
                share, report = self._backward(index, batch, loss, *options)
                shares.append(share)
                reports.append(report)
        if self._rounded is not None:
            self._rounded.give()
        if batches:
            reports[0] |= self._disagreement(batches)
        grad_norm = clip_gradients(self._parameters, self._max_grad_norm, self._device)
        if math.isfinite(grad_norm):
            self._optimizer.param_groups[0]["lr"] = learning_rate
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        total = float(sum(shares)) if self.is_lead else 0.0
        return sum_over_ranks(total, self._device), grad_norm, reports

    def _disagreement(self, batches: Sequence[PackedBatch]) -> dict[str, float]:
        """The report of this replica's routers since the last call. Collective over its ranks, which share batches."""
        if all(batch.experts_TLK is None for batch in batches):
            return {}
        tally_2 = self._module.context.gathered(self._module.tally_2[None]).sum(0)
        self._module.tally_2.zero_()
        return disagreement(tally_2)

    def _forward(self, batch: PackedBatch, *options: float) -> torch.Tensor:
        passes = self._module if self._replayed is None else self._replayed
        outputs_T: torch.Tensor = passes(batch if batch.num_tokens else placeholder(), *options)
        return outputs_T.to(batch.token_ids_T.device)

    def _backward(
        self, index: int, batch: PackedBatch, loss: TokenLoss, *options: float
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """Compute gradients of one micro-batch's share, times the number of ranks, since sharding averages over ranks.

        The share stays on the device: reading it would wait for the backward pass.
        """
        outputs_T = self._forward(batch, *options)
        nothing = (outputs_T * 0.0).sum()
        share, report = loss(index, outputs_T) if batch.num_tokens else (nothing, {})
        if not share.requires_grad:
            share = share + nothing
        torch.autograd.backward(share * self.world_size)
        return share.detach(), report


def _check_compute(device: str, compute: ComputeConfig) -> None:
    if device == "cpu" and compute.compile:
        raise ConfigError("learner.compute.compile=true needs learner.device=cuda: on a CPU it gains nothing.")


class FsdpBackend(ShardedModel):
    """A `Backend` (see `learner/backends/base.py`)."""

    def __init__(self, model: ModelConfig, optimizer: OptimizerConfig, **options: Unpack[BackendOptions]) -> None:
        super().__init__(Policy, model, optimizer, **options)
        self._policy = self._module
        self._export = HuggingFaceExport(self._policy.model, self._dtype, self._adapters)
        self._saved = HuggingFaceSnapshot(model, kept_files(model) if self.rank == 0 else None, self._adapters)

    def logprobs(self, batches: Sequence[PackedBatch], temperature: float) -> list[torch.Tensor]:
        """[T] fp32 logprobs for every micro-batch; [0] for an empty one."""
        return self._run(batches, temperature)

    def likeliest(self, batches: Sequence[PackedBatch], count: int) -> list[TopTokens]:
        """Return, for every micro-batch, the `count` likeliest tokens in each place with their logprobs."""
        found = self._run(batches, 1.0, count)
        return [TopTokens.of(found_TC2) for found_TC2 in found]

    @torch.no_grad()
    def hidden(self, batch: PackedBatch) -> torch.Tensor:
        """[T, H] the input of the output head, for comparisons of logits; T is at least 1."""
        with self._passing():
            return self._policy.whole_hidden(batch).to(batch.token_ids_T.device)

    def step(
        self, batches: Sequence[PackedBatch], loss: TokenLoss, temperature: float, learning_rate: float
    ) -> tuple[float, float, Reports]:
        """Make one update. Empty micro-batches report {}. The weights stay if the norm is not finite."""
        return self._update(batches, loss, learning_rate, temperature)

    @property
    def trains_adapter(self) -> bool:
        """Whether checkpoints hold an adapter in the place of whole weights."""
        return self._adapters is not None

    @torch.no_grad()
    def follow(self, policy: Backend, decay: float) -> None:
        """Move each rank's own shards; nothing is sent."""
        assert isinstance(policy, FsdpBackend)
        for mine, theirs in zip(self._parameters, policy._parameters, strict=True):
            local(mine).lerp_(local(theirs), 1 - decay)

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield what `save_pretrained` would write, in `model.dtype`: experts one by one, without a tied head.

        A tensor may share memory with the weights: copy it before the next `step`.
        """
        return self._export.tensors()

    @property
    def adapter_scale(self) -> float:
        """The factor of B A."""
        assert self._adapters is not None
        return self._adapters.config.scale

    def base_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the frozen weights as `named_tensors` does, without the adapter."""
        return self._export.tensors(is_merged=False)

    def without_adapter(self) -> AbstractContextManager[None]:
        """Return a context in which passes compute what the frozen weights alone do."""
        assert self._adapters is not None
        return zeroed([local(second) for _, (_, second) in self._adapters.factors()])

    def factor_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield A and B of every adapted weight by the model's names, in `model.dtype`. Collective."""
        return self._export.factor_tensors()

    def adapter_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield A and B of every adapted weight by their names in PEFT's files, in `model.dtype`. Collective."""
        return self._export.adapter_tensors()

    def load(self, directory: Path) -> None:
        """Load parameters and moments into any number of ranks, RNG states rank by rank. Collective."""
        super().load(directory)
        load_rng(directory, self.rank, self._device)

    def _stage_more(self, directory: Path, *, is_copied: bool) -> tuple[Callable[[], None], ...]:
        """Return the writers of a Hugging Face model, or of its adapter (rank 0's), and of the process's generators."""
        tensors = self.named_tensors() if self._adapters is None else self.adapter_tensors()
        hugging_face = self._saved.writer(tensors, directory, is_copied=is_copied)
        return hugging_face, snapshot_rng(directory, self.rank, self._device)


class FsdpValueBackend(ShardedModel):
    """A `ValueBackend` (see `learner/backends/base.py`)."""

    kind: type[ValueModel] = ValueModel
    has_random_head = False

    def __init__(self, model: ModelConfig, optimizer: OptimizerConfig, **options: Unpack[BackendOptions]) -> None:
        super().__init__(self.kind, model, optimizer, **options)
        assert isinstance(self._module, ValueModel)
        self._head = self._module.head
        first = first_head(model, self._head.in_features, options.get("seed", 0) if self.has_random_head else None)
        copy_rows(first, self._head.weight)

    def values(self, batches: Sequence[PackedBatch]) -> list[torch.Tensor]:
        """[T] fp32 values for every micro-batch; [0] for an empty one."""
        return self._run(batches)

    def step(
        self, batches: Sequence[PackedBatch], loss: TokenLoss, learning_rate: float
    ) -> tuple[float, float, Reports]:
        """Make one update. Empty micro-batches report {}. The weights stay if the norm is not finite."""
        return self._update(batches, loss, learning_rate)


class FsdpScoreBackend(FsdpValueBackend):
    """A `ScoreBackend` (see `learner/backends/base.py`)."""

    kind = ScoreModel
    has_random_head = True

    def __init__(self, model: ModelConfig, optimizer: OptimizerConfig, **options: Unpack[BackendOptions]) -> None:
        """Raises ConfigError for a model that transformers could not load as a classifier."""
        check_classifier(model)
        super().__init__(model, optimizer, **options)
        self._saved = HuggingFaceSnapshot(model, classifier_files(model) if self.rank == 0 else None)
        self._body = self._module.model
        self._export = HuggingFaceExport(self._body, self._dtype, self._adapters)

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the body's tensors in `model.dtype`, and the head in fp32.

        A tensor may share memory with the weights: copy it before the next `step`.
        """
        for name, tensor in self._export.tensors():
            yield f"{self._body.base_model_prefix}.{name}", tensor
        yield SCORE_WEIGHT, whole([self._head.weight.detach()], torch.float32)[0]

    def _stage_more(self, directory: Path, *, is_copied: bool) -> tuple[Callable[[], None], ...]:
        """Return the writer of a sequence classifier, on rank 0."""
        return (self._saved.writer(self.named_tensors(), directory, is_copied=is_copied),)
