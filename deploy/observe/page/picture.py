"""A run's figures as the page draws them and as `--json` prints them."""

from collections import Counter
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from headway.broker.schema.metrics import StepMetrics
from headway.broker.schema.status import Tallies
from headway.deploy.observe.status import RECENT_STEPS, workers_json
from headway.deploy.printing import visible
from headway.deploy.recipe.parse import to_yaml
from headway.deploy.run.events import EvaluationEvent, HeartbeatEvent, RunIncident, StageEvent, run_incidents
from headway.deploy.run.figures import (
    moving_average,
    trained_by_response_length,
    trained_per_s,
    trained_per_s_on_average,
)
from headway.deploy.run.record import Record
from headway.deploy.run.replay_comparison import leaves
from headway.deploy.run.samples import ShownSample, samples_of

from .thinning import COLUMNS, POINTS, Curve, LagMap, curve, lag_map, spans
from .versions import HeldVersion, held_versions

SHOWN_WORKERS = 50
"""The most workers of a page: a table of a thousand, drawn each second, would hold the browser up."""
SHOWN_PARTS = 8
"""The most parts of the reward that a page draws, those of most steps: so many colours it has."""
SHOWN_EVENTS = 200
"""The newest events that the page lists."""
CURVES: dict[str, Callable[[StepMetrics], float | None]] = {
    "reward_mean": lambda step: step.reward_mean,
    "reward_std": lambda step: step.reward_std,
    "loss": lambda step: step.loss,
    "grad_norm": lambda step: step.grad_norm,
    "lag_mean": lambda step: step.lag_mean,
    "lag_max": lambda step: step.lag_max,
    "response_tokens_mean": lambda step: step.response_tokens_mean,
    "trained_tokens_per_s": lambda step: trained_per_s([step]),
}
PHASES = ("take_s", "train_s", "publish_s", "checkpoint_s")
"""The parts of a step's seconds, in the order in which the page stacks them; `take_s` is waiting."""


class PhaseSeconds(msgspec.Struct, frozen=True, kw_only=True):
    """The mean seconds of each part of a step."""

    first: list[int]
    last: list[int]
    seconds: dict[str, list[float]]
    """[columns] By the names of PHASES."""


class StagePicture(msgspec.Struct, frozen=True, kw_only=True):
    """A stage without workers."""

    name: str
    steps: list[int]
    """[points] The last step behind each point of the curves; the first step is 1."""
    curves: dict[str, Curve]
    """The loss, and what was measured of held-out records and prompts, by name."""


class LastLook(msgspec.Struct, frozen=True, kw_only=True):
    """The workers, the weight versions and the tallies as the learner saw them last."""

    step: int
    """The step after which it looked, or its first one before that."""
    workers: list[dict[str, Any]]
    """The first SHOWN_WORKERS of them, by name."""
    worker_count: int
    versions: list[HeldVersion]
    tallies: Tallies


class Picture(msgspec.Struct, frozen=True, kw_only=True):
    """One run."""

    name: str
    directory: str
    state: str
    notes: list[str]
    """Sentences about what is missing or damaged."""
    summary: dict[str, Any]
    max_lag: int | None
    """The bound on lag, if it is known."""
    steps: list[int]
    """[points] The last step behind each point of the curves."""
    curves: dict[str, Curve]
    reward_parts: dict[str, Curve] = {}
    """The mean of each reward function's own score and of every further measure, over the last steps, by name."""
    phases: PhaseSeconds
    lag: LagMap
    evaluations: list[EvaluationEvent]
    events: list[RunIncident]
    earlier_events: int = 0
    """The number of events before those in `events`."""
    recipe: str
    """YAML; empty if it is unknown."""
    samples: list[ShownSample] = []
    """Trained samples to read."""
    stages: list[StagePicture] = []
    last_look: LastLook | None = None
    trained_by_response_length: dict[int, int] = {}
    """Trained samples by the tokens of their response, up to a power of two."""


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """A setting that is not the same in all runs."""

    key: str
    values: list[str | None]
    """As JSON, by run; None where the run does not have it."""


