"""Makes a child end with its parent: the kernel ends the process of `python parent_watch.py PARENT_PID COMMAND...`.

It is done in the child after exec, because a preexec_fn is unsafe once the parent has threads. The kernel watches the
thread that started the child, so supervisors start their children from the main thread only.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
WATCHES_PARENT = "HEADWAY_TETHERED"
"""The variable that every child of a supervisor has, so that grandchildren (torchrun's ranks) tie themselves too."""


def end_with_parent(parent: int | None = None) -> None:
    """Have the kernel kill this process when its parent ends; at once if `parent` is given and has ended already."""
    _prctl(signal.SIGKILL)
    if parent is not None and os.getppid() != parent:
        os._exit(1)


def guard(parent: int, victim: int) -> None:
    """Wait for the parent's end, then send `victim` SIGTERM: for a process that another library starts."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    _prctl(signal.SIGTERM)
    if os.getppid() == parent:
        signal.sigwait([signal.SIGTERM])
    os.kill(victim, signal.SIGTERM)


def _prctl(number: signal.Signals) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)


if __name__ == "__main__":
    if sys.argv[1] == "--guard":
        guard(int(sys.argv[2]), int(sys.argv[3]))
    else:
        end_with_parent(int(sys.argv[1]))
        os.execvp(sys.argv[2], sys.argv[2:])
