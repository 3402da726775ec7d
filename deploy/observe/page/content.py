"""The content of a page of runs, as it is drawn and as `--json` prints it: curves, thinned to what a screen shows, and
the samples and tokens of each weight version. `document` puts it into one HTML file with the style and the scripts.
"""

import base64
import hashlib
import html
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec

from headway.broker.schema.status import RunStatus, Tallies, VersionGroups, WorkerInfo
from headway.broker.schema.step_metrics import StepMetrics
from headway.deploy.observe.status_tables import RECENT_STEPS, version_text, workers_json
from headway.deploy.printing import visible
from headway.deploy.recipe.parse import to_yaml
from headway.deploy.run.events import EvaluationEvent, HeartbeatEvent, RunIncident, StageEvent, run_incidents
from headway.deploy.run.figures import (
    lag_histogram,
    moving_average,
    trained_by_response_length,
    trained_by_step_of_weights,
    trained_per_s,
    trained_per_s_on_average,
    trained_tokens_by_step_of_weights,
)
from headway.deploy.run.record import Record, leaves
from headway.deploy.run.samples import ShownSample, samples_of

POINTS = 400
"""Most points of a curve."""
COLUMNS = 120
"""Most columns of bars and of a heat map."""
ROWS = 32
"""Most rows of a heat map."""


class Curve(msgspec.Struct, frozen=True, kw_only=True):
    """A value over steps; each point stands for one or several steps."""

    mean: list[float | None]
    low: list[float | None] = []
    """The smallest value behind each point; empty where each point stands for one step."""
    high: list[float | None] = []


class LagMap(msgspec.Struct, frozen=True, kw_only=True):
    """The trajectories trained, by lag and by step."""

    first: list[int]
    """[columns] The first step of each column."""
    last: list[int]
    rows: list[tuple[int, int]]
    """The smallest and the largest lag of each row."""
    trajectories: list[list[int]]
    """[columns, rows]"""
    totals: list[int]
    """[rows] Over all steps."""


