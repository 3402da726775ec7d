"""Closes gloo's port to newcomers as soon as its group is formed.

gloo listens for as long as a group lives, accepts whoever connects, keeps the connection after the other end has gone,
and ends the process when there are no more files. It needs the port only until its members are connected. The port
cannot be closed from outside, as gloo would be woken by that for ever; but the system can drop what comes for it.
"""

import ctypes
import logging
import os
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

logger = logging.getLogger(__name__)
_NOTICING = threading.Lock()
_SO_ATTACH_FILTER = 26
_DROP_ALL = struct.pack("HBBI", 0x06, 0, 0, 0)
"""One instruction of a socket filter: return 0 bytes of the packet."""


class Port:
    """One that somebody else's code opens. Where another thread opens one at the same time neither is touched, as
    nobody says whose is which."""

    def __init__(self) -> None:
        self._inode = 0

    @contextmanager
    def noticed(self) -> Iterator[None]:
        """Around what opens it."""
        with _NOTICING:
            before = _listening()
            yield
            opened = _listening().keys() - before.keys()
        if len(opened) == 1:
            (self._inode,) = opened
        else:
            logger.debug("%d ports were opened at once: which one is ours is not known", len(opened))

    def deafen(self) -> None:
        """Nobody gets a connection any more; those that are there are left as they are."""
        descriptor = _listening().get(self._inode)
        if descriptor is None:
            return
        program = ctypes.create_string_buffer(_DROP_ALL)
        with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as listener:  # where there are such filters
            listener.setsockopt(
                socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HxxxxxxP", 1, ctypes.addressof(program))
            )


def _listening() -> dict[int, int]:
    """TCP ports at which this process listens: the sockets' numbers in the system, and their descriptors here."""
    found = {}
    with suppress(OSError):  # no /proc, or no file to read it
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):  # closed meanwhile, or no socket
                if os.readlink(f"/proc/self/fd/{name}").startswith("socket:") and _is_listening(int(name)):
                    found[os.fstat(int(name)).st_ino] = int(name)
    return found


def _is_listening(descriptor: int) -> bool:
    with socket.socket(fileno=os.dup(descriptor)) as looked_at:
        is_tcp = looked_at.family in (socket.AF_INET, socket.AF_INET6)
        return is_tcp and bool(looked_at.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
