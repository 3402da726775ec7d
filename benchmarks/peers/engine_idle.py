"""The idle time of Headway's engines, from what their workers report to the run's server about once a second. The
learner keeps a look at these reports every ten seconds only, and a short race has no more than one of them."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import fmean

import numpy as np

from benchmarks.repeated import repeated
from headway.broker.client.broker import BlockingBroker
from headway.broker.errors import BrokerError, HeadwayError
from headway.deploy.run.directory import Endpoint, read_endpoint

LOOK_S = 0.5
ANSWER_S = 5.0
Report = tuple[float, float]
"""The time of the clock of a worker's report, and the seconds in which its engine has had requests until then."""


@contextmanager
def reports_of(directory: Path) -> Iterator[dict[str, list[Report]]]:
    """Keep the reports of the run in `directory`, which may be yet to begin, until the end of the block: by worker, in
    their order, in the mapping that it gives."""
    reader = _Reader(directory)
    try:
        with repeated(reader.look, LOOK_S):
            yield reader.reports
    finally:
        reader.close()


class _Reader:
    """Reads reports from the server that the run's directory names at the time."""

    def __init__(self, directory: Path) -> None:
        self.reports: dict[str, list[Report]] = {}
        self._directory = directory
        self._opened: Endpoint | None = None
        self._broker: BlockingBroker | None = None

    def look(self) -> None:
        """Add what the workers have reported since the last look."""
        place = self._opened
        with suppress(HeadwayError):  # the run has not begun, or ends
            place = read_endpoint(self._directory)
        if place is None:
            return
        try:
            # A killed run leaves its file, and a server may have moved.
            if self._broker is None or place != self._opened:
                self.close()
                self._opened = place
                self._broker = BlockingBroker(place.url, place.run, timeout_s=ANSWER_S)
            _look(self._broker, self.reports)
        except (OSError, HeadwayError):
            self.close()

    def close(self) -> None:
        """Drop the connection, if there is one."""
        if self._broker is not None:
            with suppress(OSError, BrokerError):
                self._broker.close()
        self._broker = None


def _look(broker: BlockingBroker, reports: dict[str, list[Report]]) -> None:
    """Add what the workers have reported since the last look."""
    status = broker.call(broker.broker.status.snapshot(any_identity=True))
    now = time.time()
    for worker in status.workers:
        silence = status.silences.get(worker.worker)
        if silence is None:
            continue
        of_worker, at = reports.setdefault(worker.worker, []), now - silence.heard_s
        if not of_worker or at > of_worker[-1][0]:
            of_worker.append((at, worker.busy_s))


def idle(reports: Mapping[str, Sequence[Report]], first: float, last: float) -> float | None:
    """Return the share of the time between two times of the clock in which an engine had nothing to do, the mean over
    the workers; None if no worker has reported over any part of it. Between two reports the share is the same."""
    busy = []
    for of_worker in reports.values():
        at, seconds = np.array(of_worker).T
        ends = np.clip((first, last), at[0], at[-1])
        if ends[1] > ends[0]:
            busy.append(float(np.diff(np.interp(ends, at, seconds))[0] / (ends[1] - ends[0])))
    return max(0.0, 1 - fmean(busy)) if busy else None
