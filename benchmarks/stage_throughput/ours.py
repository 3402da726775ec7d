"""A stage over records, opened and run as its role does, without the model that it leaves."""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from headway.learner.backends import open_backend
from headway.learner.batching.batch import PackedBatch
from headway.learner.config import ComputeConfig, LayoutConfig, ModelConfig, OptimizerConfig, StageConfig
from headway.learner.data.prompts.rendering import Renderer
from headway.learner.models.model import load_tokenizer
from headway.learner.ranks import Ranks
from headway.learner.stages import open_stage
from headway.learner.stages.base import Progress, StageParts
from headway.learner.stages.stage_checkpoints import StageCheckpoints

from .order import Order, Watch


def measure_ordered(spec: object) -> dict[str, Any]:
    """Return the figures of a case."""
    order = msgspec.convert(spec, Order)
    with tempfile.TemporaryDirectory(prefix="headway-stage-") as directory:
        return _measure(order, Path(directory))


def _measure(order: Order, directory: Path) -> dict[str, Any]:
    model = ModelConfig(path=order.model, dtype="bfloat16")
    compute = ComputeConfig(compile=order.name.endswith("-compiled"))
    backend = open_backend(
        "fsdp", model, OptimizerConfig(), device=order.device, layout=LayoutConfig(), compute=compute
    )
    watch, losses = Watch(order.device), list[float]()
    train = backend.step

    def counted(batches: Sequence[PackedBatch], *arguments: Any, **options: Any) -> Any:
        watch.add(sum(batch.num_tokens for batch in batches))
        return train(batches, *arguments, **options)

    def report(progress: Progress) -> None:
        watch.step()
        losses.append(progress.loss)

    setattr(backend, "step", counted)  # noqa: B010 - the type has a method of this name
    tokenizer, ranks = load_tokenizer(model), Ranks.of(backend)
    parts = StageParts(
        backend=backend,
        ranks=ranks,
        tokenizer=tokenizer,
        renderer=Renderer(tokenizer, ""),
        checkpoints=StageCheckpoints(backend, ranks, directory / "model", {"made": "to be measured"}, every_s=60.0),
        seed=0,
        micro_batch_tokens=order.micro_batch_tokens,
        prefix_sharing="auto",
        gate=lambda _tensors, _count: 0.0,
        open_model=lambda other: open_backend("fsdp", other, OptimizerConfig(), device=order.device),
        report=report,
        should_stop=lambda: False,
    )
    stage = open_stage(StageConfig(kind=order.task, options=_options(order)), parts, "stage")
    watch.begin()
    stage.run()
    return {**watch.figures(order.warm_up_steps), "first_loss": losses[0], "last_loss": losses[-1]}


def _options(order: Order) -> dict[str, Any]:
    return {
        "data": {"path": order.data},
        "max_steps": order.steps + order.warm_up_steps,
        "batch_size": order.records_per_step,
        "learning_rate": 1e-6,
    }
