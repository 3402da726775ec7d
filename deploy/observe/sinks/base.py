"""The seam between a run and its metric sinks, and what gives every event to all of them, so that none but the run's
record can stop or delay training."""

import logging
import queue
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Thread
from types import TracebackType
from typing import Protocol, Self

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


MOST_WAITING = 1024
"""Events that may wait for one sink; the sink loses further ones."""
CLOSE_S = 10.0
"""Seconds for all sinks together to write their events when the run ends."""
log = logging.getLogger(__name__)


class Sinks:
    """The opened sinks of one run. Closing gives each sink time to write its events."""

    def __init__(
        self,
        sinks: Mapping[str, MetricSink],
        run: SinkRun,
        *,
        most_waiting: int = MOST_WAITING,
        close_s: float = CLOSE_S,
    ) -> None:
        """`sinks` by the name that warnings use. Raises HeadwayError if a record cannot be opened."""
        self._close_s = close_s
        self._records = [sink for sink in sinks.values() if sink.is_record]
        self._others = [
            _SinkThread(name, sink, run, most_waiting) for name, sink in sinks.items() if not sink.is_record
        ]
        self.wants_heartbeats = any(sink.wants_heartbeats for sink in sinks.values())
        """Whether any sink uses HeartbeatEvents."""
        for record in self._records:
            record.open(run)
        for lane in self._others:
            lane.start()

    @property
    def lost(self) -> dict[str, int]:
        """Events that each sink has lost so far, by its name. Records lose none."""
        return {lane.name: lane.lost for lane in self._others}

    def write(self, event: Event) -> None:
        """Give `event` to all sinks. Only a record is waited for. Raises HeadwayError if a record cannot write it."""
        for record in self._records:
            record.write(event)
        self.offer(event)

    def offer(self, event: Event) -> None:
        """Give `event` to all sinks but the records, from any thread. It waits for nothing."""
        for lane in self._others:
            lane.put(event)

    def close(self) -> None:
        """Close all sinks, and log what each has lost. A sink that hangs is abandoned."""
        for record in self._records:
            record.close()
        deadline = time.monotonic() + self._close_s
        for lane in self._others:
            lane.end()
        for lane in self._others:
            lane.join(max(0.0, deadline - time.monotonic()))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _SinkThread:
    """A sink in a thread of its own, and the events that wait for it."""

    def __init__(self, name: str, sink: MetricSink, run: SinkRun, most_waiting: int) -> None:
        self.name = name
        self._sink, self._run = sink, run
        self._most_waiting = most_waiting
        self._waiting: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._thread = Thread(target=self._work, name=f"sink {name}", daemon=True)
        self._is_reported = False
        self._dropped = 0
        """Events that the caller's thread dropped because too many waited."""
        self._failed = 0
        """Events that failed in the sink's thread."""

    @property
    def lost(self) -> int:
        return self._dropped + self._failed

    def start(self) -> None:
        self._thread.start()

    def put(self, event: Event) -> None:
        if self._waiting.qsize() < self._most_waiting:
            self._waiting.put(event)
            return
        self._dropped += 1
        if self._dropped == 1:
            log.warning(
                "%s: %d events wait for this sink, so it is not told more until it has taken some. The run goes on.",
                self.name,
                self._most_waiting,
            )

    def end(self) -> None:
        """Note that no event follows."""
        self._waiting.put(None)

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            log.warning(
                "%s: this sink has not ended, and is left with what it was told last and %d events that wait for it.",
                self.name,
                max(0, self._waiting.qsize() - 1),
            )
        if self.lost:
            log.warning("%s: this sink has lost %d events.", self.name, self.lost)

    def _work(self) -> None:
        is_open = self._has_done("opening", partial(self._sink.open, self._run))
        while (event := self._waiting.get()) is not None:
            if not (is_open and self._has_done("writing", partial(self._sink.write, event))):
                self._failed += 1
        if is_open:
            self._has_done("closing", self._sink.close)

    def _has_done(self, what: str, call: Callable[[], None]) -> bool:
        """Make the call and return whether it succeeded. The sink's first error is logged."""
        try:
            call()
        except (Exception, SystemExit) as error:
            if not self._is_reported:
                log.warning(
                    "%s: %s raised %s: %s. The run goes on, and what this sink loses is counted.",
                    *(self.name, what, type(error).__name__, error),
                    exc_info=error,
                )
            self._is_reported = True
            return False
        return True
