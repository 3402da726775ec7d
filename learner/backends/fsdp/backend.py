"""The fsdp backends: a policy, which is published and saved for engines, and a critic, which stays in the learner."""

import functools
import itertools
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from headway.learner.backends.adapter import write_adapter
from headway.learner.backends.base import Backend, TokenLoss, TopTokens
from headway.learner.backends.hugging_face_files import write_tensors
from headway.learner.backends.score_head import SCORE_WEIGHT, first_head
from headway.learner.backends.snapshots import NamedTensors, load_rng, snapshot_gathered, snapshot_rng
from headway.learner.batching.batch import PackedBatch
from headway.learner.config import ComputeConfig, LayoutConfig, ModelConfig, OptimizerConfig
from headway.learner.models.lora import is_factor, merged, peft_names, to_peft, zeroed
from headway.learner.models.model_files import check_classifier, classifier_files, kept_files, write_files

from .adapter import Adapters
from .policy import Policy, ScoreModel, ValueModel
from .sharded_model import Reports, ShardedModel
from .sharding import local, whole
from .streaming import copy_rows

if TYPE_CHECKING:
    from transformers import PreTrainedModel


BLOCK = re.compile(r".*?\.\d+\.")
"""The decoder layer in a parameter's name."""


class HuggingFaceExport:
    """A model's tensors as `save_pretrained` would write them."""

    def __init__(self, model: "PreTrainedModel", dtype: torch.dtype, adapters: Adapters | None = None) -> None:
        self._model = model
        self._dtype = dtype
        self._adapters = adapters
        self._unchanged: set[tuple[str, ...]] = set()
        """Blocks, as tuples of tensor names, that files name as the model does: transformers' conversion of one takes
        longer than the gathering. Tensors outside of all layers keep their names, too."""

    def tensors(self, *, is_merged: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every tensor, tied ones once, with its adapter merged into it unless not `is_merged`. Collective:
        gathers a layer at a time.

        transformers holds a layer's experts as one tensor (`mlp.experts.gate_up_proj`), but files and engines have
        one for each expert (`mlp.experts.0.gate_proj.weight`); transformers' own table converts them.
        """
        from transformers.core_model_loading import revert_weight_conversion

        base = None if self._adapters is None else self._adapters.base
        for prefix, block in itertools.groupby(_distinct(self._model), key=lambda item: _block(item[0])):
            names, shards = zip(*block, strict=True)
            named = dict(zip(names, whole(shards, self._dtype), strict=True))
            if base is not None and prefix:
                named |= base.of_block(prefix)
            gathered = self._of_files(named, is_merged)
            names = tuple(gathered)
            if names in self._unchanged:
                yield from gathered.items()
                continue
            converted = revert_weight_conversion(self._model, gathered)
            if [*map(id, converted.values())] == [*map(id, gathered.values())] and [*converted] == [*gathered]:
                self._unchanged.add(names)
            yield from converted.items()

    def adapter_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield A and B of every adapted weight by their names in PEFT's files. Collective."""
        assert self._adapters is not None
        names = peft_names(self._adapters.targets)
        for target, shards in self._adapters.factors():
            factors = to_peft(target, *whole(shards, self._dtype))
            yield from zip(names[target.parameter], factors, strict=True)

    def factor_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield A and B of every adapted weight by the model's names. Collective."""
        assert self._adapters is not None
        for target, shards in self._adapters.factors():
            yield from zip(target.factors, whole(shards, self._dtype), strict=True)

    def _of_files(self, gathered: dict[str, torch.Tensor], is_merged: bool) -> dict[str, torch.Tensor]:
        """Return the tensors of a block without A and B, which have changed the others if `is_merged`."""
        if self._adapters is None:
            return gathered
        changed = {name: tensor for name, tensor in gathered.items() if not is_factor(name)}
        for target in self._adapters.targets:
            if is_merged and target.parameter in changed:
                first, second = (gathered[name] for name in target.factors)
                changed[target.parameter] = merged(
                    changed[target.parameter], (first, second), self._adapters.config.scale
                )
        return changed


def _block(name: str) -> str:
    found = BLOCK.match(name)
    return found.group() if found else ""


def _distinct(model: "PreTrainedModel") -> Iterator[tuple[str, torch.Tensor]]:
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor.detach()


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
        self._export = HuggingFaceExport(self._policy.model, self._dtype, self._adapters)
        self._files = kept_files(model) if self.rank == 0 else {}
        self._base = os.path.realpath(model.path) if os.path.isdir(model.path) else model.path

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
        write = functools.partial(self._write_hugging_face, directory) if self.rank == 0 else None
        tensors = self.named_tensors() if self._adapters is None else self._export.adapter_tensors()
        hugging_face = snapshot_gathered(tensors, write, is_copied=is_copied)
        return hugging_face, snapshot_rng(directory, self.rank, self._device)

    def _write_hugging_face(self, directory: Path, tensors: NamedTensors) -> None:
        if self._adapters is None:
            write_tensors(tensors, directory)
        else:
            config = self._adapters.peft_config(self._base)
            write_adapter(tensors, config, directory, self._adapters.config.quantize_base)
        write_files(self._files, directory)


class FsdpValueBackend(ShardedModel):
    """A `ValueBackend` (see `learner/backends/base.py`)."""

    kind: type[ValueModel] = ValueModel
    has_random_head = False

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
        super().__init__(self.kind, model, optimizer, device=device, seed=seed, layout=layout, compute=compute)
        assert isinstance(self._module, ValueModel)
        self._head = self._module.head
        first = first_head(model, self._head.in_features, seed if self.has_random_head else None)
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

    def __init__(self, model: ModelConfig, optimizer: OptimizerConfig, **options: Any) -> None:
        """Raises ConfigError for a model that transformers could not load as a classifier."""
        check_classifier(model)
        super().__init__(model, optimizer, **options)
        self._files = classifier_files(model) if self.rank == 0 else {}
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
        write = functools.partial(self._write_classifier, directory) if self.rank == 0 else None
        return (snapshot_gathered(self.named_tensors(), write, is_copied=is_copied),)

    def _write_classifier(self, directory: Path, tensors: NamedTensors) -> None:
        write_tensors(tensors, directory)
        write_files(self._files, directory)
