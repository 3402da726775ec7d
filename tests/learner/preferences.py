"""The parts of stages over records, pairs of random responses, and a stage that trains them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from headway.learner.backends import open_backend
from headway.learner.backends.base import Backend
from headway.learner.batching.clusters import PrefixSharing, Unit
from headway.learner.batching.packing import PackableSequence, labelled
from headway.learner.config import RecordsConfig, StageConfig
from headway.learner.data.prompts.rendering import Renderer
from headway.learner.models.pretrained import load_tokenizer
from headway.learner.ranks import Ranks
from headway.learner.stages import open_stage
from headway.learner.stages.base import Progress, Stage, StageParts
from headway.learner.stages.dpo import DpoTask
from headway.learner.stages.record_stage import TaskStage
from headway.learner.stages.registry import DpoOptions, LossConfig
from headway.learner.stages.stage_checkpoints import StageCheckpoints
from tests.learner.tiny import OPTIMIZER, VOCABULARY, model_config

MODEL = model_config("qwen3")
TEACHER_SEED = 8
OPTIONS = DpoOptions(
    data=RecordsConfig(),
    batch_size=3,
    learning_rate=1e-2,
    warmup_steps=2,
    loss=LossConfig(options={"beta": 0.5}),
    evaluate_every_steps=2,
)


def arithmetic(records: int, max_operations: int = 2, *, split: str = "train") -> dict[str, Any]:
    """Return the source of so many pairs of responses that end with the stop token."""
    options = {"records": records, "split": split, "min_operations": 1, "max_operations": max_operations}
    return {"kind": "arithmetic", "options": options}


SCORED = {
    "data": arithmetic(11),
    "held_out_records": 4,
    "batch_size": 3,
    "learning_rate": 1e-2,
    "warmup_steps": 2,
    "centering": 0.01,
    "evaluate_every_steps": 2,
}
"""Options of a reward model's stage."""


def pairs(count: int, seed: int = 0) -> list[Unit]:
    """Return pairs of ragged random responses to random prompts."""
    rng = np.random.default_rng(seed)
    return [_pair(rng) for _ in range(count)]


def _pair(rng: np.random.Generator) -> Unit:
    prompt = rng.integers(0, VOCABULARY, rng.integers(2, 8))
    return [_sequence(prompt, rng.integers(0, VOCABULARY, rng.integers(1, 12))) for _ in range(2)]


def _sequence(prompt: NDArray[np.int64], response: NDArray[np.int64]) -> PackableSequence:
    loss_mask = np.repeat(np.array([0, 1], np.uint8), [len(prompt), len(response)])
    return labelled(np.concatenate([prompt, response]).astype(np.int32), loss_mask)


def opened(
    directory: Path,
    options: DpoOptions = OPTIONS,
    *,
    units: int = 7,
    **given: Any,
) -> tuple[TaskStage, Backend]:
    """A stage on pairs; `given` goes to `parts_of`."""
    parts = parts_of(directory, **given)
    task = DpoTask(parts, options, pairs(units), pairs(4, seed=9))
    return TaskStage(parts, options, task, part="dpo"), parts.backend


def opened_scores(directory: Path, *, options: dict[str, Any] | None = None, **given: Any) -> tuple[Stage, Backend]:
    """A stage that trains a reward model; `given` goes to `parts_of`."""
    parts = parts_of(directory, head="score", **given)
    config = StageConfig(kind="reward_model", options=SCORED | (options or {}))
    return open_stage(config, parts, "stages[0]"), parts.backend


def opened_sft(directory: Path, *, options: dict[str, Any] | None = None, **given: Any) -> tuple[Stage, Backend]:
    """A stage that imitates conversations; `given` goes to `parts_of`."""
    parts = parts_of(directory, **given)
    shared = {name: value for name, value in SCORED.items() if name != "centering"}
    return open_stage(StageConfig(kind="sft", options=shared | (options or {})), parts, "stages[0]"), parts.backend


def opened_kto(directory: Path, *, options: dict[str, Any] | None = None, **given: Any) -> tuple[Stage, Backend]:
    """A stage on single judgements; `given` goes to `parts_of`."""
    parts = parts_of(directory, **given)
    shared = {name: value for name, value in SCORED.items() if name != "centering"} | {"beta": 0.5}
    return open_stage(StageConfig(kind="kto", options=shared | (options or {})), parts, "stages[0]"), parts.backend


def parts_of(
    directory: Path,
    *,
    head: Literal["policy", "score"] = "policy",
    micro_batch_tokens: int = 64,
    prefix_sharing: PrefixSharing = "never",
    every_s: float = 60.0,
    backend_kind: str = "fsdp",
    report: Callable[[Progress], None] = lambda _: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> StageParts:
    """Return the parts of a stage, and a model of its own."""
    backend: Any = open_backend(backend_kind, MODEL, OPTIMIZER, seed=3, head=head)
    ranks, tokenizer = Ranks.of(backend), load_tokenizer(MODEL)
    return StageParts(
        backend=backend,
        ranks=ranks,
        tokenizer=tokenizer,
        renderer=Renderer(tokenizer),
        checkpoints=StageCheckpoints(backend, ranks, directory / "stage", {"made": "of this recipe"}, every_s=every_s),
        seed=1,
        micro_batch_tokens=micro_batch_tokens,
        prefix_sharing=prefix_sharing,
        gate=lambda tensors, prompts: 0.0,
        open_model=lambda _: open_backend(backend_kind, MODEL, OPTIMIZER, seed=TEACHER_SEED),
        report=report,
        should_stop=should_stop,
    )
