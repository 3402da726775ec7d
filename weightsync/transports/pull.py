"""Pull: the learner serves its staged buckets over HTTP, workers fetch them at their own pace.

GET {pull_url}/{incarnation}/{step}/{bucket} with a bearer token. 404: superseded, look for the newer one.
"""

import hmac
import http.client
import logging
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

import torch

from broker.errors import WeightSyncError
from broker.schema import BucketSpec, WeightManifest, WeightVersion
from weightsync.buckets import allocate, as_bytes, verify
from weightsync.deadline import Deadline
from weightsync.transports.rendezvous import listen

logger = logging.getLogger(__name__)
_CHUNK_BYTES = 1 << 20


class SupersededError(WeightSyncError):
    """The version asked for has been replaced by a newer one; nothing is wrong."""


class PullServer:
    """Serves a few versions' buckets from memory, in threads of its own."""

    def __init__(self, address: str, token: str, timeout_s: float) -> None:
        self._buckets: dict[WeightVersion, tuple[torch.Tensor, ...]] = {}
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

    def keep_only(self, version: WeightVersion) -> None:
        """Forget all other versions; whoever is fetching a bucket of one gets it to its end, then 404."""
        self._buckets = {version: self._buckets[version]}

    def forget(self, version: WeightVersion) -> None:
        """Serve `version` no more."""
        self._buckets = {other: data for other, data in self._buckets.items() if other != version}

    def find(self, path: str) -> torch.Tensor | None:
        """The bucket that `path` names, if it is still served."""
        parts = path.split("/")
        if len(parts) != 4 or not all(part.isdecimal() and len(part) < 19 for part in parts[1:]):
            return None
        incarnation, step, index = map(int, parts[1:])
        buckets = self._buckets.get(WeightVersion(incarnation, step), ())
        return buckets[index] if index < len(buckets) else None

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
        self._buckets = {}


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
            bucket = server.find(self.path)
            if bucket is None:
                return self.send_error(HTTPStatus.NOT_FOUND)
            return self._send(bucket)

        def _send(self, bucket: torch.Tensor) -> None:
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Length", str(bucket.numel()))
            self.end_headers()
            data = as_bytes(bucket)
            for start in range(0, len(data), _CHUNK_BYTES):
                if server.is_closing():
                    break
                try:
                    self.wfile.write(data[start : start + _CHUNK_BYTES])
                except OSError:  # the worker went away or stopped reading; it is its business to come again
                    break

        def log_message(self, format: str, *args: object) -> None:
            """Silence: one line per bucket would drown the log."""

    return BucketHandler


class HttpPull:
    """Fetches a manifest's buckets from the learner's server. `timeout_s` bounds every wait for bytes."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s

    def pull(self, manifest: WeightManifest, deadline: Deadline) -> tuple[torch.Tensor, ...]:
        """See PullTransport. Raises SupersededError, or WeightSyncError where the learner does not answer."""
        buckets = allocate(manifest.buckets)
        for index, (spec, bucket) in enumerate(zip(manifest.buckets, buckets, strict=True)):
            try:
                self._fetch(manifest, index, bucket, deadline)
            except (OSError, http.client.HTTPException) as error:
                raise WeightSyncError(
                    f"pulling {manifest.version} from {manifest.pull_url} failed: {error!r}"
                ) from error
            verify(index, spec, bucket)
        return buckets

    def _fetch(self, manifest: WeightManifest, index: int, bucket: torch.Tensor, deadline: Deadline) -> None:
        address = urlsplit(manifest.pull_url)
        version = manifest.version
        connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=self._timeout_s)
        try:
            path = f"/{version.incarnation}/{version.step}/{index}"
            connection.request("GET", path, headers={"Authorization": f"Bearer {manifest.pull_token}"})
            with connection.getresponse() as response:
                _check_response(response, manifest, manifest.buckets[index])
                _read_into(response, as_bytes(bucket), deadline)
        finally:
            connection.close()


def _check_response(response: http.client.HTTPResponse, manifest: WeightManifest, spec: BucketSpec) -> None:
    if response.status == HTTPStatus.NOT_FOUND:
        raise SupersededError(f"{manifest.version} is no longer served at {manifest.pull_url}")
    if response.status != HTTPStatus.OK or response.length != spec.nbytes:
        raise WeightSyncError(
            f"{manifest.pull_url} answered {response.status} with {response.length} bytes instead of {spec.nbytes}"
        )


def _read_into(response: http.client.HTTPResponse, data: memoryview, deadline: Deadline) -> None:
    done = 0
    while done < len(data):
        deadline.check(f"pull, {done} of {len(data)} bytes of a bucket")
        count = response.readinto(data[done : done + _CHUNK_BYTES])
        if not count:
            raise WeightSyncError(f"the learner closed the connection after {done} of {len(data)} bytes of a bucket")
        done += count
