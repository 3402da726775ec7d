"""The live page of one run: `Watcher` reads its record and asks its broker again and again, and `PageServer` serves
what the page shows of both. The server takes no request that changes anything.
"""

import hmac
import secrets
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import UTC, datetime, timedelta
from http import HTTPStatus
from ipaddress import ip_address
from socket import gethostname
from statistics import fmean
from typing import Any, Self
from urllib.parse import parse_qs, urlsplit

import msgspec

from headway.broker.errors import ConfigError, HeadwayError
from headway.broker.schema.status import RunStatus
from headway.deploy.observe.bottleneck import Bottleneck, StatusReader
from headway.deploy.observe.bounded_server import BoundedServer, QuietRequestHandler
from headway.deploy.observe.status_tables import recent, status_json
from headway.deploy.run.figures import generated_per_s, trained_per_s
from headway.deploy.run.record import Record
from headway.deploy.run.samples import SampleReader

from .content import SHOWN_WORKERS, Page, VersionCounts, document, page_of, version_counts

POLL_S = 1.0
MOST_MISSING = 20
REMEMBERED_S = 600
"""Seconds for which the page names a worker that was lost."""
KEPT_POINTS = 120
"""Points of a sparkline: two minutes of looks."""
RATE_LOOKS = 15
"""Looks of which a shown rate is the mean: a worker counts tokens by short spells, between which its pace jumps."""
SHARE = 10
"""A record that takes long to read is read anew after this many times as long."""

Connect = Callable[[], AbstractContextManager[StatusReader]]
"""Opens a connection that gives looks at the run and at who waits in it; both may raise HeadwayError."""


class MissingWorker(msgspec.Struct, frozen=True, kw_only=True):
    """A worker that does not say that it lives, and did not say that it leaves."""

    worker: str
    host: str
    since: str
    """When it was heard of last, in UTC, as ISO 8601 has it."""
    is_lost: bool
    """Whether it is dead, or counts as alive no more."""
    has_ended: bool = False
    """Whether its supervisor says that its process ended."""


class LiveUpdate(msgspec.Struct, frozen=True, kw_only=True):
    """The answer that a live page asks for each second."""

    at: str
    """The time of the look, in UTC, as ISO 8601 has it."""
    page: int
    """The number of the newest page; it changes with the figures on the page."""
    problem: str = ""
    """Why a part of the page is old or missing; empty if none is."""
    status: dict[str, Any] | None = None
    """The output of `headway status --json`; of the workers those from `first` on, if the page asked for a window."""
    missing: list[MissingWorker] = []
    """Workers that missed heartbeats or are dead, and those lost in the last minutes, the newest first."""
    first: int = 0
    """The place of the first worker shown, in the order of their names."""
    workers: int = 0
    """Workers that are alive."""
    versions: list[VersionCounts] = []
    rates: dict[str, list[float]] = {}
    """Tokens per second at the last looks, generated and trained; each point is a mean over RATE_LOOKS looks."""
    worker_rates: dict[str, list[float]] = {}


class _Rate:
    """Tokens per second at the last looks, and the means that a page shows of them."""

    def __init__(self) -> None:
        self._seen = deque[float](maxlen=RATE_LOOKS)
        self.means = deque[float](maxlen=KEPT_POINTS)

    def note(self, tokens_per_s: float) -> None:
        self._seen.append(tokens_per_s)
        self.means.append(fmean(self._seen))


