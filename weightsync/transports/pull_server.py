"""The learner's end of pull: serves staged buckets and deltas over HTTP, see `pull.py`."""

import hmac
import logging
import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple

import torch

from broker.schema import WeightVersion
from weightsync.deadline import Deadline
from weightsync.transports.rendezvous import listen
from weightsync.transports.served import ServedVersion

logger = logging.getLogger(__name__)
DELTA = "delta"
OLDER = 2
"""Versions that are kept for those in the middle of them: one that a slow line reads keeps nobody else out."""
_LOOK_S = 0.2
_SEND_BUFFER_BYTES = 1 << 20
"""What the system holds of a bucket, which a slow line takes long to read when all of it has been sent."""
_CHUNK_BYTES = 1 << 20
"""At most so many are handed to the system at once; the timeout is for any of them."""


class Found(NamedTuple):
    """What a path names."""

    data: memoryview
    being_read: Callable[[], AbstractContextManager[None]]
    """To be entered around what it takes to read it."""


class PullServer:
    """Serves the newest version's buckets, on a CPU or a GPU, and deltas, in threads of its own.

    An older version is served as long as somebody is in the middle of it: steps may be shorter than it takes to fetch
    a version, and who starts over with each would never get one. There are at most `OLDER` of them.
    """

    def __init__(self, address: str, token: str, timeout_s: float, *, memory_is_reused: bool = False) -> None:
        """`memory_is_reused`: the next version's buckets lie where those of the newest do."""
        self._memory_is_reused = memory_is_reused
        self._versions: dict[WeightVersion, ServedVersion] = {}
        self._deltas: dict[WeightVersion, bytes] = {}
        self._token = token
        self._is_closing = threading.Event()
        self._server = _open_server(address, _handler_for(self, timeout_s))
        self.url = f"http://{address}:{self._server.server_address[1]}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.05,), name="weights-pull", daemon=True
        )
        self._thread.start()

    def serve(self, version: WeightVersion, buckets: tuple[torch.Tensor, ...]) -> None:
        """Beside the versions served so far."""
        served = ServedVersion(buckets, memory_is_reused=self._memory_is_reused)
        self._versions = {**self._versions, version: served}

    def serve_deltas(self, deltas: Mapping[WeightVersion, bytes]) -> None:
        """By the versions that they lead to, beside those served so far."""
        self._deltas = {**self._deltas, **deltas}

    def keep_only(self, version: WeightVersion, deltas: Mapping[WeightVersion, bytes]) -> None:
        """Forget all other versions but those that are needed, and other deltas; whoever is fetching a bucket of one
        gets it to its end, then 404."""
        needed = [(other, served) for other, served in self._versions.items() if other != version and served.is_needed]
        # Who left a version a moment ago may have all of it, and is not to keep out those who read another one.
        needed.sort(key=lambda kept: not kept[1].is_read_now)
        self._versions = dict([*needed[:OLDER], (version, self._versions[version])])
        self._deltas = dict(deltas)

    def forget(self, version: WeightVersion) -> None:
        """Serve `version` no more. Whoever still waits for a copy of one of its buckets gets none: their memory may be
        overwritten from now on."""
        if version in self._versions:
            self._versions[version].release()
        self._versions = {other: served for other, served in self._versions.items() if other != version}
        self._deltas = {other: data for other, data in self._deltas.items() if other != version}

    def release(self, version: WeightVersion) -> None:
        """Its buckets are about to be overwritten: it is served on only if it is needed and lies elsewhere by now."""
        served = self._versions.get(version)
        if served is not None and not (served.release() and served.is_needed):
            self._versions = {other: one for other, one in self._versions.items() if other != version}

    def find(self, path: str) -> Found | None:
        """The bucket or delta that `path` names, if it is still served."""
        match path.split("/"):
            case ["", incarnation, step, name] if _is_number(incarnation) and _is_number(step):
                return self._find(WeightVersion(int(incarnation), int(step)), name)
        return None

    def _find(self, version: WeightVersion, name: str) -> Found | None:
        if name == DELTA:
            delta = self._deltas.get(version)
            return None if delta is None else Found(memoryview(delta), nullcontext)
        served = self._versions.get(version)
        data = served.read(int(name)) if served is not None and _is_number(name) else None
        return None if served is None or data is None else Found(data, served.being_read)

    def is_authorized(self, header: str | None) -> bool:
        """Compares in constant time."""
        return hmac.compare_digest((header or "").encode(), f"Bearer {self._token}".encode())

    def is_closing(self) -> bool:
        """Transfers stop at their next chunk."""
        return self._is_closing.is_set()

    def close(self) -> None:
        """Stop serving and join all threads; a client that does not read holds it for the timeout at most."""
        self._is_closing.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        self._versions, self._deltas = {}, {}


def _is_number(part: str) -> bool:
    return part.isdecimal() and len(part) < 19


class _Server(ThreadingHTTPServer):
    daemon_threads = False  # joined by server_close

    def handle_error(self, request: object, client_address: object) -> None:
        logger.debug("a pull from %s broke off", client_address, exc_info=True)


def _open_server(address: str, handler: type[BaseHTTPRequestHandler]) -> _Server:
    listener = listen(address)
    server = _Server(listener.getsockname()[:2], handler, bind_and_activate=False)
    server.socket.close()
    server.socket = listener
    server.server_address = listener.getsockname()
    return server


def _handler_for(server: PullServer, timeout_s: float) -> type[BaseHTTPRequestHandler]:
    class BucketHandler(BaseHTTPRequestHandler):
        timeout = timeout_s

        def do_GET(self) -> None:
            if not server.is_authorized(self.headers["Authorization"]):
                self.send_error(HTTPStatus.UNAUTHORIZED)
                return
            found = server.find(self.path)
            if found is None:
                self.send_error(HTTPStatus.NOT_FOUND)
                return
            with found.being_read():
                self._send(found.data)

        def _send(self, data: memoryview) -> None:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            sent = 0
            with suppress(OSError):  # the worker went away or stopped reading; it is its business to come again
                while sent < len(data) and not server.is_closing():
                    sent += self.connection.send(data[sent : sent + _CHUNK_BYTES])
                self._until_it_is_there()

        def _until_it_is_there(self) -> None:
            """What was sent may be on its way for long; whoever has all of it closes the connection."""
            self.connection.shutdown(socket.SHUT_WR)
            self.connection.settimeout(_LOOK_S)
            deadline = Deadline(timeout_s)
            while not (server.is_closing() or deadline.is_over()):
                with suppress(TimeoutError):
                    self.connection.recv(1)
                    return

        def log_message(self, format: str, *args: object) -> None:
            """Silence: one line per bucket would drown the log."""

    return BucketHandler
