"""What a metric sink is: something that is told every event of a run, and does with it what it likes."""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from deploy.run.events import Event


@dataclass(frozen=True, kw_only=True)
class SinkRun:
    """The run whose events a sink is told."""

    name: str
    identity: str
    """16 hexadecimal digits that no two runs share; empty for a replay, which is no run of its own."""
    directory: Path
    """The run's directory, where other processes may write as well."""


class MetricSink(Protocol):
    """One place that a run's events go to. `Sinks` makes all calls of one sink in the same thread, one after another.

    A sink of a resumed run may be told steps again that it was told before: those since the last checkpoint are
    trained anew, under the next incarnation.
    """

    is_record: bool
    """Whether the run cannot do without what this sink writes: if so, an error of its ends the learner, which resumes
    once the cause is gone. All other sinks get a thread, may be slow, and lose events rather than hold training up."""
    wants_heartbeats: bool
    """Whether it does something with a HeartbeatEvent; nobody asks the server for them otherwise."""

    def open(self, run: SinkRun) -> None:
        """Prepare to be told the events of `run`; called once, before the first one."""
        ...

    def write(self, event: Event) -> None:
        """Take one event. It may block; a record has written all of it when this returns, or raises HeadwayError."""
        ...

    def close(self) -> None:
        """Write what is held back; called once, after the last event."""
        ...
