"""The connections of the pull server: a few threads serve any number of them. Each costs a file descriptor and some
memory, but no thread.

An exchange on one connection is a generator that yields what it waits for. It reads a request with the run's secret,
and sends the bytes that it names. It is resumed when that has happened, and from time to time in any case, so it must
try its operation again and check its own deadline. A client that has shown the secret is authenticated. The others stay
as long as there is room, and the one that came first makes room for the newest, so that a worker that shows the secret
at once is always served.
"""

import errno
import hmac
import io
import logging
import selectors
import socket
import ssl
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from http.client import parse_headers
from typing import NamedTuple, TypeVar

from headway.weightsync.limits import Deadline

logger = logging.getLogger(__name__)
T = TypeVar("T")
READ, WRITE, PAUSE = selectors.EVENT_READ, selectors.EVENT_WRITE, 0
_POLL_S = 0.25
"""Seconds between two moments at which all exchanges are resumed to check their deadlines."""
_PAUSE_S = 0.005
MAX_UNAUTHENTICATED = 64
"""Clients that each thread keeps though they have not shown the secret."""
_NO_FILES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS)


@dataclass(eq=False)
class Client:
    """The client at the other end of a connection."""

    connection: socket.socket
    is_authenticated: bool = False
    """Whether it has shown the secret, so that no newcomer takes its place."""


Exchange = Generator[int, None, None]
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


class ConnectionPool:
    """Accepts at `listener` until `close`, in `threads` threads."""

    def __init__(
        self,
        listener: socket.socket,
        threads: int,
        exchange: Callable[[Client], Exchange],
        tls: ssl.SSLContext | None = None,
    ) -> None:
        listener.setblocking(False)
        self._listener = listener
        self._is_closing = threading.Event()
        self._threads = [
            threading.Thread(
                target=lambda: _Loop(listener, exchange, tls).run(self._is_closing),
                name=f"weights-pull-{number}",
                daemon=True,
            )
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """End all exchanges and stop listening, without waiting for clients. Idempotent."""
        self._is_closing.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the threads that wait for the next connection
        for thread in self._threads:
            thread.join()
        self._listener.close()


class _Loop:
    """The exchanges of one thread. All threads listen, so a busy one leaves the next connection to the others."""

    def __init__(
        self, listener: socket.socket, exchange: Callable[[Client], Exchange], tls: ssl.SSLContext | None
    ) -> None:
        self._listener = listener
        self._exchange = exchange
        self._tls = tls
        self._connections: dict[Client, Exchange] = {}
        """The exchanges in the order in which they came."""
        self._pausing: set[Client] = set()
        self._selector = selectors.DefaultSelector()
        self._listens_again = 0.0

    def run(self, is_closing: threading.Event) -> None:
        next_poll_s = time.monotonic()
        self._selector.register(self._listener, READ)
        while not is_closing.is_set():
            for key, _ in self._selector.select(_PAUSE_S if self._pausing else _POLL_S):
                if key.fileobj is self._listener:
                    self._accept()
                elif (
                    key.data in self._connections
                ):  # an earlier event of this round may have ended this exchange to make room
                    self._resume(key.data)
            for client in list(self._pausing):
                self._resume(client)
            if time.monotonic() >= next_poll_s:
                next_poll_s = time.monotonic() + _POLL_S
                self._poll()
        for client in list(self._connections):
            self._end(client)
        self._selector.close()

    def _poll(self) -> None:
        for client in list(self._connections):
            self._resume(client)
        if self._listener.fileno() not in self._selector.get_map():
            self._selector.register(self._listener, READ)

    def _accept(self) -> None:
        """Accept one connection, and leave further ones to the other threads."""
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            if error.errno in _NO_FILES and not self._make_room():
                self._selector.unregister(self._listener)  # until `_poll`: it would be ready all the time
            return
        try:
            client = Client(self._secured(connection))
        except OSError:  # the client has gone already
            connection.close()
            return
        if sum(not other.is_authenticated for other in self._connections) >= MAX_UNAUTHENTICATED:
            self._make_room()
        self._connections[client] = self._exchange(client)
        self._selector.register(client.connection, READ, client)
        self._resume(client)

    def _secured(self, connection: socket.socket) -> socket.socket:
        """Return the connection with TLS, if there is any. The handshake is made when the first byte is read."""
        connection.setblocking(False)
        if self._tls is None:
            return connection
        return self._tls.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)

    def _make_room(self) -> bool:
        """End the exchange of the unauthenticated client that came first. Returns False if there is none."""
        oldest = next((client for client in self._connections if not client.is_authenticated), None)
        if oldest is not None:
            self._end(oldest)
        return oldest is not None

    def _resume(self, client: Client) -> None:
        try:
            wanted = next(self._connections[client])
        except StopIteration:
            self._end(client)
        except Exception:
            logger.debug("a pull broke off", exc_info=True)
            self._end(client)
        else:
            (self._pausing.discard if wanted else self._pausing.add)(client)
            if wanted and self._selector.get_key(client.connection).events != wanted:
                self._selector.modify(client.connection, wanted, client)

    def _end(self, client: Client) -> None:
        exchange = self._connections.pop(client)
        self._pausing.discard(client)
        exchange.close()
        self._selector.unregister(client.connection)
        client.connection.close()


