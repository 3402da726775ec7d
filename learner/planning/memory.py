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

from dataclasses import replace

from headway.broker.errors import ConfigError
from headway.broker.user_code.import_paths import load
from headway.learner.backends.abilities import BACKENDS
from headway.learner.models.layout import check_splits
from headway.learner.models.shape import ModelShape, Parameter

from .planned import PlannedModel, RankMemory


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
        ranks = _in_turn(ranks, plan_memory(scored(alone)))
    return _largest_first(ranks)


def _in_turn(ranks: list[RankMemory], critic: list[RankMemory]) -> list[RankMemory]:
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


def plan_teaching(student: PlannedModel, teacher: ModelShape) -> list[RankMemory]:
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


def scored(planned: PlannedModel) -> PlannedModel:
    """Returns the model with a head of one output, as a reward model has it."""
    head = Parameter(name="score.weight", shape=(1, planned.shape.width), part="whole", layer=None)
    body = tuple(parameter for parameter in planned.shape.parameters if parameter.part != "head")
    shape = replace(planned.shape, parameters=(*body, head), is_tied=False)
    return replace(planned, shape=shape, has_vocabulary=False)
