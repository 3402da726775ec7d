"""A worker's end: learns of new versions and hands over complete, verified ones, each newer than the last.

Receiving never waits for the engine: it happens in the background into other buffers, so a slow swap costs this worker
the versions in between, and other workers nothing. Where there is no room for a second version (`staging: none`), a
broadcast is handed over as it arrives, and a pulled version comes whole, through host memory.

The inbox holds the version that waits for the engine, the one that the engine has taken, and the memory of both:

    put ─► waiting ─► take ─► lent ─► hold ─► kept ─► take_kept and put, if the engine has lost it
                                                 └──► drop_kept: another version comes, into its memory
"""

import asyncio
import logging
import math
import threading
import traceback
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import torch
from msgspec.structs import replace

from headway.broker import Broker
from headway.broker.client.weights import VersionsPeek
from headway.broker.errors import BrokerError, BrokerUnavailableError, WeightSyncError
from headway.broker.schema import WeightVersion
from headway.broker.schema.weights import WeightManifest
from headway.broker.user_code.import_paths import ImportRoots

from .config import WeightsConfig
from .deliveries import BufferPool, BufferSet, Delivery, DoubleBuffer, StreamedDelivery, attachable_buckets
from .limits import Deadline, RateLimiter
from .puller import BackgroundPuller, Puller
from .receiver import GroupFollower, GroupMembership
from .tensors.buckets import allocate, check_manifest
from .tensors.staging import BASE, manifest_of_base
from .transports.base import abilities_of, broadcast_device
from .transports.http_pull import HttpPull
from .transports.threads import BoundedThreads
from .weights_from_files import base_in_files, files_first, verify_base

T = TypeVar("T")
logger = logging.getLogger(__name__)
_AFTER_OUTAGE_S = 0.05
"""Seconds until the broker is asked again; a call that fails has been repeated for seconds."""
_OVERDUE_S = 1.0
_STOP_SHARE = 0.25
"""The share of a broadcast's deadline that a stopped pull has to give its memory back, while the group waits."""


