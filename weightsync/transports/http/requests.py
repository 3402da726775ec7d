"""One connection of the pull server: it reads a request with the run's secret, and sends the bytes that it names."""

import hmac
import io
import socket
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from http import HTTPStatus
from http.client import parse_headers
from typing import NamedTuple

from headway.weightsync.deadline import Deadline

from .visits import PAUSE, READ, WRITE, Visit, Visitor, when_ready

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


class Found(NamedTuple):
    """The bytes that a path names."""

    data: memoryview
    being_read: Callable[[], AbstractContextManager[None]]
    """A context in which they must be sent."""


class Requests:
    """Answers clients that show the secret; what other clients send is neither kept nor read further."""

    def __init__(
        self, token: str, timeout_s: float, is_ready: Callable[[str], bool], find: Callable[[str], Found | None]
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

    def visit(self, visitor: Visitor) -> Visit:
        """Read one request and answer it."""
        connection = visitor.connection
        deadline = Deadline(_HEAD_S)
        path, authorization = yield from _head(connection, deadline)
        if not hmac.compare_digest(authorization, self._expected):
            yield from _answer(connection, HTTPStatus.UNAUTHORIZED, deadline)
            return
        visitor.is_known = True
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

    def _send(self, connection: socket.socket, data: memoryview) -> Visit:
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


def _answer(connection: socket.socket, status: HTTPStatus, deadline: Deadline, headers: str = "") -> Visit:
    text = f"HTTP/1.1 {status:d} {status.phrase}\r\nConnection: close\r\n{headers}Content-Length: 0\r\n\r\n".encode()
    yield from when_ready(lambda: connection.send(text), WRITE, deadline)


def _all_sent(connection: socket.socket, data: memoryview, timeout_s: float) -> Visit:
    """Send `data` chunk by chunk: a fast reader must not keep the thread from its other connections."""
    while data:
        some, data, deadline = data[:_CHUNK_BYTES], data[_CHUNK_BYTES:], Deadline(timeout_s)
        while some:
            some = some[(yield from when_ready(partial(connection.send, some), WRITE, deadline)) :]
        yield WRITE
