"""A worker's side of broadcasts: join an epoch, receive a version, verify, acknowledge.

`GroupFollower` keeps a worker in the groups that name it. All other calls block and run in threads. The engine goes on
with its old weights meanwhile, unless the new ones are passed on to it as they arrive.
"""

import asyncio
import contextlib
import itertools
import logging
import threading
from collections.abc import Callable, Iterable, Iterator

import torch
from msgspec.structs import replace

from headway.broker import Broker
from headway.broker.errors import BrokerError, WeightSyncError
from headway.broker.schema import WeightVersion
from headway.broker.schema.weights import BroadcastGroup, TensorSpec, WeightManifest
from headway.broker.user_code.import_paths import ImportRoots

from .deliveries import BufferPool, BufferSet, DoubleBuffer, StreamedDelivery
from .limits import Deadline
from .tensors.buckets import Fingerprints, check_offer, compare
from .transports.addresses import address_towards
from .transports.base import BroadcastGroupTransport
from .transports.broadcast import empty_seal, form_group, pipelined, unsealed
from .transports.rendezvous import BlockingStore, Rendezvous, translated
from .transports.threads import BoundedThreads, for_threads

WAVE_OVERDUE_S = 2.0
"""Seconds after a wave's deadline that the learner may take to give it up and begin with the next one."""


class GroupMembership:
    """This worker's place in one epoch."""

    def __init__(
        self, group: BroadcastGroup, worker: str, rendezvous: Rendezvous, transport: BroadcastGroupTransport
    ) -> None:
        self.group = group
        self._rendezvous = rendezvous
        self._transport = transport
        self._checked: tuple[TensorSpec, ...] | None = None
        """The tensors of the last offer. The next offer mostly has the same ones, which need not be checked again."""
        self._is_left = False
        self._waiting: threading.Event | None = None
        """Set to end the wait for this worker's wave."""
        self._wave = group.members.index(worker) // group.at_once
        self._earlier_waves_s = self._wave * (group.timeout_s + WAVE_OVERDUE_S)
        """Seconds that the earlier waves may take."""

    @property
    def longest_s(self) -> float:
        """Return how long receiving may take, with all earlier waves."""
        return self._earlier_waves_s + self.group.timeout_s

    def receive(
        self, offer: WeightManifest, landing: BufferPool, cancelled: threading.Event
    ) -> tuple[WeightManifest, BufferSet]:
        """Receive all of an offered version and verify it. Returns its manifest, with fingerprints, and its memory.
        Tells the learner the outcome; on failure raises WeightSyncError, too."""
        with self._answering(offer):
            with self._leaving_if_it_fails():
                self._await_wave(offer, cancelled)
                deadline = Deadline(self.group.timeout_s, cancelled)
                landed = landing.take(offer.buckets)
            try:
                return self._receive_into(landed.buckets, landed.device, offer, _leave_it, deadline), landed
            except WeightSyncError:
                landing.give_back(landed)
                raise

    def pass_on(
        self, offer: WeightManifest, window: DoubleBuffer, arriving: StreamedDelivery, cancelled: threading.Event
    ) -> WeightManifest:
        """Receive an offered version as `receive` does, but give each bucket to `arriving` and then overwrite it. The
        worker acknowledges the version once its engine generates with it, so that the next wave pauses only then."""
        with self._answering(offer):
            with self._leaving_if_it_fails():
                self._await_wave(offer, cancelled)
            deadline = Deadline(self.group.timeout_s, cancelled)

            def give(index: int, bucket: torch.Tensor) -> None:
                arriving.give(window.tensors(offer.tensors, index, bucket), deadline)

            manifest = self._receive_into(window.buckets(offer.buckets), window.device, offer, give, deadline)
            arriving.finish(manifest, deadline)
            return manifest

    def close(self) -> None:
        """Leave the epoch, and end a wait for this worker's wave."""
        self._is_left = True
        if self._waiting is not None:
            self._waiting.set()
        self._transport.close()

    @contextlib.contextmanager
    def _answering(self, offer: WeightManifest) -> Iterator[None]:
        """Wrap the receipt of an offered version: tells the learner that this worker holds it, or what went wrong."""
        try:
            if offer.tensors is not self._checked:
                check_offer(offer)
                self._checked = offer.tensors
            yield
        except WeightSyncError as error:
            self._acknowledge(offer.version, str(error))
            raise
        self._acknowledge(offer.version, "")

    @contextlib.contextmanager
    def _leaving_if_it_fails(self) -> Iterator[None]:
        """Wrap all that the other members' transfers need of this worker: if it fails, the worker leaves the group, as
        members that send to it, or through it, would otherwise wait until their deadline."""
        try:
            yield
        except WeightSyncError:
            self._transport.close()
            raise

    def _await_wave(self, offer: WeightManifest, cancelled: threading.Event) -> None:
        if not self._wave:
            return
        self._waiting = cancelled
        if self._is_left:  # another thread has closed the group before `_waiting` was set
            raise WeightSyncError(f"broadcast group {self.group.epoch} was left")
        with translated(f"its turn to receive version {offer.version}"):
            self._rendezvous.await_wave(offer.version, self._wave, Deadline(self._earlier_waves_s, cancelled))

    def _receive_into(
        self,
        buckets: Iterable[torch.Tensor],
        device: torch.device,
        offer: WeightManifest,
        give: Callable[[int, torch.Tensor], None],
        deadline: Deadline,
    ) -> WeightManifest:
        sealed = empty_seal(len(offer.tensors), device)
        found = Fingerprints(offer.tensors)
        with self._leaving_if_it_fails():
            for index, bucket in enumerate(pipelined(self._transport, itertools.chain(buckets, (sealed,)), deadline)):
                if bucket is not sealed:
                    found.add(index, bucket)
                    give(index, bucket)
        # Verified only now: a member that stopped at a damaged bucket would keep the others from the rest.
        manifest = replace(offer, fingerprints=unsealed(offer.version, sealed))
        compare(manifest, found.read())
        return manifest

    def _acknowledge(self, version: WeightVersion, failure: str) -> None:
        # Without an answer, as the broker is away, the learner counts this worker as lost; the bytes are good all the
        # same.
        with contextlib.suppress(BrokerError):
            self._rendezvous.acknowledge(version, failure)