MOST = 256
"""Requests that are answered at the same time, those of 64 workers; further ones are told to come again."""
_HEAD_S = 10.0
"""The time that a client has for its request before the connection is closed."""
_HEAD_BYTES = 2048
_GET = b"GET "
_SEND_BUFFER_BYTES = 1 << 20
"""The bytes of a bucket that the system buffers: a slow line still reads them once the bucket has been sent."""
_CHUNK_BYTES = 1 << 20
"""Bytes that are sent before the thread goes on to another connection; each chunk has the whole timeout."""


class Content(NamedTuple):
    """The bytes that a path names."""

    data: memoryview
    being_read: Callable[[], AbstractContextManager[None]]
    """A context in which they must be sent."""


class Responder:
    """Answers clients that show the secret; what other clients send is neither kept nor read further."""

    def __init__(
        self, token: str, timeout_s: float, is_ready: Callable[[str], bool], find: Callable[[str], Content | None]
    ) -> None:
        """`find` returns a path's bytes once `is_ready` has returned True. A client has `timeout_s` to take each
        chunk."""
        self._expected = f"Bearer {token}".encode()
        self._timeout_s = timeout_s
        self._is_ready = is_ready
        self._find = find
        self._counting = threading.Lock()
        self.answered = 0
        """Requests that are being answered now."""

    def exchange(self, client: Client) -> Exchange:
        """Read one request and answer it."""
        connection = client.connection
        deadline = Deadline(_HEAD_S)
        path, authorization = yield from _head(connection, deadline)
        if not hmac.compare_digest(authorization, self._expected):
            yield from _answer(connection, HTTPStatus.UNAUTHORIZED, deadline)
            return
        client.is_authenticated = True
        with self._place() as has_place:
            if not has_place:
                yield from _answer(connection, HTTPStatus.SERVICE_UNAVAILABLE, deadline, "Retry-After: 1\r\n")
                return
            deadline = Deadline(self._timeout_s)
            while not self._is_ready(path) and not deadline.is_over():
                yield PAUSE
            found = self._find(path)
            if found is None:
                yield from _answer(connection, HTTPStatus.NOT_FOUND, deadline)
                return
            with found.being_read():
                yield from self._send(connection, found.data)

    @contextmanager
    def _place(self) -> Iterator[bool]:
        """Yield whether there was a place among the requests that are answered, which is held during the block."""
        with self._counting:
            has_place = self.answered < MOST
            self.answered += has_place
        try:
            yield has_place
        finally:
            with self._counting:
                self.answered -= has_place

    def _send(self, connection: socket.socket, data: memoryview) -> Exchange:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        head = f"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: {len(data)}\r\n\r\n".encode()
        yield from _all_sent(connection, memoryview(head), self._timeout_s)
        yield from _all_sent(connection, data, self._timeout_s)
        # The last bytes may be on their way for long; the client closes the connection once it has all of them.
        connection.shutdown(socket.SHUT_WR)
        yield from when_ready(lambda: connection.recv(1), READ, Deadline(self._timeout_s))


def _head(connection: socket.socket, deadline: Deadline) -> Generator[int, None, tuple[str, bytes]]:
    """Return path and Authorization header of a request. Raises ValueError for anything but a worker's request."""
    head = bytearray()
    while not head.endswith(b"\r\n\r\n"):
        some = yield from when_ready(lambda: connection.recv(_HEAD_BYTES), READ, deadline)
        head += some
        if not some or len(head) > _HEAD_BYTES or not head.startswith(_GET[: len(head)]):
            raise ValueError("no request of a worker")
    first, _, rest = bytes(head).partition(b"\r\n")
    _, path, _ = first.decode("ascii").split(" ")
    return path, parse_headers(io.BytesIO(rest)).get("Authorization", "").encode()


def _answer(connection: socket.socket, status: HTTPStatus, deadline: Deadline, headers: str = "") -> Exchange:
    text = f"HTTP/1.1 {status:d} {status.phrase}\r\nConnection: close\r\n{headers}Content-Length: 0\r\n\r\n".encode()
    yield from when_ready(lambda: connection.send(text), WRITE, deadline)


def _all_sent(connection: socket.socket, data: memoryview, timeout_s: float) -> Exchange:
    """Send `data` chunk by chunk: a fast reader must not keep the thread from its other connections."""
    while data:
        some, data, deadline = data[:_CHUNK_BYTES], data[_CHUNK_BYTES:], Deadline(timeout_s)
        while some:
            some = some[(yield from when_ready(partial(connection.send, some), WRITE, deadline)) :]
        yield WRITE
