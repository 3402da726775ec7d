"""Computes from shapes what every rank of the learner will hold on its device, before any process starts.

Parameters, gradients and optimizer state are exact but for the padding of buffers; the rest is an estimate.

    backend    parameters          gradients           optimizer               sharded over
    fsdp       4 bytes, sharded    4 bytes, sharded    2 moments: 8 bytes,     all ranks, context ranks too
                                                       sharded
    megatron   2 bytes (float32:   4 bytes, whole      master, 2 moments: 12   replicas and context ranks; an
               4), whole                               (float32: 8), sharded   expert's: ranks with the same experts

"Whole" means the rank's whole part: 1/tensor of every matrix and of the vocabulary, 1/(expert * expert_tensor) of the
experts, all norms and routers, in the layers of its pipeline stage. An fsdp rank also holds gathered tensors.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from headway.broker.errors import ConfigError
from headway.broker.user_code.import_paths import load
from headway.learner.backends import BACKENDS
from headway.learner.config import LearnerConfig
from headway.learner.models.parallel_layout import check_splits
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


def plan_memory(planned: PlannedModel) -> list[RankMemory]:
    """Returns every rank's memory, largest first. Raises ConfigError for an impossible layout or a backend without
    plan."""
    backend = planned.learner.backend
    known = BACKENDS.get(backend)
    if known is None:
        raise ConfigError(f"learner.backend: nothing is known of what `{backend}` holds; use {' or '.join(BACKENDS)}.")
    check_splits(backend, known.abilities.splits, planned.learner.layout)
    ranks: list[RankMemory] = load(known.plan, "learner.backend")(planned)
    if planned.critic is not None:
        alone = replace(
            planned, shape=planned.critic, critic=None, has_reference=False, adapter=(), quantized={}, versions={}
        )
        ranks = _with_critic(ranks, plan_memory(with_score_head(alone)))
    return _largest_first(ranks)


def _with_critic(ranks: list[RankMemory], critic: list[RankMemory]) -> list[RankMemory]:
    """Returns the ranks with a critic, which keeps its state there and works when the policy does not."""
    beside = {held.rank: held for held in critic}
    return [
        replace(
            held,
            gathered=max(held.gathered, beside[held.rank].gathered),
            activations=max(held.activations, beside[held.rank].activations),
            head=max(held.head, beside[held.rank].head),
            other_models=held.other_models + beside[held.rank].states,
        )
        for held in ranks
    ]


def plan_distillation(student: PlannedModel, teacher: ModelShape) -> list[RankMemory]:
    """Returns every rank's memory, largest first, while a teacher on the student's ranks is asked, before the student's
    first step. Neither has gradients or moments then, and only the teacher is at work."""
    of_student, of_teacher = (
        plan_memory(
            replace(
                student,
                shape=shape,
                adapter=adapter,
                is_trained=False,
                has_reference=False,
                critic=None,
                versions={},
            )
        )
        for shape, adapter in ((student.shape, student.adapter), (teacher, ()))
    )
    asked = {held.rank: held for held in of_teacher}
    ranks = [
        replace(
            held,
            gathered=asked[held.rank].gathered,
            activations=asked[held.rank].activations,
            head=asked[held.rank].head,
            other_models=asked[held.rank].states,
        )
        for held in of_student
    ]
    return _largest_first(ranks)


def _largest_first(ranks: list[RankMemory]) -> list[RankMemory]:
    return sorted(ranks, key=lambda held: (-held.total, held.rank))


def with_score_head(planned: PlannedModel) -> PlannedModel:
    """Returns the model with a head of one output, as a reward model has it."""
    head = Parameter(name="score.weight", shape=(1, planned.shape.width), part="whole", layer=None)
    body = tuple(parameter for parameter in planned.shape.parameters if parameter.part != "head")
    shape = replace(planned.shape, parameters=(*body, head), is_tied=False)
    return replace(planned, shape=shape, has_vocabulary=False)
