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

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, NamedTuple

from headway.broker.errors import ConfigError
from headway.broker.user_code.import_paths import load
from headway.learner.backends import BACKENDS
from headway.learner.batching.clusters import KEYS_OF_A_TOKEN
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
    teachers = {held.rank: held for held in of_teacher}
    ranks = [
        replace(
            held,
            gathered=teachers[held.rank].gathered,
            activations=teachers[held.rank].activations,
            head=teachers[held.rank].head,
            other_models=teachers[held.rank].states,
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


INDEX = 8


class KeptNumbers(NamedTuple):
    """The part of a layer that a backend keeps under `recompute: selective`."""

    numbers: Callable[[ModelShape, int], int]
    """(shape, layer) -> the numbers of a token."""
    copies: bool
    """Whether it keeps the copies of keys and values that sequences share."""


def activation_bytes(planned: PlannedModel, layers: Sequence[int], in_flight: float, keeps: KeptNumbers) -> int:
    """Returns the bytes of activations, of rows that share tokens or do not, whichever are more.

    Source: Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", section 4.

    Theirs is s*b*h * 34 bytes a layer with dropout, GELU and 4h wide blocks, and 5*a*s/h more for the attention matrix.
    Here rows are packed, so T tokens stand for s*b; flash attention keeps no matrix; there is no dropout; the
    feed-forward is gated. All are divided by context and, thanks to sequence parallelism, tensor (their equation 4).
    Recomputed activations exist for one layer at a time. Kernels are taken to be fused: unfused ones keep a fifth to a
    third more on a CPU.
    """
    alone = _row_bytes(planned, layers, in_flight, keeps, planned.row_tokens, 0.0)
    positions = planned.row_tokens / (1 + (planned.sharing - 1) / KEYS_OF_A_TOKEN)
    return int(max(alone, _row_bytes(planned, layers, in_flight, keeps, positions, (planned.sharing - 1) * positions)))


def _row_bytes(
    planned: PlannedModel, layers: Sequence[int], in_flight: float, keeps: KeptNumbers, positions: float, copies: float
) -> float:
    """Returns the bytes of a row of so many positions, with further copies of tokens among the keys and values.

    Sequences that share all but their ends have the most: all of them a copy of each token. By `rows.clusters` the row
    then has fewer positions. Copies are made for a layer at work, and kept with what attention keeps. Three indices of
    8 bytes a token say where they are.
    """
    shape = planned.shape
    copied = 2 * shape.key_value_heads * shape.head_width
    whole = [all_numbers(shape, layer) * positions + copied * copies for layer in layers]
    kept = (
        [_kept_numbers(planned, layer, keeps) for layer in layers] if planned.is_trained else [(0, False)] * len(layers)
    )
    held = [numbers * positions + copied * copies * keeps_copies for numbers, keeps_copies in kept]
    made_again = max(all_of_it - of_it for all_of_it, of_it in zip(whole, held, strict=True))
    indices = INDEX * (2 * (positions + copies) + positions) if copies else 0
    numbers = in_flight * sum(held) + made_again
    return planned.compute_bytes * numbers / planned.learner.layout.tensor + in_flight * indices


def _kept_numbers(planned: PlannedModel, layer: int, keeps: KeptNumbers) -> tuple[int, bool]:
    """Returns the numbers kept for a token in one layer, and whether copies of its key and value are: all, those of
    `recompute: selective`, or the layer's input."""
    shape = planned.shape
    match planned.learner.compute.recompute:
        case "none":
            return all_numbers(shape, layer), True
        case "full":
            return shape.width, False
        case "selective":
            return keeps.numbers(shape, layer), keeps.copies


def all_numbers(shape: ModelShape, layer: int) -> int:
    """Counts for a token: inputs and outputs of two norms; attention; gate, up, activation, product; experts' rows.

    With experts, each chosen one has a copy of the token and an output of its own.
    """
    rows = shape.experts_per_token if shape.has_experts(layer) else 0
    before_norm = (shape.heads + shape.key_value_heads) * shape.head_width if shape.has_qk_norm else 0
    norms = 4 * shape.width + before_norm
    return norms + attention_numbers(shape) + 4 * shape.feed_forward_width(layer) + 2 * rows * shape.width


def attention_numbers(shape: ModelShape) -> int:
    """Counts for a token: queries, keys, values, and attention's output."""
    return 2 * (shape.heads + shape.key_value_heads) * shape.head_width


def head_bytes(planned: PlannedModel) -> int:
    """Returns the bytes in `token_logprobs`: a chunk of logits, their gradient, the weight's in fp32 and rounded; of a
    model that is not trained, the chunk and its fp32 copy."""
    from headway.learner.backends.token_logprobs import LOGITS_PER_CHUNK

    if not planned.has_vocabulary:
        return 0
    rows = planned.vocabulary_rows
    tokens = min(planned.row_tokens, max(1, LOGITS_PER_CHUNK // rows))
    number = planned.compute_bytes
    if not planned.is_trained:
        return rows * (FP32 + number) * tokens
    if planned.adapter:  # the head is frozen
        return rows * 2 * number * tokens
    return rows * (2 * number * tokens + (FP32 + number) * planned.shape.width)


def kept_logits_bytes(planned: PlannedModel) -> int:
    """Returns the bytes of the logits that fsdp keeps from the forward to the backward pass of a row that is
    launched."""
    from headway.learner.backends.token_logprobs import keeps_logits

    tokens, rows = planned.row_tokens, planned.vocabulary_rows
    keeps = planned.learner.compute.recompute == "none" and planned.is_trained and planned.has_vocabulary
    number, on_cpu = planned.compute_bytes, planned.learner.device == "cpu"
    fits = keeps_logits(tokens, rows, number_bytes=number, on_cpu=on_cpu, device_bytes=planned.device_bytes)
    return number * tokens * rows if keeps and fits else 0


def published_bytes(planned: PlannedModel, rank: int) -> int:
    return planned.versions.get(rank, 0) * planned.compute_bytes * planned.shape.num_parameters


LOGITS = 1 << 26
"""The logits that a teacher holds at one time, in fp32, with a copy in the model's format and one of the sum."""


def scorer_bytes(
    shape: ModelShape,
    dtype: Literal["float32", "bfloat16", "float16"],
    step_tokens: int,
    *,
    has_vocabulary: bool,
    logits_tokens: int | None = None,
    cache_tokens: int = 0,
) -> int:
    """Returns the bytes of the weights and of a cache, which are exact, and an estimate of one layer's activations and
    of the logits.

    `step_tokens` go through the model at once. A model without vocabulary has a head of one output; another one holds
    the logits of `logits_tokens` at one time, or where that is None as many as LOGITS allows. The keys and values of
    `cache_tokens` stay in memory.
    """
    number = FP32 if dtype == "float32" else FP32 // 2
    head = 0 if has_vocabulary else shape.width - sum(part.size for part in shape.parameters if part.part == "head")
    activations = step_tokens * max(all_numbers(shape, layer) for layer in range(shape.layers))
    logits = min(step_tokens * shape.vocabulary, LOGITS) if logits_tokens is None else logits_tokens * shape.vocabulary
    cache = cache_tokens * 2 * shape.layers * shape.key_value_heads * shape.head_width
    held = shape.num_parameters + head + activations + cache
    return number * held + (2 * FP32 + number) * (logits if has_vocabulary else 0)
