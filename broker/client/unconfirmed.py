"""A worker keeps its submissions here until the server is known to have made them durable.

A server that fsyncs once a second, or a replica that takes over, can lose what it has acknowledged. The
worker submits it again; a trajectory that was not lost is then a duplicate, and free.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from headway.broker.schema import Lease

KEPT_BYTES = 64 << 20
"""Beyond this the worker forgets the oldest submissions: if the server loses one of them, it is generated again."""
KEPT_S = 10.0
"""The age at which a submission counts as durable where the server cannot say: several times what `everysec` loses."""


@dataclass(frozen=True)
class Submission:
    """A finished sample as it was handed in."""

    lease: Lease
    payload: bytes
    measures: bytes
    """The payload's measures, as `submit.lua` takes them (`measures_of`)."""
    at: float


class Unconfirmed:
    """Submissions in the order in which they were accepted."""

    def __init__(self) -> None:
        self._kept: dict[str, Submission] = {}
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, submission: Submission) -> None:
        """Keeps a submission that the server has accepted. Idempotent."""
        if submission.lease.token in self._kept:
            return
        self._kept[submission.lease.token] = submission
        self._bytes += len(submission.payload)
        while self._bytes > KEPT_BYTES:
            self.forget([next(iter(self._kept.values()))])

    def all(self) -> list[Submission]:
        """Returns the submissions, oldest first."""
        return list(self._kept.values())

    def forget(self, submissions: Sequence[Submission]) -> None:
        """Forgets submissions that are durable or void."""
        for submission in submissions:
            if self._kept.pop(submission.lease.token, None) is not None:
                self._bytes -= len(submission.payload)

    def forget_old(self) -> None:
        """Forgets all that the server has had ample time to make durable."""
        latest = time.monotonic() - KEPT_S
        self.forget([submission for submission in self.all() if submission.at < latest])
