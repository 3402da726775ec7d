"""Pull: the learner serves its staged buckets over HTTP, workers fetch them at their own pace.

GET {pull_url}/{incarnation}/{step}/{bucket}, or .../delta for the delta to that version from the previous one, with a
bearer token. 404: the version was superseded, look for a newer one. 503: too many workers pull at this moment.
"""

import http.client
import random
import socket
import ssl
from http import HTTPStatus
from urllib.parse import urlsplit

import torch

from headway.broker.errors import WeightSyncError
from headway.broker.schema import WeightVersion
from headway.broker.schema.weights import DeltaSpec, WeightManifest
from headway.weightsync.limits import Deadline, RateLimiter
from headway.weightsync.tensors.buckets import as_bytes, digest_bytes, verify
from headway.weightsync.transports.base import SupersededError, UnreachableError

from .certificate import trusting
from .server import DELTA


class HttpPull:
    """Fetches a manifest's buckets and deltas from the learner's server. No wait for bytes is longer than
    `timeout_s`."""

    def __init__(self, timeout_s: float, rate_limiter: RateLimiter | None = None) -> None:
        self._timeout_s = timeout_s
        self._rate_limiter = rate_limiter or RateLimiter(None)

    def pull_bucket(self, manifest: WeightManifest, index: int, bucket: torch.Tensor, deadline: Deadline) -> None:
        """See PullTransport."""
        fetched = bucket if bucket.device.type == "cpu" else torch.empty_like(bucket, device="cpu")
        self._fetch(manifest, manifest.version, str(index), as_bytes(fetched), deadline)
        if fetched is not bucket:
            bucket.copy_(fetched)
        verify(manifest, {index: bucket})

    def pull_delta(self, manifest: WeightManifest, delta: DeltaSpec, deadline: Deadline) -> memoryview:
        """See PullTransport."""
        data = memoryview(bytearray(delta.nbytes))
        self._fetch(manifest, delta.version, DELTA, data, deadline)
        if (found := digest_bytes(data)) != delta.digest:
            raise WeightSyncError(
                f"the delta to version {delta.version} arrived damaged: its digest is {found}, published was "
                f"{delta.digest}"
            )
        return data

    def forget(self) -> None:
        """See PullTransport. There is nothing to drop."""

    def _fetch(
        self, manifest: WeightManifest, version: WeightVersion, name: str, data: memoryview, deadline: Deadline
    ) -> None:
        patience = Deadline(self._timeout_s)
        while (retry_s := self._try_to_fetch(manifest, version, name, data, deadline)) is not None:
            if patience.is_over():
                raise UnreachableError(f"{manifest.pull_url} had no place for {self._timeout_s:g} s: others pull")
            # Workers wait for random times: if all came back at once, the same worker could always be the last.
            deadline.pause(retry_s * random.uniform(0.5, 1.0))
            deadline.check(f"pulling version {version}, waiting for a place")

    def _try_to_fetch(
        self, manifest: WeightManifest, version: WeightVersion, name: str, data: memoryview, deadline: Deadline
    ) -> float | None:
        """Fetch `name` into `data`. Returns None, or after how many seconds to try again."""
        connection = _connection(manifest, self._timeout_s)
        try:
            path = f"/{version.incarnation}/{version.step}/{name}"
            connection.connect()
            if (
                self._rate_limiter.bytes_per_s is not None
            ):  # otherwise the system would read megabytes ahead of the pace
                connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self._rate_limiter.bytes_per_s)
            connection.request("GET", path, headers={"Authorization": f"Bearer {manifest.pull_token}"})
            with connection.getresponse() as response:
                if response.status == HTTPStatus.SERVICE_UNAVAILABLE:
                    return float(response.headers.get("Retry-After", "1"))
                _check_response(response, manifest.pull_url, version, len(data))
                self._read_into(response, data, deadline)
                return None
        except ssl.SSLCertVerificationError as error:
            raise UnreachableError(
                f"who answers at {manifest.pull_url} does not show the learner's certificate ({error.verify_message}): "
                "another process has its port now, or another one stands between"
            ) from error
        except (OSError, ValueError, http.client.HTTPException) as error:  # ValueError: a malformed number
            raise UnreachableError(f"pulling version {version} from {manifest.pull_url} failed: {error!r}") from error
        finally:
            connection.close()

    def _read_into(self, response: http.client.HTTPResponse, data: memoryview, deadline: Deadline) -> None:
        done = self._rate_limiter.fill(data, response.fp.readinto1, deadline)
        if done < len(data):
            raise UnreachableError(f"the learner closed the connection after {done} of {len(data)} bytes")


def _connection(manifest: WeightManifest, timeout_s: float) -> http.client.HTTPConnection:
    """Return a connection to the learner that is not open yet."""
    address = urlsplit(manifest.pull_url)
    host, port = address.hostname or "", address.port
    if not manifest.pull_certificate:
        return http.client.HTTPConnection(host, port, timeout=timeout_s)
    return http.client.HTTPSConnection(host, port, timeout=timeout_s, context=trusting(manifest.pull_certificate))


def _check_response(response: http.client.HTTPResponse, url: str, version: WeightVersion, nbytes: int) -> None:
    if response.status == HTTPStatus.NOT_FOUND:
        raise SupersededError(f"version {version} is no longer served at {url}")
    if response.status != HTTPStatus.OK or response.length != nbytes:
        raise WeightSyncError(f"{url} answered {response.status} with {response.length} bytes instead of {nbytes}")
