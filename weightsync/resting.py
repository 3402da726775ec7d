"""For how long members that are all there, and do not connect, are left to pull: every attempt costs a deadline."""

import time

from .membership import Member

_LONGEST_S = 600.0


class Resting:
    """What is known of the last attempts to form a group, as long as they were of the same members.

    The first failure is followed by another attempt at once, as somebody may have died; then by a rest of two
    deadlines, which doubles up to ten minutes: no way leads from one host to another.
    """

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._members: tuple[Member, ...] = ()
        self._failures = 0
        self._why = ""
        self._end = 0.0

    def failed(self, members: tuple[Member, ...], why: str) -> None:
        """They had all checked in."""
        self._failures = self._failures + 1 if members == self._members else 1
        self._members, self._why = members, why
        rest_s = 0.0 if self._failures == 1 else self._deadline_s * 2.0 ** min(self._failures - 1, 32)
        self._end = time.monotonic() + min(rest_s, _LONGEST_S)

    def formed(self) -> None:
        """All is well again."""
        self._failures, self._members = 0, ()

    def why_not(self, members: tuple[Member, ...]) -> str:
        """Why no group is to be formed of them now, or ""."""
        left_s = self._end - time.monotonic()
        if members != self._members or left_s <= 0:
            return ""
        return f"{self._why}; workers pull, and it is tried again in {left_s:.0f} s"
