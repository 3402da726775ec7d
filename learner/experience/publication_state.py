"""A state machine tracks how far this learner's weights have come: replayed, published, announced.

A learner that takes a run over first trains again what its checkpoint does not contain, and publishes nothing
meanwhile. From then on it publishes one version after the other. A dot marks an event that cannot happen in that state.

    state        REPLAY       RESTART      ABANDON      PUBLISH  ANNOUNCE   GIVE_UP
    CATCHING_UP  CATCHING_UP  FORGOTTEN    CATCHING_UP  SENDING  .          .
    FORGOTTEN    CATCHING_UP  FORGOTTEN    CATCHING_UP  SENDING  .          .
    SENDING      .            SENDING      .            .        ANNOUNCED  UNCONFIRMED
    ANNOUNCED    ANNOUNCED    ANNOUNCED    ANNOUNCED    SENDING  .          .
    UNCONFIRMED  .            UNCONFIRMED  .            SENDING  .          .
"""

from enum import Enum, auto

from headway.broker.schema import WeightVersion
from headway.weightsync.publisher import Publication


class State(Enum):
    """The stage that this learner's weights have reached."""

    CATCHING_UP = auto()
    """It has published nothing; the batches of earlier steps come from the broker or the log."""
    FORGOTTEN = auto()
    """The same, and a restarted server may lack these batches: no worker will generate what it does not deliver."""
    SENDING = auto()
    """A version is on its way to the workers."""
    ANNOUNCED = auto()
    """The broker has announced the newest version."""
    UNCONFIRMED = auto()
    """The learner was asked to stop before the broker had confirmed the newest version."""


class Event(Enum):
    """An event that moves a learner to another state."""

    REPLAY = auto()
    """The log gives the batches of earlier steps."""
    RESTART = auto()
    """The server came back without a part of its memory."""
    ABANDON = auto()
    """Neither the broker nor the log has a batch that was trained: the weights that came of it are given up."""
    PUBLISH = auto()
    """A version begins to be sent."""
    ANNOUNCE = auto()
    """The broker has announced the version."""
    GIVE_UP = auto()
    """The learner was asked to stop while the broker was away."""


TRANSITIONS = {
    (State.CATCHING_UP, Event.REPLAY): State.CATCHING_UP,
    (State.CATCHING_UP, Event.RESTART): State.FORGOTTEN,
    (State.CATCHING_UP, Event.ABANDON): State.CATCHING_UP,
    (State.CATCHING_UP, Event.PUBLISH): State.SENDING,
    (State.FORGOTTEN, Event.REPLAY): State.CATCHING_UP,
    (State.FORGOTTEN, Event.RESTART): State.FORGOTTEN,
    (State.FORGOTTEN, Event.ABANDON): State.CATCHING_UP,
    (State.FORGOTTEN, Event.PUBLISH): State.SENDING,
    (State.SENDING, Event.RESTART): State.SENDING,
    (State.SENDING, Event.ANNOUNCE): State.ANNOUNCED,
    (State.SENDING, Event.GIVE_UP): State.UNCONFIRMED,
    (State.ANNOUNCED, Event.REPLAY): State.ANNOUNCED,
    (State.ANNOUNCED, Event.RESTART): State.ANNOUNCED,
    (State.ANNOUNCED, Event.ABANDON): State.ANNOUNCED,
    (State.ANNOUNCED, Event.PUBLISH): State.SENDING,
    (State.UNCONFIRMED, Event.RESTART): State.UNCONFIRMED,
    (State.UNCONFIRMED, Event.PUBLISH): State.SENDING,
}


class PublicationState:
    """The state, with the versions and steps that belong to it. Every method but the properties is one event."""

    def __init__(self) -> None:
        self.state = State.CATCHING_UP
        self.published: WeightVersion | None = None
        """The newest version that this learner has sent or begun to send."""
        self.announced: WeightVersion | None = None
        """The newest version of this learner that the broker has announced."""
        self.publication: Publication | None = None
        """The version under way, while the state is SENDING."""
        self.replayed_to = 0
        """The log gives the batches of the steps below this one."""

    def publish(self, version: WeightVersion, publication: Publication) -> None:
        """`version` is on its way."""
        self._go(Event.PUBLISH)
        self.published, self.publication = version, publication

    def announce(self) -> None:
        """The broker has announced the version that was on its way."""
        self._go(Event.ANNOUNCE)
        self.announced, self.publication = self.published, None

    def give_up(self) -> None:
        """The learner stops, and does not know whether the broker has announced the version."""
        self._go(Event.GIVE_UP)
        self.publication = None

    def restart(self) -> None:
        """The server has lost some of its memory."""
        self._go(Event.RESTART)

    def replay(self, stop: int) -> None:
        """The log gives the batches of the steps below `stop`."""
        self._go(Event.REPLAY)
        self.replayed_to = stop

    def abandon(self) -> None:
        """The weights that came of a lost batch are given up; this learner's own come in their place."""
        self._go(Event.ABANDON)

    def _go(self, event: Event) -> None:
        following = TRANSITIONS.get((self.state, event))
        assert following is not None, f"{event} cannot happen in {self.state}"
        self.state = following
