"""The fsdp backends: a policy, which is published and saved for engines, and a critic, which stays in the learner."""

import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from learner.backends.base import Backend, TokenLoss
from learner.backends.hugging_face_files import write_tensors
from learner.backends.rng import load_rng, snapshot_rng
from learner.backends.saving import NamedTensors, snapshot_gathered
from learner.config import ComputeConfig, LayoutConfig, ModelConfig, OptimizerConfig
from learner.models.model import load_tokenizer
from learner.rows.batch import PackedBatch

from .export import HuggingFaceExport
from .policy import Policy, ValueModel
from .sharded_model import Reports, ShardedModel
from .sharding import gathering, local


class FsdpBackend(ShardedModel):
    """A `Backend` (see `learner/backends/base.py`)."""

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
        super().__init__(Policy, model, optimizer, device=device, seed=seed, layout=layout, compute=compute)
        self._policy = self._module
        self._export = HuggingFaceExport(self._policy.model, self._dtype)
        self._tokenizer = load_tokenizer(model)

    def logprobs(self, batches: Sequence[PackedBatch], temperature: float) -> list[torch.Tensor]:
        """[T] fp32 logprobs for every micro-batch; [0] for an empty one."""
        return self._run(batches, temperature)

    @torch.no_grad()
    def hidden(self, batch: PackedBatch) -> torch.Tensor:
        """[T, H] the input of the output head, for comparisons of logits; T is at least 1."""
        with gathering(self._policy):
            return self._policy.whole_hidden(batch).to(batch.token_ids_T.device)

    def step(
        self, batches: Sequence[PackedBatch], loss: TokenLoss, temperature: float, learning_rate: float
    ) -> tuple[float, float, Reports]:
        """Make one update. Empty micro-batches report {}. The weights stay if the norm is not finite."""
        return self._update(batches, loss, learning_rate, temperature)

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

    def load(self, directory: Path) -> None:
        """Load parameters and moments into any number of ranks, RNG states rank by rank. Collective."""
        super().load(directory)
        load_rng(directory, self.rank, self._device)

    def _stage_more(self, directory: Path, *, is_copied: bool) -> tuple[Callable[[], None], ...]:
        """Return the writers of a Hugging Face model (rank 0's) and of the process's generators."""
        write = functools.partial(self._write_hugging_face, directory) if self.rank == 0 else None
        hugging_face = snapshot_gathered(self.named_tensors(), write, is_copied=is_copied)
        return hugging_face, snapshot_rng(directory, self.rank, self._device)

    def _write_hugging_face(self, directory: Path, tensors: NamedTensors) -> None:
        write_tensors(tensors, directory)
        self._write_configuration(directory)

    def _write_configuration(self, directory: Path) -> None:
        model = self._policy.model
        model.config.dtype = self._dtype
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(directory)
        if model.can_generate():
            model.generation_config.save_pretrained(directory)
        self._tokenizer.save_pretrained(directory)


class FsdpValueBackend(ShardedModel):
    """A `ValueBackend` (see `learner/backends/base.py`): it starts from the policy's body, with its own value head."""

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
        super().__init__(ValueModel, model, optimizer, device=device, seed=seed, layout=layout, compute=compute)

    def values(self, batches: Sequence[PackedBatch]) -> list[torch.Tensor]:
        """[T] fp32 values for every micro-batch; [0] for an empty one."""
        return self._run(batches)

    def step(
        self, batches: Sequence[PackedBatch], loss: TokenLoss, learning_rate: float
    ) -> tuple[float, float, Reports]:
        """Make one update. Empty micro-batches report {}. The weights stay if the norm is not finite."""
        return self._update(batches, loss, learning_rate)
