"""Ends a process as Python does, but without taking the interpreter down.

Libraries have threads that cannot be joined: gloo's threads serve a group as long as any object holds it, and torch's
caches hold groups for good. Such a thread needs the interpreter to release a tensor or to return from a long call. If
the interpreter is being taken down, Python ends the thread in the midst of C++ code that does not allow it, and the
process aborts with "terminate called without an active exception" although its work is done.
"""

import atexit
import os
import sys
from typing import NoReturn


class Ending:
    """Ends the process. Make one before any library registers with atexit: what is registered first is called last."""

    def __init__(self) -> None:
        self._code: int | None = None
        atexit.register(self._leave)

    def exit(self, code: int) -> NoReturn:
        """Exit as `sys.exit` does: threads are joined and all atexit functions are called."""
        self._code = code
        sys.exit(code)

    def _leave(self) -> None:
        if self._code is None:
            return  # an uncaught error: Python has its own code for it
        try:
            for stream in filter(None, (sys.stdout, sys.stderr)):
                stream.flush()
        except OSError:
            return  # Python finds the same error and reports it
        os._exit(self._code)
