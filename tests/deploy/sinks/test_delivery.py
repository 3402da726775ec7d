"""Whatever one sink does, the others receive every event and the caller goes on; lost events are counted."""

import logging
from collections.abc import Callable
from pathlib import Path
from threading import Event as Flag

import pytest

from headway.broker.errors import HeadwayError
from headway.deploy.observe.sinks.base import SinkRun, Sinks
from headway.deploy.run.events import Event
from tests.deploy.runs import sink_run, step_event


class Noting:
    """A sink that notes each event once `before` has returned."""

    def __init__(
        self, *, is_record: bool = False, before: Callable[[str], object] = lambda call: None, heartbeats: bool = False
    ) -> None:
        self.is_record, self.wants_heartbeats = is_record, heartbeats
        self._before = before
        self.told: list[Event] = []
        self.calls: list[str] = []

    def open(self, run: SinkRun) -> None:
        self._note("open")

    def write(self, event: Event) -> None:
        self._note("write")
        self.told.append(event)

    def close(self) -> None:
        self._note("close")

    def _note(self, call: str) -> None:
        self.calls.append(call)
        self._before(call)


def fails_at(*calls: str) -> Callable[[str], None]:
    def before(call: str) -> None:
        if call in calls:
            raise OSError(f"no way to {call}")

    return before


EVENTS = [step_event(step) for step in range(3)]


def test_every_sink_is_told_every_event_in_order_and_closed(tmp_path: Path) -> None:
    record, other = Noting(is_record=True), Noting()
    with Sinks({"record": record, "other": other}, sink_run(tmp_path)) as sinks:
        for event in EVENTS:
            sinks.write(event)
            assert record.told[-1] is event, "a record has it before the learner goes on"
    assert record.told == other.told == EVENTS
    assert record.calls == other.calls == ["open", "write", "write", "write", "close"]
    assert sinks.lost == {"other": 0}


def test_heartbeats_are_wanted_if_one_sink_wants_them(tmp_path: Path) -> None:
    assert not Sinks({"a": Noting(is_record=True)}, sink_run(tmp_path)).wants_heartbeats
    sinks = {"a": Noting(is_record=True), "b": Noting(is_record=True, heartbeats=True)}
    assert Sinks(sinks, sink_run(tmp_path)).wants_heartbeats


@pytest.mark.parametrize(("calls", "lost"), [(("write",), 3), (("open",), 3), (("close",), 0), (("write", "close"), 3)])
def test_a_sink_that_raises_is_told_once_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, calls: tuple[str, ...], lost: int
) -> None:
    record, broken = Noting(is_record=True), Noting(before=fails_at(*calls))
    with Sinks({"record": record, "metrics[1] (broken)": broken}, sink_run(tmp_path)) as sinks:
        for event in EVENTS:
            sinks.write(event)
    assert record.told == EVENTS
    assert sinks.lost == {"metrics[1] (broken)": lost}
    assert caplog.text.count("raised OSError: no way to") == 1
    assert (f"metrics[1] (broken): this sink has lost {lost} events" in caplog.text) is (lost > 0)


def test_a_sink_that_exits_ends_nobody(tmp_path: Path) -> None:
    def exits(call: str) -> None:
        raise SystemExit(call)

    with Sinks({"exits": Noting(before=exits)}, sink_run(tmp_path)) as sinks:
        sinks.write(EVENTS[0])
    assert sinks.lost == {"exits": 1}


def test_an_error_that_passes_costs_the_events_of_its_time(tmp_path: Path) -> None:
    errors = iter([False, True, False])

    def sometimes(call: str) -> None:
        if call == "write" and next(errors):
            raise OSError

    sink = Noting(before=sometimes)
    with Sinks({"sink": sink}, sink_run(tmp_path)) as sinks:
        for event in EVENTS:
            sinks.write(event)
    assert sink.told == [EVENTS[0], EVENTS[2]]
    assert sinks.lost == {"sink": 1}


def test_a_sink_that_hangs_holds_nobody_up_and_loses_what_does_not_fit(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    opened, released = Flag(), Flag()

    def hangs(call: str) -> None:
        opened.set()
        released.wait()

    record, hanging = Noting(is_record=True), Noting(before=hangs)
    with Sinks({"record": record, "hangs": hanging}, sink_run(tmp_path), most_waiting=2, close_s=0.01) as sinks:
        opened.wait()
        for step in range(5):
            sinks.write(step_event(step))
    released.set()
    assert len(record.told) == 5
    assert sinks.lost["hangs"] == 3
    assert caplog.text.count("2 events wait for this sink") == 1
    assert "hangs: this sink has not ended, and is left with what it was told last and 2 events" in caplog.text


def test_a_record_that_cannot_write_ends_the_learner(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def full(call: str) -> None:
        if call == "write":
            raise HeadwayError("Make room.")

    sinks = Sinks({"record": Noting(is_record=True, before=full)}, sink_run(tmp_path))
    with pytest.raises(HeadwayError, match="Make room"):
        sinks.write(EVENTS[0])
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
