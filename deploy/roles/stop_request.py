"""SIGTERM and SIGINT as a flag that long work checks now and then."""

import os
import signal
import sys
from contextlib import suppress
from types import FrameType
from typing import Self

from deploy.launch import tether
from deploy.launch.supervisor import DRAIN_NOTICE

STOPS = (signal.SIGTERM, signal.SIGINT)


class StopRequest:
    """Returns True, when called, once a signal has asked for an orderly end: finish the step, write a checkpoint."""

    def __init__(self, notice: str = "") -> None:
        """`notice`: a line that the first signal writes to stderr."""
        self._is_made, self._notice = False, notice
        for number in STOPS:
            signal.signal(number, self._note)

    @classmethod
    def of_learner(cls) -> Self:
        """Return one that says what a learner does now, unless a supervisor or the first rank says it."""
        is_told = tether.ENVIRONMENT in os.environ or os.environ.get("RANK", "0") != "0"
        return cls("" if is_told else f"Stopping: {DRAIN_NOTICE}. Ctrl-C again stops at once.")

    def __call__(self) -> bool:
        return self._is_made

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._is_made = True
        for each in STOPS:
            signal.signal(each, signal.SIG_DFL)  # the second signal stops the process at once
        if self._notice:
            with suppress(OSError):  # the terminal may be gone
                os.write(sys.stderr.fileno(), f"{self._notice}\n".encode())  # print may have been interrupted midway