class Subscriber:
    """Hands over versions in the broker's event loop, in which it is made and works from the first `wait_for_version`
    until `close`."""

    def __init__(
        self,
        broker: Broker,
        worker: str,
        config: WeightsConfig,
        roots: ImportRoots | None = None,
        model: Path | None = None,
    ) -> None:
        """`roots`: modules below which a transport of the user's own may be imported; by default those of
        ImportRoots. `model`: a directory from which the first version, or the base of adapters, is read if it holds
        that, see `weights_from_files`."""
        roots = roots or ImportRoots()
        self._broker = broker
        self._config = config
        self._model = model
        self._threads = BoundedThreads()
        self._groups = GroupFollower(broker, worker, self._threads, roots)
        self.joins_groups = config.joins_groups
        """False: the worker follows by pull, and keeps the pulled version as the base for deltas."""
        self._worker = worker
        self._following: asyncio.Task[None] | None = None
        self._last_offer: WeightVersion | None = None
        """The last offer that was read in full; one whose transfer failed is not received again but pulled."""
        self._landing = BufferPool(torch.device("cuda" if config.staging == "device" else "cpu"))
        device = broadcast_device(config, abilities_of(config.transport, roots if self.joins_groups else None))
        self._window = DoubleBuffer(torch.device(device)) if config.staging == "none" else None
        # A base for deltas must not be overwritten, and without room for two versions a pulled one must not be kept.
        shared = self._landing if self.joins_groups and self._window is None else None
        self._background_puller = BackgroundPuller(
            broker, worker, config, shared, self._note_arrival, self._note_failure, model
        )
        self._inbox = Inbox(self._landing)
        self._last_manifest: WeightManifest | None = None
        """The manifest of the last version that arrived. Most offers name that version instead of repeating its
        tensors."""
        self._arrived = asyncio.Event()
        """Set when `wait_for_version` has something to return or raise: a version in the inbox, or `_outage`."""
        self._outage: BrokerUnavailableError | None = None
        """The error that keeps the background work from the broker."""
        self._is_notified = asyncio.Event()
        """Set by a notification: there is news, so poll before `poll_s` is over."""
        self._peeked = VersionsPeek(None, None, None)
        """The learner's records at the last poll."""
        self._has_polled = asyncio.Event()
        self.last_error = ""
        """Why the last broadcast or pull failed, or fetched a whole version instead of deltas; "" again after the next
        version."""

    @property
    def epoch(self) -> int:
        """The epoch of the broadcast group that this worker has joined, 0 if none."""
        return self._groups.epoch

    @property
    def is_arriving(self) -> bool:
        """Whether a version that is being received waits to be taken, so that the rest of the broadcast group waits."""
        return self._inbox.is_arriving

    async def wait_for_version(self, current: WeightVersion | None) -> Delivery | StreamedDelivery:
        """Return the newest complete version after `current`, or one that is arriving. Cancelling it loses nothing. One
        caller at a time.

        If a version that was handed over is not `current` in the next call, its swap has failed, and it is fetched
        anew. Raises the broker's errors; failed transfers are retried or pulled and never raise.
        """
        self._inbox.hold(current)
        while (delivery := self._inbox.take()) is None:
            await self._news()
        return delivery

    def newer(self) -> Delivery | StreamedDelivery | None:
        """Return a newer version that has arrived since the last one was handed over, in exchange for it, or None."""
        return self._inbox.take_instead()

    async def base(
        self, known: tuple[int, ...], *, attachable: bool = False, from_files: bool = True
    ) -> Delivery | None:
        """Return the frozen weights that announced adapters change; None if their fingerprints are the `known` ones.
        `from_files`: as they lie in the model's files, unverified, if those have such tensors; otherwise they are
        pulled. `attachable`: into memory that processes of this machine can attach, if there is room.

        Raises the broker's errors; failed pulls are tried again, into the same memory, and never raise."""
        landing: tuple[torch.Tensor, ...] = ()
        while True:
            announced = await self._broker.versions.announced()
            if announced is not None and announced.base is not None:
                if announced.base.fingerprints == known:
                    return None
                manifest = manifest_of_base(announced)
                try:
                    check_manifest(manifest)
                    if from_files and self._model is not None and not manifest.digests:
                        from_files = False
                        if (found := await self._in_files(self._model, manifest)) is not None:
                            return found
                    if [len(bucket) for bucket in landing] != list(manifest.buckets):
                        landing = ()  # freed before more is taken
                        landing = await self._reserved(manifest.buckets, attachable)
                    return await self._pull_base(manifest, landing)
                except WeightSyncError as error:
                    self._note_failure("pull", BASE, error)
                    traceback.clear_frames(error.__traceback__)  # they would hold the memory until garbage is collected
            await asyncio.sleep(self._config.poll_s)

    async def verify(self, base: Delivery) -> None:
        """Raise WeightSyncError unless a base in the model's files is what was published."""
        await self._in_thread("verify-base", lambda deadline: verify_base(base, deadline))

    async def _in_files(self, model: Path, manifest: WeightManifest) -> Delivery | None:
        return await self._in_thread("read-base", lambda deadline: base_in_files(model, manifest, deadline))

    async def _reserved(self, sizes: tuple[int, ...], attachable: bool) -> tuple[torch.Tensor, ...]:
        return await self._in_thread("reserve", lambda _: (attachable_buckets if attachable else allocate)(sizes))

    async def _pull_base(self, manifest: WeightManifest, landing: tuple[torch.Tensor, ...]) -> Delivery:
        learner = HttpPull(self._config.broadcast_timeout_s, RateLimiter(self._config.pull_bytes_per_s))
        puller = Puller(files_first(self._model, learner), keeps_base=False)
        pulled = await self._in_thread("pull-base", lambda deadline: puller.pull(manifest, deadline, landing))
        return Delivery(manifest, BufferSet(pulled.buckets), may_be_reused=False)

    async def _in_thread(self, name: str, work: Callable[[Deadline], T]) -> T:
        """Return the result of `work`, whose deadline is over once the caller stops waiting."""
        cancelled = threading.Event()
        deadline = Deadline(math.inf, cancelled)
        return await self._threads.run(name, lambda: work(deadline), cancelled, overdue_s=None)

    async def close(self) -> None:
        """Leave the group and stop. A transfer under way ends by its deadline at the latest. Idempotent."""
        if self._following is not None:
            self._following.cancel()
            await asyncio.gather(self._following, return_exceptions=True)
        self._groups.leave()
        patience_s = self._config.broadcast_timeout_s + _OVERDUE_S
        await asyncio.gather(self._background_puller.stop(patience_s), self._threads.stop(patience_s))
        self._inbox = Inbox(self._landing)  # a reference to this subscriber keeps no version's memory

    async def _news(self) -> None:
        """Wait until a version has arrived. Raises the error that keeps the background work from the broker, or that
        ended it; the next call starts ended work anew."""
        self._arrived.clear()
        self._outage = None
        self._is_notified.set()  # the engine may have failed to take what the last poll found
        if self._following is None:
            self._following = asyncio.create_task(self._follow())
        arrival = asyncio.create_task(self._arrived.wait())
        try:
            await asyncio.wait({arrival, self._following}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            arrival.cancel()
        if self._following.done():
            ended, self._following = self._following, None
            ended.result()
        if self._outage is not None:
            raise self._outage

    async def _follow(self) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._await_notifications())
                for follow in (self._poll, self._follow_versions):
                    tasks.create_task(self._outlive_outages(follow))
        except ExceptionGroup as group:
            raise group.exceptions[0] from None

    async def _outlive_outages(self, follow: Callable[[], Awaitable[None]]) -> None:
        """Run `follow` again and again while the broker is away. A broadcast's bytes do not come through the broker, so
        receiving must go on: the group would wait for this worker, also while the caller is busy with its engine."""
        while True:
            try:
                await follow()
            except BrokerUnavailableError as error:
                self._outage = error
                self._arrived.set()
                await asyncio.sleep(_AFTER_OUTAGE_S)

    async def _await_notifications(self) -> None:
        """Poll at every notification. A worker that misses one, as the broker is away or busy, finds the news when it
        polls next."""
        seen = b"0"
        while True:
            try:
                newest = await self._broker.rendezvous.wait_for_notification(seen)
            except BrokerError:
                await asyncio.sleep(_AFTER_OUTAGE_S)
                continue
            if newest != seen:
                seen = newest
                self._is_notified.set()

    async def _poll(self) -> None:
        """Poll for versions and groups, also while a version is received: the learner may begin a group meanwhile."""
        while True:
            self._is_notified.clear()
            self._peeked = await self._broker.versions.peek()
            if self.joins_groups:
                await self._groups.refresh(self._peeked.group)
            self._has_polled.set()
            with suppress(TimeoutError):
                async with asyncio.timeout(self._config.poll_s):
                    await self._is_notified.wait()

    async def _follow_versions(self) -> None:
        while True:
            await self._has_polled.wait()
            self._has_polled.clear()
            offered, announced, _ = self._peeked
            # Once a version is announced its broadcast is over, and a worker that missed it pulls.
            is_under_way = self.joins_groups and offered is not None and offered != announced
            if offered is not None and is_under_way and offered != self._last_offer and self._inbox.is_newer(offered):
                await self._receive(offered)
            elif announced is not None and self._inbox.is_newer(announced):
                self._fetch(announced)

    def _fetch(self, announced: WeightVersion) -> None:
        if (kept := self._inbox.take_kept(announced)) is not None:
            self._note_arrival(kept)
        else:
            self._inbox.drop_kept()
            self._background_puller.start()

    async def _receive(self, offered: WeightVersion) -> None:
        joined, offer = await self._invitation(offered)
        self._last_offer = offered  # not before: if the broker did not answer, it is asked again
        if joined is None or offer is None:
            return
        # The version being pulled and the waiting one are about to be superseded, and beside the engine's version and
        # the one that is received there is no room for a third.
        await self._background_puller.stop(_STOP_SHARE * joined.group.timeout_s)
        self._inbox.drop_waiting()
        self._inbox.drop_kept()
        cancelled = threading.Event()
        try:
            if self._window is not None:
                await self._pass_on(joined, offer, self._window, cancelled)
            else:
                manifest, landed = await self._threads.run(
                    "receive",
                    lambda: joined.receive(offer, self._landing, cancelled),
                    cancelled,
                    overdue_s=joined.longest_s + _OVERDUE_S,
                )
                self._note_arrival(Delivery(manifest, landed, may_be_reused=True))
        except WeightSyncError as error:
            self._note_failure("broadcast", offered, error)

    async def _pass_on(
        self, joined: GroupMembership, offer: WeightManifest, window: DoubleBuffer, cancelled: threading.Event
    ) -> None:
        arriving = StreamedDelivery(offer, self._note_arrival)
        end = WeightSyncError(f"version {offer.version} is received no further")
        try:
            self._last_manifest = await self._threads.run(
                "receive",
                lambda: joined.pass_on(offer, window, arriving, cancelled),
                cancelled,
                overdue_s=joined.longest_s + _OVERDUE_S,
            )
            self.last_error = ""
        except WeightSyncError as error:
            end = error
            raise
        finally:
            arriving.fail(end)  # no effect if all parts were taken
            self._inbox.forget(arriving)

    async def _invitation(self, offered: WeightVersion) -> tuple[GroupMembership | None, WeightManifest | None]:
        """Return the group in which this worker receives the offered version, and the version's manifest."""
        offer = await self._broker.versions.offered()
        if offer is None or offer.version != offered or not offer.group_epoch:
            return None, None
        return await self._groups.joined_for(offer), await self._in_full(offer)

    async def _in_full(self, offer: WeightManifest) -> WeightManifest | None:
        """Return the offer with the tensors of the version that it names; None where the worker does not know that
        one."""
        if offer.like is None:
            return offer
        if self._last_manifest is None or self._last_manifest.version != offer.like:
            self._last_manifest = await self._broker.versions.announced()
        if self._last_manifest is None or self._last_manifest.version != offer.like:
            return None
        return replace(offer, tensors=self._last_manifest.tensors, buckets=self._last_manifest.buckets, like=None)

    def _note_arrival(self, delivery: Delivery | StreamedDelivery) -> None:
        if self._inbox.put(delivery):
            if isinstance(delivery, Delivery):
                self._last_manifest = delivery.manifest
                self.last_error = ""
            self._arrived.set()

    def _note_failure(self, what: str, version: WeightVersion, error: WeightSyncError | str) -> None:
        self.last_error = f"{what} of {version}: {error}"
        logger.warning("%s: %s", self._worker, self.last_error)


