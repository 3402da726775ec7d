"""Whether a worker's run is over. A worker may arrive before the learner that resumes an ended run, so it waits a
while."""

import time

RUN_OVER = ("finished", "stopped")


class RunEnd:
    """Tracks what the broker says of the run's state."""

    def __init__(self, patience_s: float) -> None:
        """`patience_s`: seconds that a worker which finds its run ended waits for a learner to resume it."""
        self._patience_s = patience_s
        self._began = time.monotonic()
        self._saw_run_alive = False

    def is_over(self, state: str) -> bool:
        """Return whether the worker should end. `state` is the broker's answer; "absent" decides nothing."""
        if state in RUN_OVER:
            return self._saw_run_alive or time.monotonic() - self._began > self._patience_s
        self._saw_run_alive = self._saw_run_alive or state != "absent"
        return False
