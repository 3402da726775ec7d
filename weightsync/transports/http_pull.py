"""Pulls: the learner serves its staged buckets and deltas over HTTPS, workers fetch them at their own pace.

GET {pull_url}/{incarnation}/{step}/{bucket}, or .../delta for the delta to that version from the previous one, with a
bearer token. 404: the version was superseded, look for a newer one. 503: too many workers pull at this moment.

The invariant: a client that has not shown the run's secret gets nothing and keeps no worker out, and a worker trusts no
certificate but that of the manifest.
"""

import http.client
import logging
import math
import random
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from http import HTTPStatus
from urllib.parse import urlsplit

import torch

from headway.broker.errors import WeightSyncError
from headway.broker.schema import WeightVersion
from headway.broker.schema.weights import DeltaSpec, WeightManifest
from headway.weightsync.limits import Deadline, RateLimiter
from headway.weightsync.tensors.buckets import as_bytes, digest_bytes, verify

from .addresses import Ports, is_loopback, listen
from .base import SupersededError, UnreachableError
from .certificate import new_identity, trusting
from .http_connections import ConnectionPool, Content, Responder


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


logger = logging.getLogger(__name__)
PATIENCE_S = 10.0
"""A worker that has read nothing for so long has all of the version, or is gone. Between two buckets it copies and
verifies one."""


class ServedVersion:
    """A served version. Buckets in host memory are served as they are; others through copies, which a thread makes once
    a worker has begun to read."""

    def __init__(self, buckets: tuple[torch.Tensor, ...], *, memory_is_reused: bool) -> None:
        self._buckets = buckets
        self._memory_is_reused = memory_is_reused
        self._copies: list[Future[torch.Tensor | None]] = [Future() for _ in buckets]
        self._begin = threading.Lock()
        """Taken once, by the first reader, for whom the copies are begun."""
        self._copying = threading.Lock()
        """Held while the buckets' memory is read."""
        self._is_released = False
        self._counting = threading.Lock()
        self._readers = 0
        self._left_at = -math.inf

    @property
    def is_needed(self) -> bool:
        """Whether a worker is in the middle of this version."""
        return self.is_read_now or time.monotonic() - self._left_at < PATIENCE_S

    @property
    def is_read_now(self) -> bool:
        """Whether a worker is reading a bucket of it right now; False between two buckets."""
        return self._readers > 0

    @contextmanager
    def being_read(self) -> Iterator[None]:
        """Wrap the time in which a worker reads a bucket."""
        with self._counting:
            self._readers += 1
        try:
            yield
        finally:
            with self._counting:
                self._readers -= 1
                self._left_at = time.monotonic()

    def is_ready(self, index: int) -> bool:
        """Return whether `read` would not wait. Begins the copies."""
        if not self._memory_is_reused or not 0 <= index < len(self._buckets):
            return True
        if self._begin.acquire(blocking=False):
            threading.Thread(target=self._copy_all, name="weights-copy", daemon=True).start()
        return self._copies[index].done()

    def read(self, index: int) -> memoryview | None:
        """Return one bucket, or None where there is none or it is not served any more. Waits for its copy, and raises
        the error that kept the copy from being made."""
        if not 0 <= index < len(self._buckets):
            return None
        if not self._memory_is_reused:
            return as_bytes(self._buckets[index].cpu())
        self.is_ready(index)
        copied = self._copies[index].result()
        return None if copied is None else as_bytes(copied)

    def release(self) -> bool:
        """Note that the buckets are about to be overwritten. Returns False if not all of them have been copied, so that
        this version cannot be served any more."""
        self._is_released = True
        with self._copying:  # waits for one bucket's copy at most
            return not self._memory_is_reused or all(map(_is_made, self._copies))

    def _copy_all(self) -> None:
        """Copy the buckets in the order in which workers read them; the copy of a released bucket is None."""
        for index, copied in enumerate(self._copies):
            try:
                copied.set_result(self._copy(self._buckets[index]))
            except (MemoryError, RuntimeError) as error:  # torch raises either when memory runs out
                logger.warning("no memory to copy weights for those who pull: %s", error)
                copied.set_exception(error)

    def _copy(self, bucket: torch.Tensor) -> torch.Tensor | None:
        with self._copying:
            if self._is_released:
                return None
            # On a stream of its own the copy does not wait for training, nor training for the copy.
            own = torch.cuda.Stream(bucket.device) if bucket.is_cuda else None  # type: ignore[no-untyped-call]
            with torch.cuda.stream(own):
                return bucket.to("cpu", copy=True)


def _is_made(copied: "Future[torch.Tensor | None]") -> bool:
    return copied.done() and copied.exception() is None and copied.result() is not None


DELTA = "delta"
OLDER = 2
"""Older versions that are kept for workers in the middle of them. More than one, so that a worker behind a slow line
does not take the only place."""
_THREADS = 4
"""As many as one worker has connections. Most time goes into encryption and copies, which other threads can overlap."""


