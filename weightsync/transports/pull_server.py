"""The learner's end of pull: serves staged buckets and deltas over HTTP, see `pull.py`."""

import hmac
import logging
import threading
from collections.abc import Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch

from broker.schema import WeightVersion
from weightsync.buckets import as_bytes
from weightsync.transports.rendezvous import listen

logger = logging.getLogger(__name__)
DELTA = "delta"
_CHUNK_BYTES = 1 << 20
"""At most so many are handed to the system at once; the timeout is for any of them."""


class PullServer:
    """Serves a few versions' buckets, on a CPU or a GPU, and deltas, in threads of its own."""

    def __init__(self, address: str, token: str, timeout_s: float) -> None:
        self._buckets: dict[WeightVersion, tuple[torch.Tensor, ...]] = {}
        self._deltas: dict[WeightVersion, bytes] = {}
        self._token = token
        self._is_closing = threading.Event()
        self._server = _open_server(address, _handler_for(self, timeout_s))
        self.url = f"http://{address}:{self._server.server_address[1]}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.05,), name="weights-pull", daemon=True
        )
        self._thread.start()

    def stage(self, version: WeightVersion, buckets: tuple[torch.Tensor, ...]) -> None:
        """Serve `buckets`, beside the versions served so far."""
        self._buckets = {**self._buckets, version: buckets}

    def stage_deltas(self, deltas: Mapping[WeightVersion, bytes]) -> None:
        """Serve `deltas`, by the versions that they lead to, beside those served so far."""
        self._deltas = {**self._deltas, **deltas}

    def keep_only(self, version: WeightVersion, deltas: Mapping[WeightVersion, bytes]) -> None:
        """Forget all other versions and deltas; whoever is fetching a bucket of one gets it to its end, then 404."""
        self._buckets = {version: self._buckets[version]}
        self._deltas = dict(deltas)

    def forget(self, version: WeightVersion) -> None:
        """Serve `version` no more."""
        self._buckets = {other: data for other, data in self._buckets.items() if other != version}
        self._deltas = {other: data for other, data in self._deltas.items() if other != version}

    def forget_buckets(self, version: WeightVersion) -> None:
        """Serve of `version` the deltas only."""
        self._buckets = {other: data for other, data in self._buckets.items() if other != version}

    def find(self, path: str) -> memoryview | None:
        """The bytes of the bucket or delta that `path` names, if it is still served."""
        match path.split("/"):
            case ["", incarnation, step, name] if _is_number(incarnation) and _is_number(step):
                return self._find(WeightVersion(int(incarnation), int(step)), name)
        return None

    def _find(self, version: WeightVersion, name: str) -> memoryview | None:
        if name == DELTA:
            delta = self._deltas.get(version)
            return None if delta is None else memoryview(delta)
        buckets = self._buckets.get(version, ())
        return as_bytes(buckets[int(name)].cpu()) if _is_number(name) and int(name) < len(buckets) else None

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
        self._buckets, self._deltas = {}, {}


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
                return self.send_error(HTTPStatus.UNAUTHORIZED)
            data = server.find(self.path)
            if data is None:
                return self.send_error(HTTPStatus.NOT_FOUND)
            return self._send(data)

        def _send(self, data: memoryview) -> None:
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            sent = 0
            while sent < len(data) and not server.is_closing():
                try:
                    sent += self.connection.send(data[sent : sent + _CHUNK_BYTES])
                except OSError:  # the worker went away or stopped reading; it is its business to come again
                    break

        def log_message(self, format: str, *args: object) -> None:
            """Silence: one line per bucket would drown the log."""

    return BucketHandler
