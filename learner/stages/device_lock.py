"""The learner and the engines use the same devices in turns.

    train ──► every model leaves the device ──► engines may generate, while the batch is waited for
      ▲                                                                              │
      └── every model is back ◄── all engines sleep, or have not been heard of ◄─────┘

A learner that dies stops renewing the engines' phase, so they fall asleep, and its successor finds the devices free.
"""

import logging
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress

from headway.broker import BlockingBroker
from headway.broker.client.engine_pauses import LENT_S, LONGEST_WAIT_S, RENEW_S, Phases
from headway.broker.errors import BrokerError
from headway.learner.backends.base import TrainableModel
from headway.learner.experience.broker_retries import StopRequested
from headway.learner.experience.stream import Experience
from headway.learner.ranks import Ranks

POLL_S = 0.01
AGAIN_S = 1.0
"""The time between a starting learner's questions whether engines have left the device."""

log = logging.getLogger(__name__)


class DeviceLock:
    """The learner's lock on one rank's device, which engines use while the learner waits for a batch. The first rank
    alone speaks to the broker (`experience`)."""

    def __init__(
        self, phases: Phases | None, models: Sequence[TrainableModel], ranks: Ranks, experience: Experience | None
    ) -> None:
        """`models` are all models on this rank's device; `phases` and `experience` are None on all ranks but the
        first."""
        self._models = models
        self._ranks = ranks
        self._phases = phases
        self._experience = experience
        self._renewed_s = -math.inf

    @contextmanager
    def released(self) -> Iterator[None]:
        """Releases the device to engines within the block, where no model may be used. Collective. After an error
        within, engines keep the device.

        Raises StopRequested itself, on every rank, where the learner is to stop and the broker is away: the broker
        cannot say whether engines sleep, and engines that cannot ask it stay awake.
        """
        with ExitStack() as away:
            for model in self._models:
                away.enter_context(model.off_device())
            self._barrier()
            with suppress(StopRequested):
                self.renew()
            yield
            if self._ranks.any(not self._await_sleep()):
                raise StopRequested

    def renew(self) -> None:
        """Renews the engines' phase; the caller repeats it often, or engines fall asleep."""
        if self._phases is None or self._experience is None or time.monotonic() - self._renewed_s < RENEW_S:
            return
        phases, owner = self._phases, self._experience.owner
        self._experience.retry(lambda: phases.generate(owner))
        self._renewed_s = time.monotonic()

    def _await_sleep(self) -> bool:
        """Waits until all engines sleep, or one has kept the learner waiting for too long, outages not counted. False
        where the broker is away and the learner is to stop."""
        if self._phases is None or self._experience is None:
            return True
        self._renewed_s = -math.inf
        phases, owner, since_s = self._phases, self._experience.owner, time.monotonic()
        with suppress(StopRequested):
            while (awake := self._experience.retry(lambda: phases.train(owner))) != ():
                if awake is None:
                    since_s = time.monotonic()
                elif time.monotonic() > since_s + LONGEST_WAIT_S:
                    log.warning(
                        "%s did not leave the device within %.0f s: training beside it, which may take more memory than"
                        " there is. Restart it.",
                        ", ".join(awake),
                        LONGEST_WAIT_S,
                    )
                    break
                time.sleep(POLL_S)
            return True
        log.warning("Engines may still be on the device: stopping without a checkpoint of the last steps.")
        return False

    def _barrier(self) -> None:
        """Holds this rank until all ranks are here."""
        self._ranks.any(False)


def wait_for_device(url: str, run: str) -> None:
    """Waits, before a learner takes memory, until the engines of an earlier learner have left the device. Every rank
    asks for itself, as ranks meet on their devices."""
    blocking = BlockingBroker(url, run)
    since_s, has_logged = time.monotonic(), False
    try:
        while (are_awake := _are_engines_awake(blocking)) is not False:
            if not has_logged:
                log.info("waiting until engines leave the device")
                has_logged = True
            if are_awake is None:
                since_s = time.monotonic()
            elif time.monotonic() > since_s + LENT_S + LONGEST_WAIT_S:
                log.warning("engines are still awake: taking the device all the same; stop the other learner, if any.")
                return
            time.sleep(AGAIN_S)
    finally:
        blocking.close()


def _are_engines_awake(blocking: BlockingBroker) -> bool | None:
    try:
        return blocking.call(blocking.broker.phases.are_engines_awake())
    except BrokerError as error:
        log.warning("%s Waiting for it.", error)
        return None
