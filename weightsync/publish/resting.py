"""For how long members that are all there, and do not connect, are left to pull: every attempt costs a deadline."""

from weightsync.deadline import Deadline

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
        self._why = ""
        self._rest = Deadline(0.0)

    def failed(self, members: tuple[Member, ...], why: str) -> None:
        """They had all checked in."""
        rest_s = min(2 * (self._rest.seconds or self._deadline_s), _LONGEST_S) if members == self._members else 0.0
        self._members, self._why, self._rest = members, why, Deadline(rest_s)

    def formed(self) -> None:
        """All is well again."""
        self._members = ()

    def why_not(self, members: tuple[Member, ...]) -> str:
        """Why no group is to be formed of them now, or ""."""
        if members != self._members or self._rest.is_over():
            return ""
        return f"{self._why}; workers pull, and it is tried again in {self._rest.remaining():.0f} s"
