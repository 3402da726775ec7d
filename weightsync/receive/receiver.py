"""A worker's side of broadcasts: join an epoch, receive a version, verify, acknowledge.

These calls block and run in threads. The engine goes on with its old weights meanwhile, unless the new ones are passed
on to it as they arrive.
"""

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator

import torch
from msgspec.structs import replace

from headway.broker.errors import BrokerError, WeightSyncError
from headway.broker.schema import WeightVersion
from headway.broker.schema.weights import BroadcastGroup, TensorSpec, WeightManifest
from headway.broker.user_code.roots import ImportRoots
from headway.weightsync.deadline import Deadline
from headway.weightsync.tensors.buckets import Fingerprints, check_offer, compare
from headway.weightsync.tensors.landing import Landed, Landing, Window
from headway.weightsync.transports.addresses import address_towards
from headway.weightsync.transports.base import BroadcastGroupTransport
from headway.weightsync.transports.forming import form_group
from headway.weightsync.transports.pipeline import empty_seal, pipelined, unsealed
from headway.weightsync.transports.rendezvous import Board, Rendezvous, translated

from .deliveries import Arriving

WAVE_OVERDUE_S = 2.0
"""Seconds after a wave's deadline that the learner may take to give it up and begin with the next one."""


class JoinedGroup:
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
        self, offer: WeightManifest, landing: Landing, cancelled: threading.Event
    ) -> tuple[WeightManifest, Landed]:
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
        self, offer: WeightManifest, window: Window, arriving: Arriving, cancelled: threading.Event
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
    board: Board,
    worker: str,
    group: BroadcastGroup,
    cancelled: threading.Event,
    roots: ImportRoots | None = None,
) -> JoinedGroup | None:
    """Check in and, if all other members do, form the group. Returns None where this worker may not join it any more.

    Raises WeightSyncError where the learner or another member does not come, or the broker does not answer.
    """
    deadline = Deadline(group.timeout_s, cancelled)
    rendezvous = Rendezvous(board, group, worker)
    with translated(f"joining broadcast group {group.epoch}"):
        if not rendezvous.check_in() or not rendezvous.await_verdict(deadline):
            return None
    wave, place = divmod(group.members.index(worker), group.at_once)
    size = len(group.members[wave * group.at_once :][: group.at_once]) + 1
    store, interface = rendezvous.store_of(wave), address_towards(group.learner)
    transport = form_group(group.transport, store, place + 1, size, interface, deadline, roots)
    return JoinedGroup(group, worker, rendezvous, transport)
