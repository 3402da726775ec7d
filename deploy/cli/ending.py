"""How a process of ours ends: as Python does it, but the interpreter is not taken down.

Libraries have threads that nobody can join: gloo's serve a group as long as anything holds it, and torch's caches hold
groups for good. Such a thread needs the interpreter to let go of a tensor, or to come back from a long call. If that is
being taken down, Python ends the thread instead, in the midst of C++ that allows no such thing: the process aborts with
"terminate called without an active exception", after all its work was done.
"""

import atexit
import os
import sys
from typing import NoReturn


class Ending:
    """To be made before anything else asks to be called at exit: what asks first is called last."""

    def __init__(self) -> None:
        self._code: int | None = None
        atexit.register(self._leave)

    def exit(self, code: int) -> NoReturn:
        """As `sys.exit` does it: threads are joined, and all that asked to be called at exit is called."""
        self._code = code
        sys.exit(code)

    def _leave(self) -> None:
        if self._code is None:
            return  # an error that nobody caught: Python has its own code for it
        try:
            for stream in filter(None, (sys.stdout, sys.stderr)):
                stream.flush()
        except OSError:
            return  # Python finds the same, and says so
        os._exit(self._code)
