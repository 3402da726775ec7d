"""The versions of one engine: the one that waits for it, the one that it has taken, and the memory of both.

put ─► waiting ─► take ─► lent ─► hold ─► kept ─► take_kept and put, if the engine has lost it
                                             └──► drop_kept: another version comes, into its memory
"""

from headway.broker.schema import WeightVersion
from headway.weightsync.tensors.landing import Landing

from .deliveries import Arriving, Delivery


class Inbox:
    """Each version that is taken is newer than all before it, unless `hold` has said that the engine lost those."""

    def __init__(self, landing: Landing) -> None:
        """`landing` gets back the memory of deliveries that may be reused."""
        self._landing = landing
        self._held: WeightVersion | None = None
        """The newest version that the engine holds or has taken."""
        self._waiting: Delivery | Arriving | None = None
        """Not taken yet. A newer version replaces it, so an engine skips versions that come faster than it loads
        them."""
        self._lent: Delivery | Arriving | None = None
        """The delivery that was taken last: the engine may be reading its memory."""
        self._kept: Delivery | None = None
        """The last whole version that the engine held. If the engine loses it, as by sleeping, it need not be
        pulled."""

    @property
    def is_arriving(self) -> bool:
        """Whether the waiting version is still arriving, so that the other members of the broadcast group wait, too."""
        return isinstance(self._waiting, Arriving)

    def is_newer(self, version: WeightVersion) -> bool:
        """Return whether `version` is newer than the versions that are held, taken or waiting."""
        known = [self._held, None if self._waiting is None else self._waiting.manifest.version]
        return all(other is None or version > other for other in known)

    def put(self, delivery: Delivery | Arriving) -> bool:
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

    def take(self) -> Delivery | Arriving | None:
        """Return the waiting version if it is newer than the held one. Its memory belongs to the caller until the next
        `hold`."""
        waiting, self._waiting = self._waiting, None
        if waiting is None or not self.is_newer(waiting.manifest.version):
            self._give_back(waiting)
            return None
        self._held, self._lent = waiting.manifest.version, waiting
        return waiting

    def take_instead(self) -> Delivery | Arriving | None:
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

    def forget(self, arriving: Arriving) -> None:
        """Forget a version whose transfer has ended, if it still waits: then the engine has no part of it."""
        if self._waiting is arriving:
            self._waiting = None

    def _give_back(self, delivery: Delivery | Arriving | None) -> None:
        if isinstance(delivery, Delivery) and delivery.may_be_reused:
            self._landing.give_back(delivery.landed)
