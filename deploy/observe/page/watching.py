"""Follows a run: reads its record and asks its broker again and again, and keeps what a live page shows of both."""

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import UTC, datetime, timedelta
from typing import Any, Self

import msgspec

from broker.errors import HeadwayError
from broker.schema import RunStatus, VersionGroups, WorkerInfo
from deploy.observe.status import recent, status_json, version_text
from deploy.observe.waiting import Waiting
from deploy.run.figures import generated_per_s, trained_by_step_of_weights, trained_per_s
from deploy.run.record import Record
from deploy.run.samples import SampleReader

from .picture import Page, page_of

POLL_S = 1.0
SHOWN_WORKERS = 50
"""The most workers of a window: a table of a thousand, drawn each second, would hold the browser up."""
MOST_MISSING = 20
REMEMBERED_S = 600
"""How long the page names a worker that was lost."""
KEPT_POINTS = 120
"""Points of a sparkline: two minutes of looks."""
SHARE = 10
"""A record that takes long to read is read anew after this many times as long."""

_NO_GROUPS = VersionGroups(step=0, generating=0, ready=0, dropped=0)

Look = Callable[[], tuple[RunStatus, Waiting | None]]
Connect = Callable[[], AbstractContextManager[Look]]
"""Opens a connection that gives looks at the run and at who waits in it; both may raise HeadwayError."""


class HeldVersion(msgspec.Struct, frozen=True, kw_only=True):
    """Where the samples of one weight version are."""

    version: str
    is_announced: bool
    workers: int
    """How many workers' engines hold it."""
    generating: int
    """Samples that these workers hold leases of."""
    groups_generating: int
    """Groups whose oldest token it sampled, and that lack samples."""
    groups_ready: int
    """Groups whose oldest token it sampled, and that the learner has not taken."""
    groups_dropped: int
    trained: int
    """Trajectories among those of the last 20 steps whose oldest token it sampled."""


class Missing(msgspec.Struct, frozen=True, kw_only=True):
    """A worker that does not say that it lives, and did not say that it leaves."""

    worker: str
    host: str
    since: str
    """When it was heard of last, in UTC, as ISO 8601 has it."""
    is_lost: bool
    """Whether it is dead, or counts as alive no more."""
    has_ended: bool = False
    """Whether its supervisor says that its process ended."""


class Live(msgspec.Struct, frozen=True, kw_only=True):
    """What a live page asks for each second."""

    at: str
    """The time of the look, in UTC, as ISO 8601 has it."""
    page: int
    """The number of the newest page; it changes with the figures on the page."""
    problem: str = ""
    """Why a part of the page is old or missing; empty if none is."""
    status: dict[str, Any] | None = None
    """What `headway status --json` prints; of the workers those from `first` on, if the page asked for a window."""
    missing: list[Missing] = []
    """Workers that missed heartbeats or are dead, and those lost in the last minutes, the newest first."""
    first: int = 0
    """The place of the first worker shown, in the order of their names."""
    workers: int = 0
    """How many workers are alive."""
    versions: list[HeldVersion] = []
    rates: dict[str, list[float]] = {}
    """Tokens per second at the last looks, generated and trained."""
    worker_rates: dict[str, list[float]] = {}


