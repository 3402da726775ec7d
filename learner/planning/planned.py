"""The subject of a plan, a model and its training, and the result: the bytes of each rank."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from headway.learner.config import LearnerConfig
from headway.learner.models.shape import ModelShape, Parameter

FP32 = 4
MOMENTS = 2 * FP32


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """The bytes that one rank holds on its device."""

    rank: int
    part: str
    """The rank's part of the model, in words."""
    parameters: int
    gradients: int
    optimizer: int
    gathered: int
    """The tensors that fsdp gathers while layers are computed."""
    activations: int
    """Activations that are kept for the backward pass, those of recorded kernels besides those of launched ones."""
    head: int
    """A chunk of logits or those of a row, and the gradient of the output head's weight while it is summed."""
    other_models: int
    """The reference of the KL penalty, the critic of gae, and the teacher of distillation."""
    published: int
    """Whole versions of the weights, kept for engines."""

    @property
    def states(self) -> int:
        """The memory that the model and its training take between two steps."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def total(self) -> int:
        return self.states + self.gathered + self.activations + self.head + self.other_models + self.published


@dataclass(frozen=True, kw_only=True)
class PlannedModel:
    """The subject of a plan: a model, how it is split and trained, and the models besides it."""

    shape: ModelShape
    learner: LearnerConfig
    dtype: Literal["float32", "bfloat16"]
    """`model.dtype`, the number format of the forward and backward pass."""
    has_reference: bool = False
    critic: ModelShape | None = None
    """The model of the critic of gae, which may be another one than the policy."""
    is_trained: bool = True
    """Whether it is updated. A teacher is only read: it has neither gradients nor moments, and keeps no activations."""
    has_vocabulary: bool = True
    """Whether its output is over the vocabulary; else one score, as a reward model's."""
    adapter: tuple[Parameter, ...] = ()
    """The parameters of the adapter that is trained, whose base is frozen; none: the whole model is trained."""
    quantized: Mapping[str, int] = field(default_factory=dict)
    """The bytes of the frozen weights that are held in few bits, by name; each rank holds them whole."""
    sharing: int = 1
    """The most sequences that share tokens of a row, such as a group's samples; 1: rows share none."""
    versions: Mapping[int, int] = field(default_factory=dict)
    """The number of whole versions of the weights on each rank's device."""
    device_bytes: int | None = None
    """The memory of the device that the plan is for; None: it is not known, and decides nothing."""

    @property
    def compute_bytes(self) -> int:
        """The bytes of one number in the forward and backward pass."""
        return 2 if self.dtype == "bfloat16" else FP32

    @cached_property
    def plain_parameters(self) -> tuple[Parameter, ...]:
        """The parameters of the model that are not quantized."""
        return tuple(one for one in self.shape.parameters if one.name not in self.quantized)

    @property
    def replicas(self) -> int:
        layout = self.learner.layout
        return self.learner.processes // (layout.tensor * layout.pipeline * layout.context)

    @property
    def row_tokens(self) -> int:
        """The tokens of a micro-batch on one rank."""
        return -(-self.learner.micro_batch_tokens // self.learner.layout.context)

    @cached_property
    def vocabulary_rows(self) -> int:
        """The rows of the vocabulary on one rank; those of the last rank are padded."""
        return -(-self.shape.vocabulary // self.learner.layout.tensor)
