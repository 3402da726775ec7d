"""A worker's side of broadcasts: join an epoch, receive a version into fresh buffers, verify, acknowledge.

These calls block and run in threads; the engine goes on with its old weights meanwhile.
"""

import contextlib
import threading

from broker.errors import WeightSyncError
from broker.schema import BroadcastGroup, WeightManifest, WeightVersion

from .buckets import check_manifest, verify
from .deadline import Deadline
from .landing import Landed, Landing
from .transports.base import BroadcastGroupTransport
from .transports.collective import local_address
from .transports.forming import form_group
from .transports.rendezvous import Rendezvous, connect_store, translated


class JoinedGroup:
    """This worker's place in one epoch."""

    def __init__(
        self, group: BroadcastGroup, worker: str, rendezvous: Rendezvous, transport: BroadcastGroupTransport
    ) -> None:
        self.group = group
        self._worker = worker
        self._rendezvous = rendezvous
        self._transport = transport

    def receive(self, manifest: WeightManifest, landing: Landing, cancelled: threading.Event) -> Landed:
        """All of an offered version, verified; tells the learner how it went, or raises too."""
        try:
            landed = self._receive(manifest, landing, Deadline(self.group.timeout_s, cancelled))
        except WeightSyncError as error:
            self._acknowledge(manifest.version, str(error))
            raise
        self._acknowledge(manifest.version, "")
        return landed

    def close(self) -> None:
        """Leave the epoch."""
        self._transport.close()

    def _receive(self, manifest: WeightManifest, landing: Landing, deadline: Deadline) -> Landed:
        check_manifest(manifest)
        landed = landing.take(manifest.buckets)
        try:
            self._receive_into(landed, manifest, deadline)
        except WeightSyncError:
            landing.give_back(landed)
            raise
        return landed

    def _receive_into(self, landed: Landed, manifest: WeightManifest, deadline: Deadline) -> None:
        for bucket in landed.buckets:
            self._transport.broadcast(bucket, deadline)
        # Only now: a member that stops at a damaged bucket would keep the others from the rest.
        verify(manifest, dict(enumerate(landed.buckets)))

    def _acknowledge(self, version: WeightVersion, failure: str) -> None:
        # A learner that died since needs no answer, and the bytes are as good without it.
        with contextlib.suppress(RuntimeError):
            self._rendezvous.acknowledge(version, self._worker, failure)


def join(run: str, worker: str, group: BroadcastGroup, cancelled: threading.Event) -> JoinedGroup | None:
    """Check in and, if everybody else does, form the group. None where it is not ours to join any more.

    Raises WeightSyncError where the learner that started the epoch is gone.
    """
    deadline = Deadline(group.timeout_s, cancelled)
    what = f"joining broadcast group {group.epoch}"
    try:
        # A store client retries a dead address until its timeout; a plain connection is refused at once.
        interface = local_address(group.store_host, group.store_port, group.timeout_s)
        rendezvous = Rendezvous(connect_store(group, deadline.remaining()), run, group)
        if not rendezvous.check_in(worker) or not rendezvous.await_verdict(deadline):
            return None
    except OSError as error:
        raise WeightSyncError(f"{what}: nobody at {group.store_host}:{group.store_port} ({error})") from error
    except RuntimeError as error:
        raise translated(error, what) from error
    rank, size = group.members.index(worker) + 1, len(group.members) + 1
    transport = form_group(group.transport, rendezvous.store, rank, size, interface, deadline)
    return JoinedGroup(group, worker, rendezvous, transport)
