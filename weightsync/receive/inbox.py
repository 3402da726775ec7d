"""What has come for one engine, newest first: what it has yet to take, what it has taken, and the memory of both.

put ─► waiting ─► take ─► lent ─► hold ─► kept ─► take_kept and put, if the engine has lost it
                                             └──► drop_kept: another version comes, into its memory
"""

from broker.schema import WeightVersion
from weightsync.tensors.landing import Landing

from .deliveries import Arriving, Delivery


class Inbox:
    """Each version that is taken is newer than all before it, unless `hold` says that these are lost."""

    def __init__(self, landing: Landing) -> None:
        """`landing`: where the memory of deliveries that may be reused belongs."""
        self._landing = landing
        self._held: WeightVersion | None = None
        """The newest version that the engine holds or has taken."""
        self._waiting: Delivery | Arriving | None = None
        """Not taken yet. A newer one replaces it: nobody loads every version, if they come faster than that."""
        self._lent: Delivery | Arriving | None = None
        """Taken last: the engine may be reading its memory."""
        self._kept: Delivery | None = None
        """The last whole version that the engine held. Should it lose that, as by sleeping, nothing need be pulled."""

    @property
    def is_arriving(self) -> bool:
        """What waits is on its way, and the others of a broadcast group wait with it."""
        return isinstance(self._waiting, Arriving)

    def is_newer(self, version: WeightVersion) -> bool:
        """Than what is held, has been taken or waits."""
        known = [self._held, None if self._waiting is None else self._waiting.manifest.version]
        return all(other is None or version > other for other in known)

    def put(self, delivery: Delivery | Arriving) -> bool:
        """Let it wait; False if it is no newer than what was known."""
        if not self.is_newer(delivery.manifest.version):
            return False
        self._give_back(self._waiting)
        self._waiting = delivery
        return True

    def hold(self, current: WeightVersion | None) -> None:
        """The engine holds this version and is done with what it took. What it took is kept if it is that version, and
        else, as its swap has failed, not known any more."""
        self._held = current
        lent, self._lent = self._lent, None
        if isinstance(lent, Delivery) and lent.may_be_reused and lent.manifest.version == current:
            lent, self._kept = self._kept, lent
        self._give_back(lent)

    def take(self) -> Delivery | Arriving | None:
        """What waits, if it is newer than what is held. Its memory is the caller's until the next `hold`."""
        waiting, self._waiting = self._waiting, None
        if waiting is None or not self.is_newer(waiting.manifest.version):
            self._give_back(waiting)
            return None
        self._held, self._lent = waiting.manifest.version, waiting
        return waiting

    def take_instead(self) -> Delivery | Arriving | None:
        """What waits, in place of what was taken last and has not been touched; None: nothing does."""
        if self._waiting is None:
            return None
        self._give_back(self._lent)
        return self.take()

    def take_kept(self, version: WeightVersion) -> Delivery | None:
        """What is kept, to be `put` once more, if it is this version."""
        if self._kept is None or self._kept.manifest.version != version:
            return None
        kept, self._kept = self._kept, None
        return kept

    def drop_waiting(self) -> None:
        """It has been superseded, and its memory is needed."""
        waiting, self._waiting = self._waiting, None
        self._give_back(waiting)

    def drop_kept(self) -> None:
        """Its memory is needed."""
        kept, self._kept = self._kept, None
        self._give_back(kept)

    def forget(self, arriving: Arriving) -> None:
        """It comes no further: if it still waits, nobody has seen any of it."""
        if self._waiting is arriving:
            self._waiting = None

    def _give_back(self, delivery: Delivery | Arriving | None) -> None:
        if isinstance(delivery, Delivery) and delivery.may_be_reused:
            self._landing.give_back(delivery.landed)
