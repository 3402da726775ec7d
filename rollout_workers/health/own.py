"""A worker's figures of its own engine. The worker itself is alive when its engine hangs: without this it would renew
the leases of its samples for ever while the learner waits for them."""

import time
from collections import deque
from collections.abc import Callable

from .rules import Verdict, failing, stalled


class EngineHealth:
    """Counts errors, and looks in which the engine had requests and sampled nothing.

    It counts looks instead of time: a worker process that was stopped has not looked meanwhile.
    """

    def __init__(
        self, *, look_s: float, stall_s: float, errors: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`look_s`: about the seconds between two looks. `stall_s` and `errors`: the limits; 0: none."""
        self._look_s, self._stall_s, self._errors, self._clock = look_s, stall_s, errors, clock
        self._looks = 0
        self._tokens: int | None = None
        self._failed_s = deque[float](maxlen=max(1, errors))
        self.last_error = ""

    def look(self, requests: int, tokens: int) -> Verdict | None:
        """Compare with the last look. `requests`: those for which the engine may sample; `tokens`: all that it has
        sampled until now. Requests that the last look did not see may have come just now, and begin the count."""
        if not requests or tokens != self._tokens:
            self._looks, self._tokens = 0, tokens if requests else None
            return None
        self._looks += 1
        return stalled(requests, self._looks * self._look_s, self._stall_s) if self._stall_s else None

    def failed(self, error: Exception) -> Verdict | None:
        """Count an error of the engine."""
        text = str(error) or "it gave no reason"
        self.last_error = f"the engine failed: {type(error).__name__}: {text}"
        now_s = self._clock()
        self._failed_s.append(now_s)
        return failing(tuple(self._failed_s), now_s, self._errors, f"{type(error).__name__}: {text}")
