"""Tells the members of a group at once that there is an offer. Who does not hear it finds it at the next look."""

import asyncio
import socket
from collections.abc import Callable
from contextlib import suppress

from .transports.listening import listen

_WAITING = 1024
"""Connections that may wait for the next ring, which takes them in."""
_RINGS = 64


class Doorbell:
    """The learner's end, at a port of its own. Nothing that is sent to it is read."""

    def __init__(self, address: str) -> None:
        self._listener = listen(address)
        self._listener.listen(_WAITING)
        self._listener.setblocking(False)
        self._members: list[socket.socket] = []
        self.port = int(self._listener.getsockname()[1])

    def ring(self) -> None:
        """For all who are connected. Never blocks: whoever does not read is dropped."""
        with suppress(OSError):  # nobody waits, or there are no more files: the rest finds the offer at its next look
            while True:
                member, _ = self._listener.accept()
                member.setblocking(False)
                self._members.append(member)
        self._members = [member for member in self._members if _rung(member)]

    def close(self) -> None:
        """Idempotent."""
        for one in (self._listener, *self._members):
            one.close()


def _rung(member: socket.socket) -> bool:
    try:
        member.send(b"!")
    except OSError:
        member.close()
        return False
    return True


async def hear(host: str, port: int, on_ring: Callable[[], None]) -> None:
    """Call `on_ring` whenever the bell is rung, until it is gone."""
    with suppress(OSError):
        reader, writer = await asyncio.open_connection(host, port)
        try:
            while await reader.read(_RINGS):
                on_ring()
        finally:
            writer.close()
