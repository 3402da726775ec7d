"""No words of a worker, a pool, a scorer or a fault about itself end a display, or a look of the learner's."""

import io
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from msgspec.structs import fields, replace

from headway.broker.schema import WeightVersion
from headway.broker.schema.status import AgentInfo, Fault, PoolInfo, RunStatus, ScorerInfo
from headway.broker.wire.codec import decode, encode
from headway.deploy.observe.live import changes, panel
from headway.deploy.observe.page.live_page import Watcher
from headway.deploy.observe.status_tables import status_json, status_tables
from headway.deploy.run.events import HeartbeatEvent
from headway.deploy.terminal import Terminal
from headway.weightsync.sender import eligible, still_missed

from .runs import run_status, worker
from .test_printing import is_harmless

WORKER = worker("w", WeightVersion(1, 1))
POOL = PoolInfo(pool="p", host="h", pid=1, running=1)
AGENT = AgentInfo(finished=1, failures={"raised": 1})
SCORER = ScorerInfo(process="s", scorer="q", kind="k", host="h", pid=1, state="ready", device="cpu")
FAULT = Fault(worker="w", host="h", rule="r", reason="x", at=1.0)
WHOLE = (-1, -(2**63), 2**63 - 1, 2**64 - 1)
ODD: dict[Any, tuple[Any, ...]] = {
    int: WHOLE,
    float: (-1.0, 9e14, -9e14),  # the broker's client passes over larger ones
    str: ("", "\x1b[2J[/][bold]\u202e", "x" * 15_000),
    bool: (True, False),
    WeightVersion | None: (None, *(WeightVersion(a, b) for a in WHOLE for b in WHOLE)),
    dict[str, int]: ({}, {"\x1b[2J[/][bold]": -1}, {str(number): 2**63 for number in range(100)}),
    dict[str, float]: ({}, {"\x1b[2J": -1.0}, {"a": 9e14, "b": -9e14}),
}


def odd(report: Any) -> Iterator[tuple[Any, ...]]:
    """Yield, for each field, the reports with an odd value there, as they would come from the server."""
    for field in fields(report):
        values = ODD.get(field.type, ()) if report is not AGENT else ODD[field.type]
        changed = [replace(report, **{field.name: value}) for value in values]
        if report is AGENT:
            changed = [replace(WORKER, agent=said) for said in changed]
        yield tuple(said if isinstance(said, Fault) else decode(encode(said), type(said)) for said in changed)


def read_status(status: RunStatus) -> str:
    """Show a look in every way. Returns what a terminal gets."""
    shown = io.StringIO()
    for table in (status_tables(status), panel(status, 4, 1.0)):
        Terminal(file=shown, width=200).print(table)
    list(changes(run_status(), status))
    watcher = Watcher(None, lambda _: None)
    watcher._note(status, None)
    for page in (status_json(status), watcher.live, watcher.window(0)):
        msgspec.json.encode(page)
    msgspec.json.encode(HeartbeatEvent.later(status, step=1, time_s=1.0))
    return shown.getvalue()


@pytest.mark.parametrize(
    ("where", "report"), [("workers", WORKER), ("workers", AGENT), ("pools", POOL), ("scorers", SCORER)]
)
def test_odd_reports_end_no_look(where: str, report: Any) -> None:
    for said in odd(report):
        status = run_status()
        status = replace(status, **{where: (*getattr(status, where), *said)})
        assert is_harmless(read_status(status))
        assert isinstance(eligible(status.workers, {}), tuple)
        still_missed(status.workers, {"w": WeightVersion(1, 1)})


def test_odd_faults_end_no_look() -> None:
    """Their times are checked where they are read."""
    for said in odd(FAULT):
        readable = tuple(fault for fault in said if 0 <= fault.at < 1 << 33)
        assert is_harmless(read_status(replace(run_status(), faults=readable)))
