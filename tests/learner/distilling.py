"""A stage that distils a random teacher on random responses, as the stages in `preferences` train on pairs."""

from pathlib import Path
from typing import Any

from headway.learner.backends.base import Backend
from headway.learner.batching.clusters import Unit
from headway.learner.config import RecordsConfig
from headway.learner.stages.distill import DistillationTask
from headway.learner.stages.record_stage import TaskStage
from headway.learner.stages.registry import DistillationOptions
from tests.learner.preferences import pairs, parts_of

OPTIONS = DistillationOptions(
    data=RecordsConfig(),
    teacher="a model of other random weights",
    top_k=5,
    batch_size=3,
    learning_rate=1e-2,
    warmup_steps=2,
    cross_entropy_weight=0.25,
    evaluate_every_steps=2,
)


def conversations(count: int, seed: int = 0) -> list[Unit]:
    """Return ragged random responses to random prompts."""
    return [pair[:1] for pair in pairs(count, seed)]


def opened(
    directory: Path, options: DistillationOptions = OPTIONS, *, units: int = 7, **given: Any
) -> tuple[TaskStage, Backend]:
    """A stage on conversations; `given` goes to `parts_of`, whose `open_model` gives the teacher."""
    parts = parts_of(directory, **given)
    task = DistillationTask(parts, options, conversations(units), conversations(4, seed=9))
    return TaskStage(parts, options, task, part="distill"), parts.backend
