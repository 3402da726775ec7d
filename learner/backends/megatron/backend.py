"""The megatron backends: Megatron Core behind the calls of `learner/backends/base.py`.

Every rank of a replica gets the whole batch and computes its part: its tokens, its layers, its rows of every matrix.
Only the last pipeline stage knows the results; it tells the others.
"""

import dataclasses
import functools
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Unpack

import torch
import torch.distributed as dist

from headway.broker.errors import ConfigError
from headway.learner.backends import BackendOptions
from headway.learner.backends.adapter import HuggingFaceSnapshot, open_weights
from headway.learner.backends.base import Backend, Snapshot, TokenLoss, TopTokens
from headway.learner.backends.hugging_face_files import Read, check_tied
from headway.learner.backends.offload import HostOffload
from headway.learner.backends.score_head import SCORE_BIAS, SCORE_WEIGHT, first_head
from headway.learner.backends.snapshots import load_rng, save, snapshot_rng
from headway.learner.batching.batch import PackedBatch
from headway.learner.config import AdapterConfig, ComputeConfig, LayoutConfig, ModelConfig, OptimizerConfig
from headway.learner.models.lora import check_recomputation, zeroed
from headway.learner.models.model_files import check_classifier, classifier_files, kept_files
from headway.learner.models.parallel_layout import check_layout
from headway.learner.models.pretrained import load_config, load_model
from headway.learner.ranks import check_same_count, count_ranks, join_ranks

from .cpu_shim import install_cpu_shim
from .mapping import Head, architecture_of

_joined: list[LayoutConfig] = []
"""The joined layout, at most one: Megatron keeps its groups process-wide."""


@dataclass(frozen=True)
class Coordinates:
    """This rank among all ranks, and its replica among all replicas."""

    rank: int
    world_size: int
    replica: int
    replicas: int
    is_lead: bool


def join(layout: LayoutConfig) -> Coordinates:
    """Make the groups of `layout` out of all ranks, which have met, unless they exist. Collective.

    Another layout replaces the groups of the last one, whose models can no longer be used.
    """
    from megatron.core import parallel_state, tensor_parallel

    if _joined != [layout]:
        if _joined:
            parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.tensor,
            pipeline_model_parallel_size=layout.pipeline,
            virtual_pipeline_model_parallel_size=layout.virtual_pipeline if layout.virtual_pipeline > 1 else None,
            context_parallel_size=layout.context,
            expert_model_parallel_size=layout.expert,
            expert_tensor_parallel_size=layout.expert_tensor,
            create_gloo_process_groups=False,
        )
        tensor_parallel.model_parallel_cuda_manual_seed(0)
        _joined[:] = [layout]
    own = (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_context_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_rank(),
    )
    return Coordinates(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        replica=parallel_state.get_data_parallel_rank(),
        replicas=parallel_state.get_data_parallel_world_size(),
        is_lead=own == (0, 0, 0),
    )


def open_source(model: ModelConfig, seed: int) -> Read:
    """Return a reader of the model's tensors; a random model is made whole. Raises ConfigError without files."""
    if model.random is not None:
        return _random_tensors(model, seed).__getitem__
    tensors = open_weights(model.path)
    if tensors is None:
        raise ConfigError(
            f"model.path: {model.path} has no safetensors files, and the megatron backend reads no others. Save the "
            "model once with transformers' save_pretrained, or use learner.backend=fsdp."
        )
    if load_config(model).tie_word_embeddings:
        check_tied(tensors.names, tensors, "lm_head.weight", "model.embed_tokens.weight")
    return tensors


def with_head(read: Read, first: torch.Tensor) -> Read:
    """Return a reader that also knows a head of one output, which has the weights `first` [1, W] and a bias of 0."""
    head = {SCORE_WEIGHT: first, SCORE_BIAS: torch.zeros(1)}
    return lambda name: head[name] if name in head else read(name)


def _random_tensors(model: ModelConfig, seed: int) -> dict[str, torch.Tensor]:
    from transformers.core_model_loading import revert_weight_conversion

    made = load_model(model, seed)
    tensors: dict[str, torch.Tensor] = revert_weight_conversion(made, made.state_dict())
    return tensors


Reports = list[dict[str, float]]


class ParallelModel:
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
        from .adapter import AdapterExport, LayerAdapters
        from .hugging_face import Exporter, places
        from .model import build, rotary_module, take_router_load, transformer_config
        from .optimizer import ShardedAdam, TrainingState, fill_frozen
        from .schedule import Schedule

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
        self._off_device = HostOffload()
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
        from . import hugging_face, model, optimizer, schedule  # noqa: F401
    # Deprecated calls of torch in Megatron's own code, which a user cannot mend.
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning)
    warnings.filterwarnings("ignore", message="full scope is deprecated", category=UserWarning)
    warnings.filterwarnings("ignore", message=r"The \.grad attribute of a Tensor that is not", category=UserWarning)
    # Megatron logs every layer whose block is not one of its own classes.
    logging.getLogger("megatron.core.transformer.transformer_layer").setLevel(logging.ERROR)


class MegatronBackend(ParallelModel):
    """A `Backend`. All calls are collective; all replicas must pass the same number of micro-batches."""

    def __init__(self, model: ModelConfig, optimizer: OptimizerConfig, **options: Unpack[BackendOptions]) -> None:
        super().__init__(model, optimizer, **options)
        self._saved = HuggingFaceSnapshot(model, kept_files(model) if self.rank == 0 else None, self._adapters)

    def logprobs(self, batches: Sequence[PackedBatch], temperature: float) -> list[torch.Tensor]:
        """[T] fp32 logprobs for every micro-batch; [0] for an empty one."""
        return self._evaluated(batches, temperature)

    def likeliest(self, batches: Sequence[PackedBatch], count: int) -> list[TopTokens]:
        """Return, for every micro-batch, the `count` likeliest tokens in each place with their logprobs."""
        return [TopTokens.of(found_TC2) for found_TC2 in self._evaluated(batches, 1.0, top=count)]

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
        tensors = self.named_tensors() if self._adapters is None else self.adapter_tensors()
        hugging_face = self._saved.writer(tensors, directory, is_copied=is_copied)
        return hugging_face, snapshot_rng(directory, self.rank, self._device)


class MegatronValueBackend(ParallelModel):
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

    def __init__(self, model: ModelConfig, optimizer: OptimizerConfig, **options: Unpack[BackendOptions]) -> None:
        """Raises ConfigError for a model that transformers could not load as a classifier."""
        check_classifier(model)
        super().__init__(model, optimizer, **options)
        self._saved = HuggingFaceSnapshot(model, classifier_files(model) if self.rank == 0 else None)

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the classifier's tensors, in `model.dtype`."""
        return self._exporter.named_tensors()

    def _stage_more(self, directory: Path, *, is_copied: bool) -> tuple[Callable[[], None], ...]:
        """Return the writer of a sequence classifier, on rank 0."""
        return (self._saved.writer(self.named_tensors(), directory, is_copied=is_copied),)


def _plain(batches: Sequence[PackedBatch]) -> list[PackedBatch]:
    """Return the batches with one number a token, and without experts to replay: a critic's routers choose for
    themselves, since they drift apart from the policy's."""
    return [dataclasses.replace(batch.plain, experts_TLK=None) for batch in batches]
