"""A few threads that serve any number of connections: each costs a file descriptor and some memory, but no thread.

A visit is the exchange on one connection: a generator that yields what it waits for. It is resumed when that has
happened, and from time to time in any case, so it must try its operation again and check its own deadline. A visitor
that has shown the secret is known. The others, strangers, stay as long as there is room, and the one that came first
makes room for the newest, so that a worker that shows the secret at once is always served.
"""

import errno
import logging
import selectors
import socket
import ssl
import threading
import time
from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from headway.weightsync.deadline import Deadline

logger = logging.getLogger(__name__)
T = TypeVar("T")
READ, WRITE, PAUSE = selectors.EVENT_READ, selectors.EVENT_WRITE, 0
_LOOK_S = 0.25
"""Seconds between two moments at which all visits are resumed to check their deadlines."""
_PAUSE_S = 0.005
STRANGERS = 64
"""Visitors that each thread keeps though they have not shown the secret."""
_NO_FILES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS)


@dataclass(eq=False)
class Visitor:
    """The client at the other end of a connection."""

    connection: socket.socket
    is_known: bool = False
    """Whether it has shown the secret, so that no newcomer takes its place."""


Visit = Generator[int, None, None]
"""Yields READ, WRITE or PAUSE; ends by returning or raising, after which the connection is closed."""


def when_ready(act: Callable[[], T], usually: int, deadline: Deadline) -> Generator[int, None, T]:
    """Call `act` once the connection is ready for it, and return its result. Raises TimeoutError after the deadline,
    and OSError."""
    while True:
        try:
            return act()
        except ssl.SSLWantReadError:
            wanted = READ
        except ssl.SSLWantWriteError:
            wanted = WRITE
        except BlockingIOError:
            wanted = usually
        if deadline.is_over():
            raise TimeoutError
        yield wanted


class Visits:
    """Accepts at `listener` until `close`, in `threads` threads."""

    def __init__(
        self,
        listener: socket.socket,
        threads: int,
        visit: Callable[[Visitor], Visit],
        tls: ssl.SSLContext | None = None,
    ) -> None:
        listener.setblocking(False)
        self._listener = listener
        self._is_closing = threading.Event()
        self._threads = [
            threading.Thread(
                target=lambda: _Loop(listener, visit, tls).run(self._is_closing),
                name=f"weights-pull-{number}",
                daemon=True,
            )
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """End all visits and stop listening, without waiting for clients. Idempotent."""
        self._is_closing.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the threads that wait for the next connection
        for thread in self._threads:
            thread.join()
        self._listener.close()


class _Loop:
    """The visits of one thread. All threads listen, so a busy one leaves the next connection to the others."""

    def __init__(self, listener: socket.socket, visit: Callable[[Visitor], Visit], tls: ssl.SSLContext | None) -> None:
        self._listener = listener
        self._visit = visit
        self._tls = tls
        self._visits: dict[Visitor, Visit] = {}
        """The visits in the order in which they came."""
        self._pausing: set[Visitor] = set()
        self._selector = selectors.DefaultSelector()
        self._listens_again = 0.0

    def run(self, is_closing: threading.Event) -> None:
        looks = time.monotonic()
        self._selector.register(self._listener, READ)
        while not is_closing.is_set():
            for key, _ in self._selector.select(_PAUSE_S if self._pausing else _LOOK_S):
                if key.fileobj is self._listener:
                    self._accept()
                elif key.data in self._visits:  # an earlier event of this round may have ended this visit to make room
                    self._resume(key.data)
            for visitor in list(self._pausing):
                self._resume(visitor)
            if time.monotonic() >= looks:
                looks = time.monotonic() + _LOOK_S
                self._look()
        for visitor in list(self._visits):
            self._end(visitor)
        self._selector.close()

    def _look(self) -> None:
        for visitor in list(self._visits):
            self._resume(visitor)
        if self._listener.fileno() not in self._selector.get_map():
            self._selector.register(self._listener, READ)

    def _accept(self) -> None:
        """Accept one connection, and leave further ones to the other threads."""
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            if error.errno in _NO_FILES and not self._make_room():
                self._selector.unregister(self._listener)  # until `_look`: it would be ready all the time
            return
        try:
            visitor = Visitor(self._secured(connection))
        except OSError:  # the client has gone already
            connection.close()
            return
        if sum(not other.is_known for other in self._visits) >= STRANGERS:
            self._make_room()
        self._visits[visitor] = self._visit(visitor)
        self._selector.register(visitor.connection, READ, visitor)
        self._resume(visitor)

    def _secured(self, connection: socket.socket) -> socket.socket:
        """Return the connection with TLS, if there is any. The handshake is made when the first byte is read."""
        connection.setblocking(False)
        if self._tls is None:
            return connection
        return self._tls.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)

    def _make_room(self) -> bool:
        """End the visit of the stranger that came first. Returns False if there is no stranger."""
        stranger = next((visitor for visitor in self._visits if not visitor.is_known), None)
        if stranger is not None:
            self._end(stranger)
        return stranger is not None

    def _resume(self, visitor: Visitor) -> None:
        try:
            wanted = next(self._visits[visitor])
        except StopIteration:
            self._end(visitor)
        except Exception:
            logger.debug("a pull broke off", exc_info=True)
            self._end(visitor)
        else:
            (self._pausing.discard if wanted else self._pausing.add)(visitor)
            if wanted and self._selector.get_key(visitor.connection).events != wanted:
                self._selector.modify(visitor.connection, wanted, visitor)

    def _end(self, visitor: Visitor) -> None:
        visit = self._visits.pop(visitor)
        self._pausing.discard(visitor)
        visit.close()
        self._selector.unregister(visitor.connection)
        visitor.connection.close()