def spans(count: int, most: int) -> list[slice]:
    """Cut `count` things into at most `most` runs of almost equal length."""
    number = min(count, most)
    return [slice(count * index // number, count * (index + 1) // number) for index in range(number)]


def curve(values: Sequence[float | None]) -> Curve:
    """Thin a series; a point whose values are all unknown is None."""
    points = [[value for value in values[span] if value is not None] for span in spans(len(values), POINTS)]
    mean = [fmean(point) if point else None for point in points]
    if len(values) <= POINTS:
        return Curve(mean=mean)
    low, high = ([pick(point) if point else None for point in points] for pick in (min, max))
    return Curve(mean=mean, low=low, high=high)


def lag_map(steps: Sequence[StepMetrics]) -> LagMap:
    """Count trajectories by lag and by step, in at most COLUMNS x ROWS cells."""
    columns = [steps[span] for span in spans(len(steps), COLUMNS)]
    rows = list(_rows(max((max(step.lag_histogram, default=0) for step in steps), default=0)))
    return LagMap(
        first=[column[0].step for column in columns],
        last=[column[-1].step for column in columns],
        rows=rows,
        trajectories=[_by_row(lag_histogram(column), rows) for column in columns],
        totals=_by_row(lag_histogram(steps), rows),
    )


def _rows(largest: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges of lags from 0 to `largest`, each of the same width."""
    width = -(-(largest + 1) // ROWS)
    for low in range(0, largest + 1, width):
        yield low, low + width - 1


def _by_row(counts: dict[int, int], rows: Sequence[tuple[int, int]]) -> list[int]:
    width, by_row = rows[0][1] - rows[0][0] + 1, Counter[int]()
    for lag, count in counts.items():
        by_row[lag // width] += count
    return [by_row[index] for index in range(len(rows))]


_NO_GROUPS = VersionGroups(step=0, generating=0, ready=0, dropped=0)


class VersionCounts(msgspec.Struct, frozen=True, kw_only=True):
    """The places of the samples of one weight version."""

    version: str
    is_announced: bool
    workers: int
    """Workers whose engines hold it."""
    generating: int
    """Samples that these workers hold leases of."""
    groups_generating: int
    """Groups whose oldest token it sampled, and that lack samples."""
    groups_ready: int
    """Groups whose oldest token it sampled, and that the learner has not taken."""
    groups_dropped: int
    tokens_ready: int
    """Tokens that it sampled, of groups that the learner has not taken."""
    trained: int
    """Trajectories that the steps trained and whose oldest token it sampled."""
    trained_tokens: int
    """Tokens that it sampled and the steps trained."""


def version_counts(look: RunStatus | HeartbeatEvent, steps: Sequence[StepMetrics]) -> list[VersionCounts]:
    """Return the versions that workers hold, that groups wait with or that these steps trained, the newest first."""
    holders: dict[str, list[WorkerInfo]] = defaultdict(list)
    for worker in look.workers:
        holders[version_text(worker.version)].append(worker)
    steps = [step for step in steps if step.incarnation == look.incarnation]
    trained, tokens = (
        {f"{look.incarnation}.{step}": count for step, count in by_step(steps).items()}
        for by_step in (trained_by_step_of_weights, trained_tokens_by_step_of_weights)
    )
    incarnation = look.announced.incarnation if look.announced is not None else look.incarnation
    groups = {f"{incarnation}.{version.step}": version for version in look.versions}
    announced = version_text(look.announced)
    return [
        _counts_of(
            name, announced, holders[name], groups.get(name, _NO_GROUPS), trained.get(name, 0), tokens.get(name, 0)
        )
        for name in _newest({*holders, *groups, *trained, *tokens, announced})
    ]


def _counts_of(
    name: str, announced: str, workers: Sequence[WorkerInfo], groups: VersionGroups, trained: int, trained_tokens: int
) -> VersionCounts:
    return VersionCounts(
        version=name,
        is_announced=name == announced,
        workers=len(workers),
        generating=sum(worker.active for worker in workers),
        groups_generating=groups.generating,
        groups_ready=groups.ready,
        groups_dropped=groups.dropped,
        tokens_ready=groups.ready_tokens,
        trained=trained,
        trained_tokens=trained_tokens,
    )


def _newest(names: set[str]) -> list[str]:
    """Sort versions; the dash, which stands for no version yet, comes last."""
    return sorted(
        names, key=lambda name: [int(part) for part in name.split(".")] if name[0] != "-" else [], reverse=True
    )


HERE = Path(__file__).parent
SCRIPTS = ("charts.js", "page.js")
_MARKUP = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}


def document(content: Any, title: str, *, is_live: bool = False) -> bytes:
    """Return the whole file. A live page may ask the server that it came from; any other asks no server."""
    style, script = _read("page.css"), "\n".join(_read(name) for name in SCRIPTS)
    connect = " connect-src 'self';" if is_live else ""
    policy = f"default-src 'none';{connect} style-src '{_digest(style)}'; script-src '{_digest(script)}'; img-src data:"
    parts = {
        "policy": policy,
        "title": html.escape(title),
        "style": style,
        "content": embedded(content),
        "script": script,
    }
    page = re.sub(r"\{\{(\w+)\}\}", lambda mark: parts[mark[1]], _read("page.html"))
    return page.encode()


def embedded(content: Any) -> str:
    """Return JSON that no HTML parser takes for the end of its element."""
    text = msgspec.json.encode(content).decode()
    return "".join(_MARKUP.get(character, character) for character in text)


def _read(name: str) -> str:
    return (HERE / name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


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
AGENT_CURVES = ("turns_mean", "tool_calls_mean", "tool_s_mean", "fork_fraction", "reread_fraction", "unseen_fraction")
"""Fields of AgentFigures with a curve, which is called `agent/FIELD`."""
PHASES = ("take_s", "train_s", "publish_s", "checkpoint_s")
"""The parts of a step's seconds, in the order in which the page stacks them; `take_s` is waiting."""


class PhaseSeconds(msgspec.Struct, frozen=True, kw_only=True):
    """The mean seconds of each part of a step."""

    first: list[int]
    last: list[int]
    seconds: dict[str, list[float]]
    """[columns] By the names of PHASES."""


class StageFigures(msgspec.Struct, frozen=True, kw_only=True):
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
    versions: list[VersionCounts]
    tallies: Tallies


class RunFigures(msgspec.Struct, frozen=True, kw_only=True):
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
    stages: list[StageFigures] = []
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
    runs: list[RunFigures]
    differences: list[Difference] = []


def page_of(records: Sequence[Record], read_samples: Callable[[Path], list[ShownSample]] = samples_of) -> Page:
    """Return the page that shows these runs side by side. Runs of the same name are called by their directories.

    `read_samples` returns the samples of a run's directory; only the page of a single run shows some.
    """
    runs = [run_figures(record) for record in records]
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


def run_figures(record: Record) -> RunFigures:
    """Return the figures of one run."""
    steps, events = record.lineage, run_incidents(record.steps)
    return RunFigures(
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
        versions=version_counts(look, steps[-RECENT_STEPS:]),
        tallies=look.tallies,
    )


def _stage(name: str, steps: Sequence[StageEvent]) -> StageFigures:
    measured = sorted({name for step in steps for name in step.metrics if name.startswith("held_out/")})
    curves = {"loss": curve([step.loss for step in steps])}
    if any(step.pass_rate is not None for step in steps):
        curves["pass_rate"] = curve([step.pass_rate for step in steps])
    curves |= {visible(metric): curve([step.metrics.get(metric) for step in steps]) for metric in measured}
    return StageFigures(
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
    agents = [step.agent or None for step in steps]
    if any(agents):
        drawn |= {f"agent/{name}": curve([getattr(one, name, None) for one in agents]) for name in AGENT_CURVES}
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