class Watcher:
    """Looks at the broker and reads the record, each in a thread of its own, inside a `with` block."""

    def __init__(self, connect: Connect | None, read: Callable[[RunStatus | None], Record | None]) -> None:
        """`connect`: None for a run without a broker. `read` returns the record, or None if it has not changed."""
        self._connect, self._read = connect, read
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._read_on, name="record", daemon=True)]
        if connect is not None:
            self._threads.append(threading.Thread(target=self._look_on, name="broker", daemon=True))
        self._status: RunStatus | None = None
        self._waiting: Waiting | None = None
        self._problems: dict[str, str] = {}
        self._rates: dict[str, deque[float]] = defaultdict(_points)
        self._worker_rates: dict[str, deque[float]] = defaultdict(_points)
        self._missing: dict[str, Missing] = {}
        self._samples = SampleReader()
        self._page = Page(title="Headway", made_at=_now(), runs=[])
        self._number = 0

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(timeout=5.0)

    @property
    def page(self) -> dict[str, Any]:
        """The newest page and its number, as JSON has them."""
        number, page = self._number, self._page
        return {**msgspec.to_builtins(page), "number": number}

    @property
    def live(self) -> Live:
        """The last look."""
        status = self._status
        return Live(
            at=_now(),
            page=self._number,
            problem=" ".join(self._problems.values()),
            status=None if status is None else status_json(status, self._waiting),
            workers=0 if status is None else len(status.workers),
            missing=list(self._missing.values())[:MOST_MISSING],
            versions=[] if status is None else held_versions(status),
            rates={name: list(points) for name, points in list(self._rates.items())},
            worker_rates={name: list(points) for name, points in list(self._worker_rates.items())},
        )

    def window(self, first: int) -> Live:
        """The last look, with at most SHOWN_WORKERS workers: those from the place `first` on, or else the last ones."""
        live = self.live
        if live.status is None:
            return live
        first = max(0, min(first, (live.workers - 1) // SHOWN_WORKERS * SHOWN_WORKERS))
        shown = live.status["workers"][first : first + SHOWN_WORKERS]
        rates = {worker["worker"]: live.worker_rates.get(worker["worker"], []) for worker in shown}
        return msgspec.structs.replace(live, status=live.status | {"workers": shown}, first=first, worker_rates=rates)

    def _look_on(self) -> None:
        assert self._connect is not None
        while not self._over.is_set():
            try:
                with self._connect() as look:
                    while not self._over.is_set():
                        self._note(*look())
                        self._over.wait(POLL_S)
            except HeadwayError as error:
                self._problems["broker"] = str(error)
                self._over.wait(POLL_S)

    def _note(self, status: RunStatus, waiting: Waiting | None) -> None:
        self._rates["generated"].append(generated_per_s(status.workers))
        self._rates["trained"].append(trained_per_s(recent(status)))
        for worker in status.workers:
            self._worker_rates[worker.worker].append(worker.tokens_per_s)
        for gone in self._worker_rates.keys() - {worker.worker for worker in status.workers}:
            del self._worker_rates[gone]
        self._missing = missing(self._missing, status)
        self._status, self._waiting = status, waiting
        self._problems.pop("broker", None)

    def _read_on(self) -> None:
        while not self._over.is_set():
            began = time.monotonic()
            self._renew()
            self._over.wait(max(POLL_S, SHARE * (time.monotonic() - began)))

    def _renew(self) -> None:
        try:
            record = self._read(self._status)
        except HeadwayError as error:
            self._problems["record"] = str(error)
            return
        self._problems.pop("record", None)
        if record is not None:
            self._page = page_of([record], self._samples.read)
            self._number += 1


def missing(known: dict[str, Missing], now: RunStatus) -> dict[str, Missing]:
    """Return who is missing now: who is late or dead, and who was that and is gone. A worker that leaves says so in
    time."""
    alive, moment = {worker.worker for worker in now.workers}, datetime.now(UTC)
    oldest = (moment - timedelta(seconds=REMEMBERED_S)).isoformat(timespec="seconds")
    gone = [one for name, one in known.items() if name not in alive and one.since > oldest]
    late = [
        Missing(
            worker=worker.worker,
            host=worker.host,
            since=(moment - timedelta(seconds=silence.heard_s)).isoformat(timespec="seconds"),
            is_lost=silence.has_ended,
            has_ended=silence.has_ended,
        )
        for worker in now.workers
        if (silence := now.silences.get(worker.worker)) is not None and (silence.is_late or silence.has_ended)
    ]
    lost = [msgspec.structs.replace(one, is_lost=True) for one in gone]
    return {one.worker: one for one in sorted([*late, *lost], key=lambda one: one.since, reverse=True)}


def held_versions(status: RunStatus) -> list[HeldVersion]:
    """Return the versions that workers hold, that groups wait with or that the last steps trained, the newest first."""
    holders: dict[str, list[WorkerInfo]] = defaultdict(list)
    for worker in status.workers:
        holders[version_text(worker.version)].append(worker)
    trained = {f"{status.incarnation}.{step}": count for step, count in _trained(status).items()}
    incarnation = status.announced.incarnation if status.announced is not None else status.incarnation
    groups = {f"{incarnation}.{version.step}": version for version in status.versions}
    announced = version_text(status.announced)
    return [
        _held(name, announced, holders[name], groups.get(name, _NO_GROUPS), trained.get(name, 0))
        for name in _newest({*holders, *groups, *trained, announced})
    ]


def _held(name: str, announced: str, workers: Sequence[WorkerInfo], groups: VersionGroups, trained: int) -> HeldVersion:
    return HeldVersion(
        version=name,
        is_announced=name == announced,
        workers=len(workers),
        generating=sum(worker.active for worker in workers),
        groups_generating=groups.generating,
        groups_ready=groups.ready,
        groups_dropped=groups.dropped,
        trained=trained,
    )


def _trained(status: RunStatus) -> dict[int, int]:
    return trained_by_step_of_weights([step for step in recent(status) if step.incarnation == status.incarnation])


def _newest(names: set[str]) -> list[str]:
    """Sort versions; the dash, which stands for no version yet, comes last."""
    return sorted(
        names, key=lambda name: [int(part) for part in name.split(".")] if name[0] != "-" else [], reverse=True
    )


def _points() -> deque[float]:
    return deque(maxlen=KEPT_POINTS)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
