"""A worker's side of broadcasts: join an epoch, receive a version, verify, acknowledge.

These calls block and run in threads; the engine goes on with its old weights meanwhile, unless the new ones are passed
on to it as they come.
"""

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator

import torch
from msgspec.structs import replace

from broker.errors import BrokerError, WeightSyncError
from broker.schema import BroadcastGroup, TensorSpec, WeightManifest, WeightVersion
from broker.user_code.roots import ImportRoots
from weightsync.deadline import Deadline
from weightsync.tensors.buckets import Fingerprints, check_offer, compare
from weightsync.tensors.landing import Landed, Landing, Window
from weightsync.transports.addresses import address_towards
from weightsync.transports.base import BroadcastGroupTransport
from weightsync.transports.forming import form_group
from weightsync.transports.pipeline import empty_seal, pipelined, unsealed
from weightsync.transports.rendezvous import Board, Rendezvous, translated

from .deliveries import Arriving

WAVE_OVERDUE_S = 2.0
"""Beyond its deadline, for the learner to give up a wave and begin with the next."""


class JoinedGroup:
    """This worker's place in one epoch."""

    def __init__(
        self, group: BroadcastGroup, worker: str, rendezvous: Rendezvous, transport: BroadcastGroupTransport
    ) -> None:
        self.group = group
        self._worker = worker
        self._rendezvous = rendezvous
        self._transport = transport
        self._checked: tuple[TensorSpec, ...] | None = None
        """The tensors of the last offer, which those of the next one mostly are: they need not be checked again."""
        self._is_left = False
        self._waiting: threading.Event | None = None
        """Ends the wait for a turn."""
        self._wave = group.members.index(worker) // group.at_once
        self._earlier_waves_s = self._wave * (group.timeout_s + WAVE_OVERDUE_S)
        """How long those that receive before this worker may take."""

    @property
    def longest_s(self) -> float:
        """What receiving may take, earlier waves included."""
        return self._earlier_waves_s + self.group.timeout_s

    def receive(
        self, offer: WeightManifest, landing: Landing, cancelled: threading.Event
    ) -> tuple[WeightManifest, Landed]:
        """All of an offered version, verified, and what is known of it now; tells the learner how it went, or raises
        too."""
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
        """As `receive`, but each bucket is given to `arriving` and then overwritten. It is acknowledged once the engine
        generates with it, so that the next ones are paused only then."""
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
        """Leave the epoch; who waits for a turn in it waits no more."""
        self._is_left = True
        if self._waiting is not None:
            self._waiting.set()
        self._transport.close()

    @contextlib.contextmanager
    def _answering(self, offer: WeightManifest) -> Iterator[None]:
        """Around receiving an offered version: tells the learner that it is held, or what went wrong."""
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
        """Around all that the others' transfers need of us: those who send through us, or to us, would wait for their
        deadline otherwise."""
        try:
            yield
        except WeightSyncError:
            self._transport.close()
            raise

    def _await_wave(self, offer: WeightManifest, cancelled: threading.Event) -> None:
        if not self._wave:
            return
        self._waiting = cancelled
        if self._is_left:  # by another thread, which has not seen that we wait
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
        # Only now: a member that stops at a damaged bucket would keep the others from the rest.
        manifest = replace(offer, fingerprints=unsealed(offer.version, sealed))
        compare(manifest, found.read())
        return manifest

    def _acknowledge(self, version: WeightVersion, failure: str) -> None:
        # Where the broker is away the learner takes it for lost, and the bytes are as good without an answer.
        with contextlib.suppress(BrokerError):
            self._rendezvous.acknowledge(version, self._worker, failure)


def _leave_it(index: int, bucket: torch.Tensor) -> None:
    """For buckets that stay as they are, until the whole version is handed over."""


def join(
    board: Board,
    worker: str,
    group: BroadcastGroup,
    cancelled: threading.Event,
    roots: ImportRoots | None = None,
) -> JoinedGroup | None:
    """Check in and, if everybody else does, form the group. None where it is not ours to join any more.

    Raises WeightSyncError where the learner, or another member, does not come, or the broker does not answer.
    """
    deadline = Deadline(group.timeout_s, cancelled)
    rendezvous = Rendezvous(board, group, leads=False)
    with translated(f"joining broadcast group {group.epoch}"):
        if not rendezvous.check_in(worker) or not rendezvous.await_verdict(deadline):
            return None
    wave, place = divmod(group.members.index(worker), group.at_once)
    size = len(group.members[wave * group.at_once :][: group.at_once]) + 1
    store, interface = rendezvous.store_of(wave), address_towards(group.learner)
    transport = form_group(group.transport, store, place + 1, size, interface, deadline, roots)
    return JoinedGroup(group, worker, rendezvous, transport)