class PullServer:
    """Serves the newest version's buckets, on a CPU or a GPU, and deltas, in a few threads of its own.

    An older version is served as long as a worker is in the middle of it: steps may be shorter than the fetch of a
    version, and a worker that started over with each would never get one. There are at most `OLDER` of them.
    """

    def __init__(
        self,
        address: str,
        token: str,
        timeout_s: float,
        *,
        ports: Ports | None = None,
        tls: bool | None = None,
        memory_is_reused: bool = False,
    ) -> None:
        """`tls`: encrypt, with a certificate that is made now; None: unless only this machine can connect.
        `memory_is_reused`: the next version's buckets have the memory of the newest version's.

        Raises WeightSyncError where it cannot listen at `address` and one of `ports`.
        """
        self._memory_is_reused = memory_is_reused
        self._versions: dict[WeightVersion, ServedVersion] = {}
        self._deltas: dict[WeightVersion, bytes] = {}
        self._lasting: dict[WeightVersion, ServedVersion] = {}
        listener = listen(address, ports)
        is_encrypted = not is_loopback(listener) if tls is None else tls
        context, self.certificate = new_identity() if is_encrypted else (None, "")
        host = f"[{address}]" if ":" in address else address
        self.url = f"{'https' if is_encrypted else 'http'}://{host}:{listener.getsockname()[1]}"
        # The methods are looked up anew for every request.
        self._responder = Responder(token, timeout_s, lambda path: self.is_ready(path), lambda path: self.find(path))
        self._connections = ConnectionPool(listener, _THREADS, self._responder.exchange, context)

    def serve(self, version: WeightVersion, buckets: tuple[torch.Tensor, ...]) -> None:
        """Serve `version`, too."""
        served = ServedVersion(buckets, memory_is_reused=self._memory_is_reused)
        self._versions = {**self._versions, version: served}

    def serve_always(self, version: WeightVersion, buckets: tuple[torch.Tensor, ...]) -> None:
        """Serve `version` until `close`, from buckets in host memory that stay as they are."""
        self._lasting = {**self._lasting, version: ServedVersion(buckets, memory_is_reused=False)}

    def serve_deltas(self, deltas: Mapping[WeightVersion, bytes]) -> None:
        """Serve `deltas`, too, given by the versions to which they lead."""
        self._deltas = {**self._deltas, **deltas}

    def keep_only(self, version: WeightVersion, deltas: Mapping[WeightVersion, bytes]) -> None:
        """Forget other versions that no worker is in the middle of, and all other deltas. A worker that is fetching a
        bucket of one gets it to its end, and 404 for the next."""
        needed = [(other, served) for other, served in self._versions.items() if other != version and served.is_needed]
        # A version that a worker is reading now goes before one that its worker may have all of already.
        needed.sort(key=lambda kept: not kept[1].is_read_now)
        self._versions = dict([*needed[:OLDER], (version, self._versions[version])])
        self._deltas = dict(deltas)

    def forget(self, version: WeightVersion) -> None:
        """Stop serving `version`. A worker that still waits for the copy of one of its buckets gets none, as their
        memory may be overwritten from now on."""
        if version in self._versions:
            self._versions[version].release()
        self._versions = {other: served for other, served in self._versions.items() if other != version}
        self._deltas = {other: data for other, data in self._deltas.items() if other != version}

    def release(self, version: WeightVersion) -> None:
        """Note that the buckets of `version` are about to be overwritten: it is served on only if a worker needs it and
        all of it has been copied."""
        served = self._versions.get(version)
        if served is not None and not (served.release() and served.is_needed):
            self._versions = {other: one for other, one in self._versions.items() if other != version}

    def is_ready(self, path: str) -> bool:
        """Return whether `find` would not wait for a copy of what `path` names; the copy is begun."""
        match path.split("/"):
            case ["", incarnation, step, name] if all(map(_is_number, (incarnation, step, name))):
                served = self._served(WeightVersion(int(incarnation), int(step)))
                return served is None or served.is_ready(int(name))
        return True

    def find(self, path: str) -> Content | None:
        """Return the bucket or delta that `path` names, or None where it is not served any more."""
        match path.split("/"):
            case ["", incarnation, step, name] if _is_number(incarnation) and _is_number(step):
                return self._find(WeightVersion(int(incarnation), int(step)), name)
        return None

    def _find(self, version: WeightVersion, name: str) -> Content | None:
        if name == DELTA:
            delta = self._deltas.get(version)
            return None if delta is None else Content(memoryview(delta), nullcontext)
        served = self._served(version)
        data = served.read(int(name)) if served is not None and _is_number(name) else None
        return None if served is None or data is None else Content(data, served.being_read)

    def _served(self, version: WeightVersion) -> ServedVersion | None:
        return self._versions.get(version) or self._lasting.get(version)

    def close(self) -> None:
        """Stop serving and join all threads, without waiting for clients. Idempotent."""
        self._connections.close()
        self._versions, self._deltas, self._lasting = {}, {}, {}


def _is_number(part: str) -> bool:
    return part.isdecimal() and len(part) < 19
