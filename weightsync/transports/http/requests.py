"""What is said on a connection of the pull server: a request with the run's secret, and the bytes that it names."""

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

from weightsync.deadline import Deadline

from .visits import PAUSE, READ, WRITE, Visit, Visitor, when_ready

MOST = 256
"""Requests that are answered at the same time, those of 64 workers; more of them are asked to come again."""
_HEAD_S = 10.0
"""For all that precedes the answer: who says nothing goes then, if not sooner."""
_HEAD_BYTES = 2048
_GET = b"GET "
_SEND_BUFFER_BYTES = 1 << 20
"""What the system holds of a bucket, which a slow line takes long to read when all of it has been sent."""
_CHUNK_BYTES = 1 << 20
"""At most so many are sent before others get their turn; the timeout is for any of them."""


class Found(NamedTuple):
    """What a path names."""

    data: memoryview
    being_read: Callable[[], AbstractContextManager[None]]
    """To be entered around what it takes to read it."""


class Requests:
    """Answers those who know the secret; nothing that others send is kept or looked at."""

    def __init__(
        self, token: str, timeout_s: float, is_ready: Callable[[str], bool], find: Callable[[str], Found | None]
    ) -> None:
        """`find` a path's bytes, which `is_ready` has made ready. `timeout_s` is for the client to take a chunk of
        them."""
        self._expected = f"Bearer {token}".encode()
        self._timeout_s = timeout_s
        self._is_ready = is_ready
        self._find = find
        self._counting = threading.Lock()
        self.answered = 0
        """Requests that are being answered now."""

    def visit(self, visitor: Visitor) -> Visit:
        """One request, and its answer."""
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
        """Whether there is one among those who are answered, for as long as it is held."""
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
        # What was sent may be on its way for long; whoever has all of it closes the connection.
        connection.shutdown(socket.SHUT_WR)
        yield from when_ready(lambda: connection.recv(1), READ, Deadline(self._timeout_s))


def _head(connection: socket.socket, deadline: Deadline) -> Generator[int, None, tuple[str, bytes]]:
    """(path, what is said under Authorization) of a request. Raises ValueError if it is none."""
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
    """Some at a time: who reads as fast as we send is no reason to leave the others alone."""
    while data:
        some, data, deadline = data[:_CHUNK_BYTES], data[_CHUNK_BYTES:], Deadline(timeout_s)
        while some:
            some = some[(yield from when_ready(partial(connection.send, some), WRITE, deadline)) :]
        yield WRITE