def _leave_it(index: int, bucket: torch.Tensor) -> None:
    """Do nothing with a bucket: the whole version is handed over at the end."""


def join(
    blocking_store: BlockingStore,
    worker: str,
    group: BroadcastGroup,
    cancelled: threading.Event,
    roots: ImportRoots | None = None,
) -> GroupMembership | None:
    """Check in and, if all other members do, form the group. Returns None where this worker may not join it any more.

    Raises WeightSyncError where the learner or another member does not come, or the broker does not answer.
    """
    deadline = Deadline(group.timeout_s, cancelled)
    rendezvous = Rendezvous(blocking_store, group, worker)
    with translated(f"joining broadcast group {group.epoch}"):
        if not rendezvous.check_in() or not rendezvous.await_verdict(deadline):
            return None
    wave, place = divmod(group.members.index(worker), group.at_once)
    size = len(group.members[wave * group.at_once :][: group.at_once]) + 1
    store, interface = rendezvous.store_of(wave), address_towards(group.learner)
    transport = form_group(group.transport, store, place + 1, size, interface, deadline, roots)
    return GroupMembership(group, worker, rendezvous, transport)


logger = logging.getLogger(__name__)


class GroupFollower:
    """Keeps a worker in the broadcast groups that name it, one epoch at a time. It tries to join the group of each
    record once: a record that a dead learner left, or that was closed without this worker, is not tried again."""

    def __init__(self, broker: Broker, worker: str, threads: BoundedThreads, roots: ImportRoots | None = None) -> None:
        self._roots = roots
        self._broker = broker
        self._worker = worker
        self._threads = threads
        self._read: bytes | None = None
        """Names the group that was read last: see `broker.client.weights.VersionsPeek`."""
        self._seen: BroadcastGroup | None = None
        """The newest group of the run, whether it names this worker or not."""
        self._joined: GroupMembership | None = None
        self._join_task: asyncio.Task[None] | None = None

    @property
    def epoch(self) -> int:
        """The joined epoch, 0 if none."""
        return 0 if self._joined is None else self._joined.group.epoch

    async def refresh(self, name: bytes | None) -> None:
        """Read the run's group where `name` is not that of the group read last, and begin to join it. Raises the
        broker's errors; a joined group then stays joined."""
        if name is None or name == self._read:
            return
        group = await self._broker.versions.group()
        self._read = name
        if group is not None and group != self._seen:
            self.leave()
            self._seen = group
            if self._worker in group.members:
                self._join_task = asyncio.create_task(self._join(group))

    async def joined_for(self, manifest: WeightManifest) -> GroupMembership | None:
        """Return the group to which `manifest` is broadcast, once formed, or None if this worker is not in it.

        The learner makes an offer only after all members have checked in, so a member has seen its group by now, though
        it may still be connecting to the others.
        """
        group = self._seen
        if group is None or (group.incarnation, group.epoch) != (
            manifest.version.incarnation,
            manifest.group_epoch,
        ):
            return None
        if self._join_task is not None:
            await asyncio.wait({self._join_task})
        return self._joined if self._joined is not None and self._joined.group == group else None

    def leave(self) -> None:
        """Leave the current epoch, and give up a join that is under way."""
        if self._join_task is not None:
            self._join_task.cancel()
            self._join_task = None
        if self._joined is not None:
            self._joined.close()
            self._joined = None

    async def _join(self, group: BroadcastGroup) -> None:
        cancelled = threading.Event()
        blocking_store = BlockingStore(for_threads(asyncio.get_running_loop()), self._broker.rendezvous)
        try:
            self._joined = await self._threads.run(
                "join",
                lambda: join(blocking_store, self._worker, group, cancelled, self._roots),
                cancelled,
                overdue_s=2 * group.timeout_s + 1,
            )
        except WeightSyncError as error:
            logger.warning("%s stays out of broadcast group %d: %s", self._worker, group.epoch, error)
