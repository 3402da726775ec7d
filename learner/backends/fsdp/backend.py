"""The fsdp backend: one optimizer step over packed micro-batches, and what it leaves behind."""

import dataclasses
import math
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from broker.errors import ConfigError
from learner.backends.base import TokenLoss
from learner.batch import PackedBatch
from learner.checkpoint import partial_path, put_in_place, sync_tree, writing
from learner.config import ModelConfig, OptimizerConfig
from learner.model import load_model, load_tokenizer

from .export import hugging_face_tensors, write_tensors
from .policy import Policy, placeholder
from .ranks import clip_gradients, join_ranks, shard, sum_over_ranks, sync_gradients
from .training_state import load_rng, load_state, save_rng, save_state

Reports = list[dict[str, float]]


class FsdpBackend:
    """A `Backend` (see `learner/backends/base.py`). Every rank must pass the same number of micro-batches."""

    def __init__(self, model: ModelConfig, optimizer: OptimizerConfig, *, device: str = "cpu", seed: int = 0) -> None:
        if device == "cuda" and not torch.cuda.is_available():
            raise ConfigError("learner.device is cuda, but torch finds no CUDA device; set learner.device=cpu.")
        mesh = join_ranks(device)
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self._device = torch.device(f"cuda:{torch.cuda.current_device()}" if device == "cuda" else device)
        self._dtype = torch.bfloat16 if model.dtype == "bfloat16" else torch.float32
        is_half = self._dtype is not torch.float32
        self._policy = Policy(load_model(model, seed), on_cpu=device == "cpu", half_precision=is_half)
        self._tokenizer = load_tokenizer(model)
        shard(self._policy, mesh, half_precision=is_half)
        self._parameters = [p for p in self._policy.parameters() if p.requires_grad]
        self._max_grad_norm = optimizer.max_grad_norm
        self._optimizer = torch.optim.AdamW(
            self._parameters,
            lr=0.0,
            betas=(optimizer.beta1, optimizer.beta2),
            eps=optimizer.epsilon,
            weight_decay=optimizer.weight_decay,
            foreach=True,
        )

    @torch.no_grad()
    def logprobs(self, batches: Sequence[PackedBatch], temperature: float) -> list[torch.Tensor]:
        """[T] fp32 logprobs on the backend's device, for every micro-batch; [0] for an empty one."""
        return [self._current_logprobs(batch, temperature)[: batch.num_tokens] for batch in batches]

    def step(
        self, batches: Sequence[PackedBatch], loss: TokenLoss, temperature: float, learning_rate: float
    ) -> tuple[float, float, Reports]:
        """One update. Empty micro-batches report {}. A norm that is not finite: the weights stay."""
        self._check_same_count(len(batches))
        self._optimizer.zero_grad(set_to_none=True)
        total, reports = 0.0, Reports()
        for index, batch in enumerate(batches):
            sync_gradients(self._policy, index == len(batches) - 1)
            share, report = self._backward(index, batch, loss, temperature)
            total += share
            reports.append(report)
        grad_norm = clip_gradients(self._parameters, self._max_grad_norm, self._device)
        if math.isfinite(grad_norm):
            self._optimizer.param_groups[0]["lr"] = learning_rate
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return sum_over_ranks(total, self._device), grad_norm, reports

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What `save_pretrained` would write, in `model.dtype`: experts one by one, a tied head left out.

        A tensor may share memory with the weights: copy it before the next `step`.
        """
        return hugging_face_tensors(self._policy.model, self._dtype)

    def save(self, directory: Path) -> None:
        """Collective. `directory` appears with everything in it, or not at all."""
        partial = partial_path(directory)
        with writing(directory, partial):
            self._on_rank_zero_first(partial)
            save_state(self._policy.model, self._optimizer, partial)
            save_rng(partial, self.rank, self._device)
            self._write_hugging_face(partial)
            sync_tree(partial)
            dist.barrier()
            if self.rank == 0:
                put_in_place(partial, directory)
            dist.barrier()

    def load(self, directory: Path) -> None:
        """Collective. Parameters and moments load into any number of ranks, RNG states rank by rank."""
        load_state(self._policy.model, self._optimizer, directory)
        load_rng(directory, self.rank, self._device)

    def _current_logprobs(self, batch: PackedBatch, temperature: float) -> torch.Tensor:
        moved = _to_device(batch, self._device) if batch.num_tokens else placeholder(self._device)
        logprobs_T: torch.Tensor = self._policy(moved, temperature)
        return logprobs_T

    def _backward(
        self, index: int, batch: PackedBatch, loss: TokenLoss, temperature: float
    ) -> tuple[float, dict[str, float]]:
        """Gradients of one micro-batch's share, times the ranks, since sharding averages over them."""
        logprobs_T = self._current_logprobs(batch, temperature)
        nothing = (logprobs_T * 0.0).sum()
        share, report = loss(index, logprobs_T) if batch.num_tokens else (nothing, {})
        if not share.requires_grad:
            share = share + nothing
        torch.autograd.backward(share * self.world_size)
        return share.item(), report

    def _check_same_count(self, count: int) -> None:
        """Ranks with different numbers of micro-batches would wait for each other for ever."""
        if self.world_size > 1:
            extremes = torch.tensor([count, -count], device=self._device)
            dist.all_reduce(extremes, op=dist.ReduceOp.MAX)
            most, least = extremes[0].item(), -extremes[1].item()
            assert most == least, f"ranks have between {least} and {most} micro-batches"

    def _on_rank_zero_first(self, partial: Path) -> None:
        if self.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        dist.barrier()

    def _write_hugging_face(self, directory: Path) -> None:
        """All ranks gather, rank 0 writes."""
        if self.rank == 0:
            write_tensors(self.named_tensors(), directory)
            self._write_configuration(directory)
        else:
            for _ in self.named_tensors():
                pass

    def _write_configuration(self, directory: Path) -> None:
        model = self._policy.model
        model.config.dtype = self._dtype
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(directory)
        if model.can_generate():
            model.generation_config.save_pretrained(directory)
        self._tokenizer.save_pretrained(directory)


def _to_device(batch: PackedBatch, device: torch.device) -> PackedBatch:
    moved = {field.name: getattr(batch, field.name).to(device) for field in dataclasses.fields(batch)}
    return PackedBatch(**moved)
