"""Members that all checked in but cannot connect to each other are left to pull for a while: every attempt costs a
deadline."""

from headway.weightsync.deadline import Deadline

from .membership import Member

_LONGEST_S = 600.0


class Resting:
    """The last attempts to form a group of the same members.

    After the first failure the learner tries again at once, as a member may have died. After further ones it rests for
    two deadlines, doubled each time up to ten minutes: probably one host cannot reach another.
    """

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._members: tuple[Member, ...] = ()
        self._why = ""
        self._rest = Deadline(0.0)

    def failed(self, members: tuple[Member, ...], why: str) -> None:
        """Note that a group of `members`, who had all checked in, was not formed, and why."""
        rest_s = min(2 * (self._rest.seconds or self._deadline_s), _LONGEST_S) if members == self._members else 0.0
        self._members, self._why, self._rest = members, why, Deadline(rest_s)

    def formed(self) -> None:
        """Note that a group was formed, and forget earlier failures."""
        self._members = ()

    def why_not(self, members: tuple[Member, ...]) -> str:
        """Return why no group of `members` should be formed now, or ""."""
        if members != self._members or self._rest.is_over():
            return ""
        return f"{self._why}; workers pull, and it is tried again in {self._rest.remaining():.0f} s"
