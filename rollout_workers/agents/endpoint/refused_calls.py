"""Counts requests that got an error, by a reason that is one of a few."""

from collections import Counter

from .fields import NO_EFFECT, SAMPLING
from .problems import Problem

FIELDS = SAMPLING | NO_EFFECT.keys() | {"tool_choice"}
"""Fields that are reasons. Any other is one that a client made up, of which there may be many."""


class RefusedCalls:
    """Refused requests of all sessions together, and of each one."""

    def __init__(self) -> None:
        self.all: Counter[str] = Counter()
        self._by_session: dict[str, Counter[str]] = {}

    def note(self, problem: Problem, session: str = "") -> None:
        """Count a request of an open session; "": of none."""
        reason = reason_of(problem)
        self.all[reason] += 1
        if session:
            self._by_session.setdefault(session, Counter())[reason] += 1

    def take(self, session: str) -> Counter[str]:
        """Return a session's, and forget them. It is open no more."""
        return self._by_session.pop(session, Counter())


def reason_of(problem: Problem) -> str:
    """Return a problem's kind, or the field that cannot be honoured."""
    return problem.field if problem.kind == "refused" and problem.field in FIELDS else problem.kind
