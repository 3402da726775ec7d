"""The megatron backends: Megatron Core behind the calls of `learner/backends/base.py`.

Every rank of a replica gets the whole batch and computes its part: its tokens, its layers, its rows of every matrix.
Only the last pipeline stage knows the results; it tells the others.
"""

import dataclasses
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from headway.learner.backends.adapter_files import write_adapter
from headway.learner.backends.base import Backend, Likeliest, TokenLoss
from headway.learner.backends.hugging_face_files import Read, write_tensors
from headway.learner.backends.rng import load_rng, snapshot_rng
from headway.learner.backends.saving import NamedTensors, snapshot_gathered
from headway.learner.backends.score_head import first_head
from headway.learner.config import ModelConfig, OptimizerConfig
from headway.learner.models.adapters import zeroed
from headway.learner.models.classifier import check_classifier, classifier_files
from headway.learner.models.files import kept_files, write_files
from headway.learner.rows.batch import PackedBatch

from .architecture import Head
from .source import open_source, with_head
from .trained import Reports, TrainedParts


class MegatronBackend(TrainedParts):
    """A `Backend`. All calls are collective; all replicas must pass the same number of micro-batches."""

    def __init__(self, model: ModelConfig, optimizer: OptimizerConfig, **options: Any) -> None:
        super().__init__(model, optimizer, **options)
        self._files = kept_files(model) if self.rank == 0 else {}
        self._base = os.path.realpath(model.path) if os.path.isdir(model.path) else model.path

    def logprobs(self, batches: Sequence[PackedBatch], temperature: float) -> list[torch.Tensor]:
        """[T] fp32 logprobs for every micro-batch; [0] for an empty one."""
        return self._evaluated(batches, temperature)

    def likeliest(self, batches: Sequence[PackedBatch], count: int) -> list[Likeliest]:
        """Return, for every micro-batch, the `count` likeliest tokens in each place with their logprobs."""
        return [Likeliest.of(found_TC2) for found_TC2 in self._evaluated(batches, 1.0, top=count)]

    def hidden(self, batch: PackedBatch) -> torch.Tensor:
        """[T, W] the input of the output head, for comparisons of logits."""
        return self._evaluated([dataclasses.replace(batch, tree=None)], 1.0, wants_hidden=True)[0]

    def step(
        self, batches: Sequence[PackedBatch], loss: TokenLoss, temperature: float, learning_rate: float
    ) -> tuple[float, float, Reports]:
        """Make one update. The weights stay if the norm is not finite.

        Empty micro-batches report {}, but the first report always has the load of experts.
        """
        total, norm, reports = self._update(batches, loss, temperature, learning_rate)
        reports[0] |= self._take_router_load()
        return total, norm, reports

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
        return self._exporter.named_tensors() if self._adapters is None else self._adapter_export.merged_tensors()

    @property
    def trains_adapter(self) -> bool:
        """Whether checkpoints hold an adapter in the place of whole weights."""
        return self._adapters is not None

    @property
    def adapter_scale(self) -> float:
        """The factor of B A."""
        assert self._adapters is not None
        return self._adapters.config.scale

    def base_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the frozen weights as `named_tensors` does, without the adapter."""
        return self._exporter.named_tensors()

    def without_adapter(self) -> AbstractContextManager[None]:
        """Return a context in which passes compute what the frozen weights alone do."""
        assert self._adapters is not None
        return zeroed(self._adapters.seconds())

    def factor_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield A and B of every adapted weight by the model's names, in `model.dtype`."""
        return self._adapter_export.factor_tensors()

    def adapter_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield A and B of every adapted weight by their names in PEFT's files, in `model.dtype`."""
        return self._adapter_export.adapter_tensors()

    def load(self, directory: Path) -> None:
        """Load a state that any layout may have written, RNG states rank by rank. Collective."""
        super().load(directory)
        load_rng(directory, self.rank, self._device)

    def _stage_more(self, directory: Path, *, is_copied: bool) -> tuple[Callable[[], None], ...]:
        """Return the writers of a Hugging Face model, or of its adapter (rank 0's), and of the process's generators."""
        write = functools.partial(self._write_hugging_face, directory) if self.rank == 0 else None
        tensors = self.named_tensors() if self._adapters is None else self.adapter_tensors()
        hugging_face = snapshot_gathered(tensors, write, is_copied=is_copied)
        return hugging_face, snapshot_rng(directory, self.rank, self._device)

    def _write_hugging_face(self, directory: Path, tensors: NamedTensors) -> None:
        if self._adapters is None:
            write_tensors(tensors, directory)
        else:
            write_adapter(tensors, self._adapters.peft_config(self._base), directory)
        write_files(self._files, directory)


class MegatronValueBackend(TrainedParts):
    """A `ValueBackend` (see `learner/backends/base.py`). The last pipeline stage holds the head, in `model.dtype`."""

    head: Head = "value"
    has_random_head = False

    def _source(self, model: ModelConfig, seed: int) -> Read:
        first = first_head(model, self._architecture.width, seed if self.has_random_head else None)
        return with_head(open_source(model, seed), first)

    def values(self, batches: Sequence[PackedBatch]) -> list[torch.Tensor]:
        """[T] fp32 values for every micro-batch; [0] for an empty one."""
        return self._evaluated(_plain(batches), 1.0)

    def step(
        self, batches: Sequence[PackedBatch], loss: TokenLoss, learning_rate: float
    ) -> tuple[float, float, Reports]:
        """Make one update. Empty micro-batches report {}. The weights stay if the norm is not finite."""
        return self._update(_plain(batches), loss, 1.0, learning_rate)


class MegatronScoreBackend(MegatronValueBackend):
    """A `ScoreBackend` (see `learner/backends/base.py`)."""

    head = "score"
    has_random_head = True

    def __init__(self, model: ModelConfig, optimizer: OptimizerConfig, **options: Any) -> None:
        """Raises ConfigError for a model that transformers could not load as a classifier."""
        check_classifier(model)
        super().__init__(model, optimizer, **options)
        self._files = classifier_files(model) if self.rank == 0 else {}

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the classifier's tensors, in `model.dtype`."""
        return self._exporter.named_tensors()

    def _stage_more(self, directory: Path, *, is_copied: bool) -> tuple[Callable[[], None], ...]:
        """Return the writer of a sequence classifier, on rank 0."""
        write = functools.partial(self._write_classifier, directory) if self.rank == 0 else None
        return (snapshot_gathered(self.named_tensors(), write, is_copied=is_copied),)

    def _write_classifier(self, directory: Path, tensors: NamedTensors) -> None:
        write_tensors(tensors, directory)
        write_files(self._files, directory)


def _plain(batches: Sequence[PackedBatch]) -> list[PackedBatch]:
    """Return the batches with one number a token, and without experts to replay: a critic's routers choose for
    themselves, since they drift apart from the policy's."""
    return [dataclasses.replace(batch.plain, experts_TLK=None) for batch in batches]
