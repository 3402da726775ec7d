"""A worker's end: hears of new versions and hands over complete, verified ones, each newer than the last.

Receiving never waits for the engine: it happens in the background into other buffers, so a slow swap costs this worker
the versions in between, and other workers nothing. Where there is no room for a second version (`staging: none`), a
broadcast is handed over as it arrives, and a pulled version comes whole, through host memory.
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
from headway.broker.client.versions import Glance
from headway.broker.errors import BrokerError, BrokerUnavailableError, WeightSyncError
from headway.broker.schema import WeightVersion
from headway.broker.schema.weights import WeightManifest
from headway.broker.user_code.roots import ImportRoots
from headway.weightsync.config import WeightsConfig
from headway.weightsync.deadline import Deadline
from headway.weightsync.pace import Pace
from headway.weightsync.tensors.base_weights import BASE, manifest_of_base
from headway.weightsync.tensors.buckets import allocate, check_manifest
from headway.weightsync.tensors.landing import Landed, Landing, Window, attachable_buckets
from headway.weightsync.transports.abilities import abilities_of, broadcast_device
from headway.weightsync.transports.http.pull import HttpPull
from headway.weightsync.transports.threads import BoundedThreads

from .deliveries import Arriving, Delivery
from .files_in_place import base_in_files, verify_base
from .groups import GroupFollower
from .inbox import Inbox
from .model_files import files_first
from .puller import Puller
from .pulls import Pulls
from .receiver import JoinedGroup

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
        that, see `model_files`."""
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
        self._tried: WeightVersion | None = None
        """The last offer that was read in full; one whose transfer failed is not received again but pulled."""
        self._landing = Landing(torch.device("cuda" if config.staging == "device" else "cpu"))
        device = broadcast_device(config, abilities_of(config.transport, roots if self.joins_groups else None))
        self._window = Window(torch.device(device)) if config.staging == "none" else None
        # A base for deltas must not be overwritten, and without room for two versions a pulled one must not be kept.
        shared = self._landing if self.joins_groups and self._window is None else None
        self._pulls = Pulls(broker, worker, config, shared, self._note_arrival, self._note_failure, model)
        self._inbox = Inbox(self._landing)
        self._known: WeightManifest | None = None
        """The manifest of the last version that arrived. Most offers name that version instead of repeating its
        tensors."""
        self._arrived = asyncio.Event()
        """Set when `wait_for_version` has something to return or raise: a version in the inbox, or `_outage`."""
        self._outage: BrokerUnavailableError | None = None
        """The error that keeps the background work from the broker."""
        self._was_rung = asyncio.Event()
        """Set when the bell has rung: there is news, so look before `poll_s`."""
        self._glance = Glance(None, None, None)
        """The learner's words at the last look."""
        self._has_looked = asyncio.Event()
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

    async def wait_for_version(self, current: WeightVersion | None) -> Delivery | Arriving:
        """Return the newest complete version after `current`, or one that is arriving. Cancelling it loses nothing. One
        caller at a time.

        If a version that was handed over is not `current` in the next call, its swap has failed, and it is fetched
        anew. Raises the broker's errors; failed transfers are retried or pulled and never raise.
        """
        self._inbox.hold(current)
        while (delivery := self._inbox.take()) is None:
            await self._news()
        return delivery

    def newer(self) -> Delivery | Arriving | None:
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
        learner = HttpPull(self._config.broadcast_timeout_s, Pace(self._config.pull_bytes_per_s))
        puller = Puller(files_first(self._model, learner), keeps_base=False)
        pulled = await self._in_thread("pull-base", lambda deadline: puller.pull(manifest, deadline, landing))
        return Delivery(manifest, Landed(pulled.buckets), may_be_reused=False)

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
        await asyncio.gather(self._pulls.stop(patience_s), self._threads.stop(patience_s))
        self._inbox = Inbox(self._landing)  # a reference to this subscriber keeps no version's memory

    async def _news(self) -> None:
        """Wait until a version has arrived. Raises the error that keeps the background work from the broker, or that
        ended it; the next call starts ended work anew."""
        self._arrived.clear()
        self._outage = None
        self._was_rung.set()  # the engine may have failed to take what the last look found
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
                tasks.create_task(self._hear())
                for follow in (self._look, self._follow_versions):
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

    async def _hear(self) -> None:
        """Look at every ring of the bell. A worker that misses one, as the broker is away or busy, finds the news when
        it looks next."""
        heard = b"0"
        while True:
            try:
                rung = await self._broker.meetings.wait_for_bell(heard)
            except BrokerError:
                await asyncio.sleep(_AFTER_OUTAGE_S)
                continue
            if rung != heard:
                heard = rung
                self._was_rung.set()

    async def _look(self) -> None:
        """Look for versions and groups, also while a version is received: the learner may begin a group meanwhile."""
        while True:
            self._was_rung.clear()
            self._glance = await self._broker.versions.glance()
            if self.joins_groups:
                await self._groups.look(self._glance.group)
            self._has_looked.set()
            with suppress(TimeoutError):
                async with asyncio.timeout(self._config.poll_s):
                    await self._was_rung.wait()

    async def _follow_versions(self) -> None:
        while True:
            await self._has_looked.wait()
            self._has_looked.clear()
            offered, announced, _ = self._glance
            # Once a version is announced its broadcast is over, and a worker that missed it pulls.
            is_under_way = self.joins_groups and offered is not None and offered != announced
            if offered is not None and is_under_way and offered != self._tried and self._inbox.is_newer(offered):
                await self._receive(offered)
            elif announced is not None and self._inbox.is_newer(announced):
                self._fetch(announced)

    def _fetch(self, announced: WeightVersion) -> None:
        if (kept := self._inbox.take_kept(announced)) is not None:
            self._note_arrival(kept)
        else:
            self._inbox.drop_kept()
            self._pulls.start()

    async def _receive(self, offered: WeightVersion) -> None:
        joined, offer = await self._invitation(offered)
        self._tried = offered  # not before: if the broker did not answer, it is asked again
        if joined is None or offer is None:
            return
        # The version being pulled and the waiting one are about to be superseded, and beside the engine's version and
        # the one that is received there is no room for a third.
        await self._pulls.stop(_STOP_SHARE * joined.group.timeout_s)
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
        self, joined: JoinedGroup, offer: WeightManifest, window: Window, cancelled: threading.Event
    ) -> None:
        arriving = Arriving(offer, self._note_arrival)
        end = WeightSyncError(f"version {offer.version} is received no further")
        try:
            self._known = await self._threads.run(
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

    async def _invitation(self, offered: WeightVersion) -> tuple[JoinedGroup | None, WeightManifest | None]:
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
        if self._known is None or self._known.version != offer.like:
            self._known = await self._broker.versions.announced()
        if self._known is None or self._known.version != offer.like:
            return None
        return replace(offer, tensors=self._known.tensors, buckets=self._known.buckets, like=None)

    def _note_arrival(self, delivery: Delivery | Arriving) -> None:
        if self._inbox.put(delivery):
            if isinstance(delivery, Delivery):
                self._known = delivery.manifest
                self.last_error = ""
            self._arrived.set()

    def _note_failure(self, what: str, version: WeightVersion, error: WeightSyncError | str) -> None:
        self.last_error = f"{what} of {version}: {error}"
        logger.warning("%s: %s", self._worker, self.last_error)