class Watcher:
    """Looks at the broker and reads the record, each in a thread of its own, inside a `with` block."""

    def __init__(self, connect: Connect | None, read: Callable[[RunStatus | None], Record | None]) -> None:
        """`connect`: None for a run without a broker. `read` returns the record, or None if it has not changed."""
        self._connect, self._read = connect, read
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._keep_reading, name="record", daemon=True)]
        if connect is not None:
            self._threads.append(threading.Thread(target=self._keep_looking, name="broker", daemon=True))
        self._status: RunStatus | None = None
        self._waiting: Bottleneck | None = None
        self._problems: dict[str, str] = {}
        self._rates: dict[str, _Rate] = defaultdict(_Rate)
        self._worker_rates: dict[str, _Rate] = defaultdict(_Rate)
        self._missing: dict[str, MissingWorker] = {}
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
    def live(self) -> LiveUpdate:
        """The last look."""
        status = self._status
        return LiveUpdate(
            at=_now(),
            page=self._number,
            problem=" ".join(self._problems.values()),
            status=None if status is None else status_json(status, self._waiting),
            workers=0 if status is None else len(status.workers),
            missing=list(self._missing.values())[:MOST_MISSING],
            versions=[] if status is None else version_counts(status, recent(status)),
            rates={name: list(rate.means) for name, rate in list(self._rates.items())},
            worker_rates={name: list(rate.means) for name, rate in list(self._worker_rates.items())},
        )

    def window(self, first: int) -> LiveUpdate:
        """The last look, with at most SHOWN_WORKERS workers: those from the place `first` on, or else the last ones."""
        live = self.live
        if live.status is None:
            return live
        first = max(0, min(first, (live.workers - 1) // SHOWN_WORKERS * SHOWN_WORKERS))
        shown = live.status["workers"][first : first + SHOWN_WORKERS]
        rates = {worker["worker"]: live.worker_rates.get(worker["worker"], []) for worker in shown}
        return msgspec.structs.replace(live, status=live.status | {"workers": shown}, first=first, worker_rates=rates)

    def _keep_looking(self) -> None:
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

    def _note(self, status: RunStatus, waiting: Bottleneck | None) -> None:
        self._rates["generated"].note(generated_per_s(status.workers))
        self._rates["trained"].note(trained_per_s(recent(status)))
        for worker in status.workers:
            self._worker_rates[worker.worker].note(worker.tokens_per_s)
        for gone in self._worker_rates.keys() - {worker.worker for worker in status.workers}:
            del self._worker_rates[gone]
        self._missing = missing_workers(self._missing, status)
        self._status, self._waiting = status, waiting
        self._problems.pop("broker", None)

    def _keep_reading(self) -> None:
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


def missing_workers(known: dict[str, MissingWorker], now: RunStatus) -> dict[str, MissingWorker]:
    """Return who is missing now: who is late or dead, and who was that and is gone. A worker that leaves says so in
    time."""
    alive, moment = {worker.worker for worker in now.workers}, datetime.now(UTC)
    oldest = (moment - timedelta(seconds=REMEMBERED_S)).isoformat(timespec="seconds")
    gone = [one for name, one in known.items() if name not in alive and one.since > oldest]
    late = [
        MissingWorker(
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


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


EVERYWHERE = {"0.0.0.0", "::", ""}
LOOPBACK = {"localhost", "127.0.0.1", "::1"}
_HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",  # the address holds the token
}


class PageServer(BoundedServer):
    """Serves `/`, `/page.json` and `/live.json`. Beyond loopback every request needs the token of `url`."""

    def __init__(self, watcher: Watcher, host: str, port: int) -> None:
        """Bind the port; 0: any free one. Raises ConfigError."""
        self.watcher, self._host = watcher, host
        self.token = "" if _is_loopback(host) else secrets.token_urlsafe(24)
        try:
            super().__init__(host, port, _Answer)
        except OSError as error:
            why = error.strerror or error
            raise ConfigError(f"No page can be served at {host}, port {port}: {why}. Choose another --port.") from error

    @property
    def url(self) -> str:
        """The page's address, with the token if one is needed."""
        host = gethostname() if self._host in EVERYWHERE else self._host
        shown = f"[{host}]" if ":" in host else host
        return f"http://{shown}:{self.server_port}/" + (f"?token={self.token}" if self.token else "")


class _Answer(QuietRequestHandler):
    server: PageServer

    def do_GET(self) -> None:  # noqa: N802 - the base class finds it by this name
        """Answer with the page, or with JSON."""
        asked = urlsplit(self.path)
        query = parse_qs(asked.query)
        if not self._is_welcome(query):
            self._send(HTTPStatus.FORBIDDEN, "text/plain", b"Open the address that `headway dashboard` printed.\n")
            return
        watcher = self.server.watcher
        match asked.path:
            case "/":
                page = watcher.page
                self._send(HTTPStatus.OK, "text/html; charset=utf-8", document(page, str(page["title"]), is_live=True))
            case "/page.json":
                self._send_json(watcher.page)
            case "/live.json":
                first = query.get("first", [""])[0]
                self._send_json(watcher.window(int(first)) if first.isdecimal() and len(first) < 10 else watcher.live)
            case _:
                self._send(HTTPStatus.NOT_FOUND, "text/plain", b"There is no such page.\n")

    def _is_welcome(self, query: dict[str, list[str]]) -> bool:
        """Whether the request has the token, or, where there is none, calls this machine by a name of loopback.

        A page of another site can make a browser send requests to loopback, but only under that site's own name.
        """
        if self.server.token:
            return hmac.compare_digest(query.get("token", [""])[0].encode(), self.server.token.encode())
        return urlsplit(f"//{self.headers.get('Host', '')}").hostname in LOOPBACK

    def _send_json(self, content: Any) -> None:
        self._send(HTTPStatus.OK, "application/json", msgspec.json.encode(content))

    def _send(self, status: HTTPStatus, kind: str, body: bytes) -> None:
        self.send_response(status)
        for name, value in {**_HEADERS, "Content-Type": kind, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False
