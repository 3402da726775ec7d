"""The learner's end of pulls: serves staged buckets and deltas over HTTP, see `client.py`, and keeps older versions for
a while."""

import logging
import math
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext

import torch

from headway.broker.schema import WeightVersion
from headway.weightsync.tensors.buckets import as_bytes
from headway.weightsync.transports.addresses import Ports, is_loopback, listen

from .certificate import new_identity
from .connections import ConnectionPool, Content, Responder

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
