"""SIGTERM and SIGINT as a flag that long work checks now and then."""

import os
import signal
from contextlib import suppress
from types import FrameType

from headway.deploy.launch import parent_watch

STOPS = (signal.SIGTERM, signal.SIGINT)
STDERR = 2


class StopRequest:
    """Returns True, when called, once a signal has asked for an orderly end: finish the step, write a checkpoint."""

    def __init__(self, notice: str = "") -> None:
        """`notice`: the work that is still done, for a line that the first signal writes to stderr, unless a supervisor
        or the first rank says it."""
        is_reported = parent_watch.WATCHES_PARENT in os.environ or os.environ.get("RANK", "0") != "0"
        self._is_made, self._notice = False, "" if is_reported else notice
        for number in STOPS:
            signal.signal(number, self._note)

    def __call__(self) -> bool:
        return self._is_made

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._is_made = True
        for each in STOPS:
            signal.signal(each, signal.SIG_DFL)  # the second signal stops the process at once
        if self._notice:
            line = f"Stopping: {self._notice}. Ctrl-C again stops at once.\n"
            with suppress(OSError):  # the terminal may be gone
                os.write(STDERR, line.encode())  # print may have been interrupted midway, and sys.stderr be closed