class Page(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a page."""

    title: str
    made_at: str
    """In UTC, as ISO 8601 has it."""
    runs: list[Picture]
    differences: list[Difference] = []


def page_of(records: Sequence[Record], read_samples: Callable[[Path], list[ShownSample]] = samples_of) -> Page:
    """Return the page that shows these runs side by side. Runs of the same name are called by their directories.

    `read_samples` returns the samples of a run's directory; only the page of a single run shows some.
    """
    runs = [picture_of(record) for record in records]
    if len(runs) == 1:
        runs = [msgspec.structs.replace(runs[0], samples=read_samples(records[0].directory))]
    counts = Counter(run.name for run in runs)
    runs = [run if counts[run.name] == 1 else msgspec.structs.replace(run, name=run.directory) for run in runs]
    return Page(
        title=" and ".join(run.name for run in runs),
        made_at=datetime.now(UTC).isoformat(timespec="seconds"),
        runs=runs,
        differences=differences([record.settings for record in records]),
    )


def picture_of(record: Record) -> Picture:
    """Return the figures of one run."""
    steps, events = record.lineage, run_incidents(record.steps)
    return Picture(
        name=_name(record),
        directory=visible(str(record.directory)),
        state=record.state,
        notes=record.notes,
        summary=record.summary,
        max_lag=_max_lag(record),
        steps=[steps[span][-1].step for span in spans(len(steps), POINTS)],
        curves=_curves(steps),
        reward_parts=_reward_parts(steps),
        phases=_phases(steps),
        lag=lag_map(steps),
        evaluations=record.evaluations,
        events=events[-SHOWN_EVENTS:],
        earlier_events=max(0, len(events) - SHOWN_EVENTS),
        recipe=to_yaml(record.settings) if record.settings else "",
        stages=[_stage(name, steps) for name, steps in record.stages.items() if steps],
        last_look=None if record.last_look is None else _last_look(record.last_look, steps),
        trained_by_response_length=trained_by_response_length(steps),
    )


def _last_look(look: HeartbeatEvent, steps: Sequence[StepMetrics]) -> LastLook:
    return LastLook(
        step=look.step,
        workers=workers_json(look.workers[:SHOWN_WORKERS]),
        worker_count=len(look.workers),
        versions=held_versions(look, steps[-RECENT_STEPS:]),
        tallies=look.tallies,
    )


def _stage(name: str, steps: Sequence[StageEvent]) -> StagePicture:
    measured = sorted({name for step in steps for name in step.metrics if name.startswith("held_out/")})
    curves = {"loss": curve([step.loss for step in steps])}
    if any(step.pass_rate is not None for step in steps):
        curves["pass_rate"] = curve([step.pass_rate for step in steps])
    curves |= {visible(metric): curve([step.metrics.get(metric) for step in steps]) for metric in measured}
    return StagePicture(
        name=visible(name), steps=[steps[span][-1].steps for span in spans(len(steps), POINTS)], curves=curves
    )


def differences(settings: Sequence[dict[str, Any]]) -> list[Difference]:
    """Return the settings that are not the same everywhere, by path. A run's name and place always are others."""
    found = [dict(leaves(each)) for each in settings]
    keys = sorted({key for each in found for key in each} - {"run.name", "run.directory"})
    rows = [Difference(key=key, values=[_as_json(each, key) for each in found]) for key in keys]
    return [row for row in rows if len(set(row.values)) > 1]


def _curves(steps: Sequence[StepMetrics]) -> dict[str, Curve]:
    drawn = {name: curve([value(step) for step in steps]) for name, value in CURVES.items()}
    drawn["reward_average"] = curve(moving_average([step.reward_mean for step in steps]))
    drawn["trained_tokens_per_s_average"] = curve(trained_per_s_on_average(steps))
    return drawn


def _reward_parts(steps: Sequence[StepMetrics]) -> dict[str, Curve]:
    counts = Counter(name for step in steps for name in step.reward)
    names = sorted(name for name, _ in counts.most_common(SHOWN_PARTS))
    return {visible(name): curve(moving_average([step.reward.get(name) for step in steps])) for name in names}


def _phases(steps: Sequence[StepMetrics]) -> PhaseSeconds:
    columns = [steps[span] for span in spans(len(steps), COLUMNS)]
    return PhaseSeconds(
        first=[column[0].step for column in columns],
        last=[column[-1].step for column in columns],
        seconds={
            phase: [sum(getattr(step, phase) for step in column) / len(column) for column in columns]
            for phase in PHASES
        },
    )


def _name(record: Record) -> str:
    return visible(record.directory.resolve().name)


def _max_lag(record: Record) -> int | None:
    staleness = record.settings.get("staleness")
    bound = staleness.get("max_lag") if isinstance(staleness, dict) else record.summary.get("max_lag_allowed")
    return bound if isinstance(bound, int) else None


def _as_json(settings: dict[str, Any], key: str) -> str | None:
    return msgspec.json.encode(settings[key]).decode() if key in settings else None
