"""SIGTERM and SIGINT as a flag that long work checks now and then."""

import os
import signal
import sys
from contextlib import suppress
from types import FrameType

STOPS = (signal.SIGTERM, signal.SIGINT)


class StopRequest:
    """Returns True, when called, once a signal has asked for an orderly end: finish the step, write a checkpoint."""

    def __init__(self, notice: str = "") -> None:
        """`notice`: a line that the first signal writes to stderr."""
        self._is_made, self._notice = False, notice
        for number in STOPS:
            signal.signal(number, self._note)

    def __call__(self) -> bool:
        return self._is_made

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._is_made = True
        for each in STOPS:
            signal.signal(each, signal.SIG_DFL)  # the second signal stops the process at once
        if self._notice:
            with suppress(OSError):  # the terminal may be gone
                os.write(sys.stderr.fileno(), f"{self._notice}\n".encode())  # print may have been interrupted midway
