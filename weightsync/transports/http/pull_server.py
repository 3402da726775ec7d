"""The learner's end of pulls: serves staged buckets and deltas over HTTP, see `pull.py`."""

from collections.abc import Mapping
from contextlib import nullcontext

import torch

from headway.broker.schema import WeightVersion
from headway.weightsync.transports.listening import Ports, is_loopback, listen

from .certificate import new_identity
from .requests import Found, Requests
from .served import ServedVersion
from .visits import Visits

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
        self._requests = Requests(token, timeout_s, lambda path: self.is_ready(path), lambda path: self.find(path))
        self._visits = Visits(listener, _THREADS, self._requests.visit, context)

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

    def find(self, path: str) -> Found | None:
        """Return the bucket or delta that `path` names, or None where it is not served any more."""
        match path.split("/"):
            case ["", incarnation, step, name] if _is_number(incarnation) and _is_number(step):
                return self._find(WeightVersion(int(incarnation), int(step)), name)
        return None

    def _find(self, version: WeightVersion, name: str) -> Found | None:
        if name == DELTA:
            delta = self._deltas.get(version)
            return None if delta is None else Found(memoryview(delta), nullcontext)
        served = self._served(version)
        data = served.read(int(name)) if served is not None and _is_number(name) else None
        return None if served is None or data is None else Found(data, served.being_read)

    def _served(self, version: WeightVersion) -> ServedVersion | None:
        return self._versions.get(version) or self._lasting.get(version)

    def close(self) -> None:
        """Stop serving and join all threads, without waiting for clients. Idempotent."""
        self._visits.close()
        self._versions, self._deltas, self._lasting = {}, {}, {}


def _is_number(part: str) -> bool:
    return part.isdecimal() and len(part) < 19
