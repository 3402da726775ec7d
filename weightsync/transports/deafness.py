"""Closes gloo's port to newcomers as soon as its group is formed.

gloo listens as long as a group lives, accepts every connection, keeps it after the other end has gone, and ends the
process when it runs out of file descriptors. It needs the port only until its members are connected. This process
cannot close the port, as that would wake gloo for ever, but a socket filter can drop all packets that arrive for it.
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
    """A port that a library opens. Where another thread opens one at the same time, both are left alone, as it is not
    known which is the library's."""

    def __init__(self) -> None:
        self._inode = 0

    @contextmanager
    def noticed(self) -> Iterator[None]:
        """Wrap the call that opens the port."""
        with _NOTICING:
            before = _listening()
            yield
            opened = _listening().keys() - before.keys()
        if len(opened) == 1:
            (self._inode,) = opened
        else:
            logger.debug("%d ports were opened at once: which one is ours is not known", len(opened))

    def deafen(self) -> None:
        """Refuse all new connections; existing ones go on."""
        descriptor = _listening().get(self._inode)
        if descriptor is None:
            return
        program = ctypes.create_string_buffer(_DROP_ALL)
        with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as listener:  # not every system has filters
            listener.setsockopt(
                socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HxxxxxxP", 1, ctypes.addressof(program))
            )


def _listening() -> dict[int, int]:
    """Return the TCP sockets at which this process listens: {inode: file descriptor}."""
    found = {}
    with suppress(OSError):  # no /proc, or no descriptor left to read it
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):  # closed meanwhile, or not a socket
                if os.readlink(f"/proc/self/fd/{name}").startswith("socket:") and _is_listening(int(name)):
                    found[os.fstat(int(name)).st_ino] = int(name)
    return found


def _is_listening(descriptor: int) -> bool:
    with socket.socket(fileno=os.dup(descriptor)) as looked_at:
        is_tcp = looked_at.family in (socket.AF_INET, socket.AF_INET6)
        return is_tcp and bool(looked_at.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
