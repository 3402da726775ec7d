"""Keeps a worker in the broadcast groups that name it, one epoch at a time."""

import asyncio
import logging
import threading

from headway.broker import Broker
from headway.broker.errors import WeightSyncError
from headway.broker.schema.weights import BroadcastGroup, WeightManifest
from headway.broker.user_code.roots import ImportRoots
from headway.weightsync.transports.rendezvous import Board
from headway.weightsync.transports.threads import BoundedThreads, for_threads

from .receiver import JoinedGroup, join

logger = logging.getLogger(__name__)


class GroupFollower:
    """Tries to join the group of each record once: a record that a dead learner left, or that was closed without this
    worker, is not tried again."""

    def __init__(self, broker: Broker, worker: str, threads: BoundedThreads, roots: ImportRoots | None = None) -> None:
        self._roots = roots
        self._broker = broker
        self._worker = worker
        self._threads = threads
        self._read: bytes | None = None
        """Names the group that was read last: see `broker.client.versions.Glance`."""
        self._seen: BroadcastGroup | None = None
        """The newest group of the run, whether it names this worker or not."""
        self._joined: JoinedGroup | None = None
        self._joining: asyncio.Task[None] | None = None

    @property
    def epoch(self) -> int:
        """The joined epoch, 0 if none."""
        return 0 if self._joined is None else self._joined.group.epoch

    async def look(self, name: bytes | None) -> None:
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
                self._joining = asyncio.create_task(self._join(group))

    async def joined_for(self, manifest: WeightManifest) -> JoinedGroup | None:
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
        if self._joining is not None:
            await asyncio.wait({self._joining})
        return self._joined if self._joined is not None and self._joined.group == group else None

    def leave(self) -> None:
        """Leave the current epoch, and give up a join that is under way."""
        if self._joining is not None:
            self._joining.cancel()
            self._joining = None
        if self._joined is not None:
            self._joined.close()
            self._joined = None

    async def _join(self, group: BroadcastGroup) -> None:
        cancelled = threading.Event()
        board = Board(for_threads(asyncio.get_running_loop()), self._broker.meetings)
        try:
            self._joined = await self._threads.run(
                "join",
                lambda: join(board, self._worker, group, cancelled, self._roots),
                cancelled,
                overdue_s=2 * group.timeout_s + 1,
            )
        except WeightSyncError as error:
            logger.warning("%s stays out of broadcast group %d: %s", self._worker, group.epoch, error)
