"""The learner's end of pull: serves staged buckets and deltas over HTTP, see `pull.py`."""

from collections.abc import Mapping
from contextlib import nullcontext

import torch

from broker.schema import WeightVersion
from weightsync.transports.listening import Ports, is_loopback, listen

from .certificate import new_identity
from .requests import Found, Requests
from .served import ServedVersion
from .visits import Visits

DELTA = "delta"
OLDER = 2
"""Versions that are kept for those in the middle of them: one that a slow line reads keeps nobody else out."""
_THREADS = 4
"""As many as a worker has connections: what costs time, encrypting and copying, does not hold the interpreter."""


class PullServer:
    """Serves the newest version's buckets, on a CPU or a GPU, and deltas, in a few threads of its own.

    An older version is served as long as somebody is in the middle of it: steps may be shorter than it takes to fetch
    a version, and who starts over with each would never get one. There are at most `OLDER` of them.
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
        """`tls`: with a certificate that is made now; None: unless only this machine can connect.
        `memory_is_reused`: the next version's buckets lie where those of the newest do.

        Raises WeightSyncError where it cannot listen at `address` and one of `ports`.
        """
        self._memory_is_reused = memory_is_reused
        self._versions: dict[WeightVersion, ServedVersion] = {}
        self._deltas: dict[WeightVersion, bytes] = {}
        listener = listen(address, ports)
        is_encrypted = not is_loopback(listener) if tls is None else tls
        context, self.certificate = new_identity() if is_encrypted else (None, "")
        host = f"[{address}]" if ":" in address else address
        self.url = f"{'https' if is_encrypted else 'http'}://{host}:{listener.getsockname()[1]}"
        # The methods are looked up anew for every request.
        self._requests = Requests(token, timeout_s, lambda path: self.is_ready(path), lambda path: self.find(path))
        self._visits = Visits(listener, _THREADS, self._requests.visit, context)

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

    def is_ready(self, path: str) -> bool:
        """`find` need not wait until what `path` names is copied; that is begun."""
        match path.split("/"):
            case ["", incarnation, step, name] if all(map(_is_number, (incarnation, step, name))):
                served = self._versions.get(WeightVersion(int(incarnation), int(step)))
                return served is None or served.is_ready(int(name))
        return True

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

    def close(self) -> None:
        """Stop serving and join all threads; waits for no client. Idempotent."""
        self._visits.close()
        self._versions, self._deltas = {}, {}


def _is_number(part: str) -> bool:
    return part.isdecimal() and len(part) < 19
