"""The seam between a run and its metric sinks: a sink is given every event of the run."""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from headway.deploy.run.events import Event


@dataclass(frozen=True, kw_only=True)
class SinkRun:
    """The run whose events a sink is given: a learner's, or that of a stage without workers, whose steps count for
    themselves."""

    name: str
    """`run.name`; of a stage with the stage's name behind it."""
    identity: str
    """16 hexadecimal digits that no two runs share; empty for a replay, which is no run of its own."""
    directory: Path
    """The run's directory, where other processes may write as well."""
    stage: str = ""
    """The name of the directory that the stage leaves; empty: the events are the learner's."""
    record: Path = Path()
    """The file of the stage's record."""


class MetricSink(Protocol):
    """A destination of a run's events. `Sinks` makes all calls of one sink in the same thread, one after another.

    A sink of a resumed run may be given steps again: those since the last checkpoint are trained anew, under the next
    incarnation.
    """

    is_record: bool
    """Whether the run needs what this sink writes. If so, its error ends the learner, which resumes once the cause is
    gone. Every other sink gets a thread, may be slow, and loses events rather than delay training."""
    wants_heartbeats: bool
    """Whether the sink uses HeartbeatEvents. Without such a sink the learner does not ask the server for them. A record
    gets only those that follow a step, in the learner's own thread."""

    def open(self, run: SinkRun) -> None:
        """Prepare for the events of `run`. Called once, before the first event."""
        ...

    def write(self, event: Event) -> None:
        """Take one event. It may block. A record has written all of it when this returns, or raises HeadwayError."""
        ...

    def close(self) -> None:
        """Write what is held back. Called once, after the last event."""
        ...
