"""Reads all that a run's directory says of the run, however much of it is there, and says in words what is not."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from headway.broker.connection.address import without_secrets
from headway.broker.errors import HeadwayError
from headway.broker.schema.metrics import StepMetrics
from headway.deploy.recipe.parse import read_yaml

from . import figures
from .directory import CONFIG, find_run, is_going_on
from .events import EvaluationEvent, HeartbeatEvent, StageEvent
from .report import (
    EVALUATIONS,
    LAST_LOOK,
    METRICS,
    SUMMARY,
    FileLines,
    lineage,
    read_last_look,
    read_summary,
    summary_of,
)
from .stage_output import records_in

Line = TypeVar("Line", StepMetrics, EvaluationEvent, StageEvent)
OF_THE_SERVER = {"dropped_stale", "max_lag_allowed", "generated_tokens", "generation_tokens_per_s", "worker_restarts"}
"""Summary figures that are unknown before the run's end: a zero would be taken for a count."""
FILES = (CONFIG, METRICS, EVALUATIONS, LAST_LOOK, SUMMARY)
MISSING = {
    METRICS: "No step has been trained in this directory yet, or the file was moved away.",
    CONFIG: "The run's recipe is unknown.",
}
"""The meaning of a file that is missing. The others are missing for good reasons: a run need not be evaluated."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """A run's files, read once. Raises nothing for files that are missing, torn or damaged: `notes` name them."""

    directory: Path
    steps: list[StepMetrics]
    """All lines, those of abandoned steps too."""
    evaluations: list[EvaluationEvent]
    """Those of the lineage."""
    stages: dict[str, list[StageEvent]]
    """The steps of the stages without workers, by the names of the directories that they leave, in order."""
    last_look: HeartbeatEvent | None = None
    """The workers, the queues and the tallies as the learner saw them last."""
    summary: dict[str, Any]
    settings: dict[str, Any]
    """The recipe's values without passwords; empty if they are unknown."""
    is_running: bool
    notes: list[str]

    @property
    def lineage(self) -> list[StepMetrics]:
        """The steps that lead to the last weights."""
        return lineage(self.steps)

    @property
    def state(self) -> str:
        """The run's state as its directory shows it: running, finished, or stopped."""
        last = self.lineage[-1] if self.steps else None
        if self.is_running:
            return "running"
        return "finished" if last is not None and last.step + 1 >= last.total_steps else "stopped"


def read_record(run: str, *, again: bool = False) -> Record:
    """Read the run in that directory, or else of that name below ./runs. Raises ConfigError if there is none.

    `again`: for a caller that reads a running run again and again. Its summary then comes from metrics.jsonl alone,
    without `trained_twice`: trained.jsonl names every trajectory, and takes seconds to read once it has millions.
    """
    directory = find_run(run, (CONFIG, METRICS))
    notes: list[str] = []
    steps = _read_lines(directory / METRICS, StepMetrics, notes)
    evaluations = _read_lines(directory / EVALUATIONS, EvaluationEvent, notes)
    stages = {name: _read_lines(path, StageEvent, notes) for name, path in records_in(directory).items()}
    is_running = _is_running(directory)
    return Record(
        directory=directory,
        steps=steps,
        evaluations=lineage(evaluations),
        stages=stages,
        last_look=_read_last_look(directory, notes),
        summary=_followed(steps, lineage(evaluations))
        if again and is_running
        else _read_summary(directory, len(lineage(steps)), notes),
        settings=_read_settings(directory / CONFIG, notes),
        is_running=is_running,
        notes=notes,
    )


def _followed(steps: list[StepMetrics], evaluations: list[EvaluationEvent]) -> dict[str, Any]:
    """Return the summary's figures that the steps and evaluations tell."""
    kept = lineage(steps)
    return {
        **figures.learned(kept),
        **figures.evaluated(evaluations),
        **figures.spent(steps),
        "trained_trajectories": sum(step.trajectories for step in kept),
        "max_lag_seen": max((step.lag_max for step in kept), default=0),
    }


def stamp(directory: Path) -> tuple[object, ...]:
    """Return what changes whenever the run's files do, or whether it runs; reading it costs almost nothing."""
    files = (*(directory / name for name in FILES), *records_in(directory).values())
    return (_is_running(directory), *map(_size_and_time, files))


def _size_and_time(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns


def _read_lines(path: Path, kind: type[Line], notes: list[str]) -> list[Line]:
    try:
        file = FileLines(path, kind)
    except HeadwayError as error:
        notes.append(str(error))
        return []
    notes.extend(_damage(path.name, file))
    return file.lines


def _damage(name: str, file: FileLines[Line]) -> Iterator[str]:
    if file.is_missing and name in MISSING:
        yield f"{name} is missing. {MISSING[name]}"
    if file.unreadable:
        yield f"{name} has damaged lines, which no figure here counts: {file.unreadable}."
    if file.is_torn:
        yield f"The last line of {name} has no end, and is left out: it is being written, or its writer was killed."


def _read_summary(directory: Path, steps: int, notes: list[str]) -> dict[str, Any]:
    """Return summary.json, or its figures as of now if it is missing, damaged or older than the last step."""
    try:
        written = read_summary(directory)
        if written.get("steps") == steps:
            return written
        if written:
            notes.append(
                f"{SUMMARY} is older than the last steps, so these figures were computed from the other files."
            )
    except HeadwayError as error:
        notes.append(str(error))
    try:
        computed = summary_of(directory)
    except HeadwayError as error:
        notes.append(f"There are no summary figures: {error}")
        return {}
    return {key: value for key, value in computed.items() if key not in OF_THE_SERVER}


def _read_last_look(directory: Path, notes: list[str]) -> HeartbeatEvent | None:
    try:
        return read_last_look(directory)
    except HeadwayError as error:
        notes.append(str(error))
        return None


def _read_settings(path: Path, notes: list[str]) -> dict[str, Any]:
    if not path.exists():
        notes.append(f"{path.name} is missing. {MISSING[path.name]}")
        return {}
    try:
        settings = read_yaml(path)
    except HeadwayError as error:
        notes.append(f"The recipe is unknown: {error}")
        return {}
    server = settings.get("broker")
    if isinstance(server, dict) and isinstance(server.get("url"), str):
        settings["broker"] = {**server, "url": without_secrets(server["url"])}
    return settings


def _is_running(directory: Path) -> bool:
    try:
        return is_going_on(directory)
    except HeadwayError:  # a copy on a disk that cannot be written
        return False