class Inbox:
    """The versions of one engine. Each version that is taken is newer than all before it, unless `hold` has said that
    the engine lost those."""

    def __init__(self, landing: BufferPool) -> None:
        """`landing` gets back the memory of deliveries that may be reused."""
        self._landing = landing
        self._held: WeightVersion | None = None
        """The newest version that the engine holds or has taken."""
        self._waiting: Delivery | StreamedDelivery | None = None
        """Not taken yet. A newer version replaces it, so an engine skips versions that come faster than it loads
        them."""
        self._lent: Delivery | StreamedDelivery | None = None
        """The delivery that was taken last: the engine may be reading its memory."""
        self._kept: Delivery | None = None
        """The last whole version that the engine held. If the engine loses it, as by sleeping, it need not be
        pulled."""

    @property
    def is_arriving(self) -> bool:
        """Whether the waiting version is still arriving, so that the other members of the broadcast group wait, too."""
        return isinstance(self._waiting, StreamedDelivery)

    def is_newer(self, version: WeightVersion) -> bool:
        """Return whether `version` is newer than the versions that are held, taken or waiting."""
        known = [self._held, None if self._waiting is None else self._waiting.manifest.version]
        return all(other is None or version > other for other in known)

    def put(self, delivery: Delivery | StreamedDelivery) -> bool:
        """Let `delivery` wait for the engine. Returns False if it is not newer than all known versions."""
        if not self.is_newer(delivery.manifest.version):
            return False
        self._give_back(self._waiting)
        self._waiting = delivery
        return True

    def hold(self, current: WeightVersion | None) -> None:
        """Note that the engine holds `current` and does not read what it took any more. A taken version is kept if it
        is `current`; otherwise its swap has failed, and it is forgotten."""
        self._held = current
        lent, self._lent = self._lent, None
        if isinstance(lent, Delivery) and lent.may_be_reused and lent.manifest.version == current:
            lent, self._kept = self._kept, lent
        self._give_back(lent)

    def take(self) -> Delivery | StreamedDelivery | None:
        """Return the waiting version if it is newer than the held one. Its memory belongs to the caller until the next
        `hold`."""
        waiting, self._waiting = self._waiting, None
        if waiting is None or not self.is_newer(waiting.manifest.version):
            self._give_back(waiting)
            return None
        self._held, self._lent = waiting.manifest.version, waiting
        return waiting

    def take_instead(self) -> Delivery | StreamedDelivery | None:
        """Return the waiting version, or None, in exchange for the one that was taken last and has not been touched."""
        if self._waiting is None:
            return None
        self._give_back(self._lent)
        return self.take()

    def take_kept(self, version: WeightVersion) -> Delivery | None:
        """Return the kept version if it is `version`. The caller puts it once more."""
        if self._kept is None or self._kept.manifest.version != version:
            return None
        kept, self._kept = self._kept, None
        return kept

    def drop_waiting(self) -> None:
        """Forget the waiting version, which was superseded and whose memory is needed."""
        waiting, self._waiting = self._waiting, None
        self._give_back(waiting)

    def drop_kept(self) -> None:
        """Forget the kept version, whose memory is needed."""
        kept, self._kept = self._kept, None
        self._give_back(kept)

    def forget(self, arriving: StreamedDelivery) -> None:
        """Forget a version whose transfer has ended, if it still waits: then the engine has no part of it."""
        if self._waiting is arriving:
            self._waiting = None

    def _give_back(self, delivery: Delivery | StreamedDelivery | None) -> None:
        if isinstance(delivery, Delivery) and delivery.may_be_reused:
            self._landing.give_back(delivery.landed)
