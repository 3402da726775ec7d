"""The points of an event: a step's figures, pass rates and the pool of workers, all over learner steps; or a stage's
figures over its own steps."""

from collections.abc import Iterator

import msgspec

from headway.broker.schema.metrics import StepMetrics
from headway.deploy.run.events import EvaluationEvent, Event, HeartbeatEvent, StageEvent, StepEvent
from headway.deploy.run.figures import generated_per_s, trained_per_s, wait_fraction

HISTOGRAMS = {"lag_histogram", "token_lag_histogram", "response_length_histogram"}
NO_CURVES = {"incarnation", "step", "total_steps", *HISTOGRAMS, "by_lag", "algorithm", "reward", "reward_samples"}
"""Fields of StepMetrics without a curve: they name the step, or consist of parts."""


def step_of(event: Event) -> int:
    """Return the step of the learner, or of the stage, at which the event's points lie."""
    match event:
        case StepEvent():
            return event.metrics.step
        case StageEvent():
            return event.steps
    return event.step


def points(event: Event) -> Iterator[tuple[str, float]]:
    """Yield one point of each curve: its tag and its value."""
    match event:
        case StepEvent():
            yield from _of_step(event.metrics)
        case EvaluationEvent():
            yield "evaluation/pass_rate", event.pass_rate
            further = (event.pass_at_k, event.reward_mean, event.response_tokens_mean)
            for name, value in zip(("pass_at_k", "reward_mean", "response_tokens_mean"), further, strict=True):
                if value is not None:
                    yield f"evaluation/{name}", value
            for name, value in event.reward.items():
                yield f"evaluation/reward/{name}", value
        case StageEvent():
            for name, figure in {"loss": event.loss, "pass_rate": event.pass_rate, **event.metrics}.items():
                if figure is not None:
                    yield f"stage/{name}", figure
        case HeartbeatEvent():
            yield "workers/living", len(event.workers)
            yield "workers/generated_tokens_per_s", generated_per_s(event.workers)
            for name, depth in msgspec.structs.asdict(event.queues).items():
                yield f"queues/{name}", depth
            for name, age_s in msgspec.structs.asdict(event.ages).items():
                if age_s is not None:
                    yield f"queues/{name}", age_s


def _of_step(metrics: StepMetrics) -> Iterator[tuple[str, float]]:
    """Yield a step's points. A value that is not finite is None and leaves a gap in its curve."""
    for name, value in msgspec.structs.asdict(metrics).items():
        if name not in NO_CURVES and value is not None:
            yield f"step/{name}", value
    yield "step/trained_tokens_per_s", trained_per_s([metrics])
    yield "step/wait_fraction", wait_fraction([metrics])
    for part in ("algorithm", "reward", "reward_samples"):
        for name, value in getattr(metrics, part).items():
            yield f"{part}/{name}", value
    for lag, figures in metrics.by_lag.items():
        for name, value in msgspec.structs.asdict(figures).items():
            if value is not None:
                yield f"by_lag/{name}_{lag}", value
