"""Whether a run is over for a worker: one that finds it so may have come before its learner resumes it."""

import time

RUN_OVER = ("finished", "stopped")


class RunEnd:
    """What one worker has heard of its run's state."""

    def __init__(self, patience_s: float) -> None:
        """How long a worker that finds its run ended waits for a learner to resume it."""
        self._patience_s = patience_s
        self._began = time.monotonic()
        self._saw_run_alive = False

    def is_over(self, state: str) -> bool:
        """`state` is what the broker says now; "absent" says nothing."""
        if state in RUN_OVER:
            return self._saw_run_alive or time.monotonic() - self._began > self._patience_s
        self._saw_run_alive = self._saw_run_alive or state != "absent"
        return False
