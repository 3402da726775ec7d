"""The run's own record: metrics.jsonl, trained.jsonl and evaluations.jsonl, from which all figures are computed,
last_look.json, and the record of each stage without workers."""

from pathlib import Path

import msgspec

from headway.deploy.run.events import EvaluationEvent, Event, HeartbeatEvent, StageEvent, StepEvent
from headway.deploy.run.record import EVALUATIONS, LAST_LOOK, METRICS, TRAINED, TrainedLine
from headway.deploy.run.stage_output import StageRecord
from headway.learner.disk import append_line, cut_torn_line, replace_file, write_errors

from .base import SinkRun


class JsonlSink:
    """Appends lines to the files of a run or of a replay. A resumed learner continues these files. The last look at the
    workers and the queues replaces the one before.

    A line or a look is written whole, or HeadwayError says why it is not there.
    """

    is_record = True
    wants_heartbeats = True

    def __init__(self) -> None:
        self._directory = Path()
        self._identity = ""
        self._stage_file = Path()
        self._stage: StageRecord | None = None

    def open(self, run: SinkRun) -> None:
        """Make the directory, and remove a line that a killed learner left unfinished. Raises HeadwayError."""
        self._directory, self._identity, self._stage_file = run.directory, run.identity, run.record
        with write_errors(run.directory):
            run.directory.mkdir(parents=True, exist_ok=True)
        for name in (METRICS, TRAINED, EVALUATIONS):
            cut_torn_line(run.directory / name)

    def write(self, event: Event) -> None:
        """Append a step to metrics.jsonl and to trained.jsonl, an evaluation to evaluations.jsonl, or a stage's step to
        the record of that stage; or keep a look as last_look.json."""
        match event:
            case StepEvent():
                self._append(METRICS, event.metrics)
                self._append(TRAINED, self._trained(event))
            case EvaluationEvent():
                self._append(EVALUATIONS, event)
            case HeartbeatEvent():
                replace_file(self._directory / LAST_LOOK, msgspec.json.encode(event))
            case StageEvent():
                if self._stage is None:
                    self._stage = StageRecord(self._stage_file, event.steps - 1)
                self._stage.write(event)

    def close(self) -> None:
        """Do nothing: every line is written already."""

    def _trained(self, event: StepEvent) -> TrainedLine:
        return TrainedLine(
            identity=self._identity,
            incarnation=event.metrics.incarnation,
            step=event.metrics.step,
            tids=event.tids,
            oldest_step=event.oldest_step,
        )

    def _append(self, name: str, line: msgspec.Struct) -> None:
        append_line(self._directory / name, msgspec.json.encode(line))
