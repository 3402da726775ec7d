"""A drift watch compares the lengths of begun and of trained prompts, since load may drop long ones.

Load does not drop groups at random: long prompts have long answers, which expire, are trimmed or grow too old first.
The model is then trained on another distribution than that of its prompts, and no error says so.
"""

import logging
from collections.abc import Mapping

from headway.broker.schema.status import QueueDepths, RunStatus, Tallies

log = logging.getLogger(__name__)

WARN_ABOVE, WARN_AGAIN = 0.1, 0.05
"""The distance from which `DriftWatch` warns, and how much it must grow before it warns again."""
FEWEST_GROUPS = 256
"""The fewest groups that are compared: with fewer, chance alone could make a difference of that size."""


def length_class(tokens: int) -> int:
    """Returns the smallest power of two that is at least so many tokens, as the broker counts lengths."""
    return 1 << (tokens - 1).bit_length() if tokens > 1 else 1


def length_drift(dispatched: Mapping[int, int], trained: Mapping[int, int], in_flight: int) -> float:
    """Returns a lower bound on how far the lengths of begun and of trained prompts differ: 0 (alike) to 1.

    The total variation distance of the two histograms, less the share of dispatched groups that are in flight: leaving
    these out moves the first histogram by no more than their share (triangle inequality).
    """
    begun, done = sum(dispatched.values()), sum(trained.values())
    if not begun or not done:
        return 0.0
    lengths = dispatched.keys() | trained.keys()
    distance = sum(abs(dispatched.get(n, 0) / begun - trained.get(n, 0) / done) for n in lengths) / 2
    return max(0.0, distance - min(1.0, in_flight / begun))


def drift_of(tallies: Tallies, queues: QueueDepths) -> float:
    """Returns `length_drift` of a look at a run."""
    in_flight = queues.open + queues.ready + queues.pinned
    return length_drift(tallies.dispatched_by_prompt_length, tallies.trained_by_prompt_length, in_flight)


class DriftWatch:
    """Warns of a drift once, and again only when it has grown."""

    def __init__(self) -> None:
        self._warn_above = WARN_ABOVE

    def check(self, status: RunStatus) -> None:
        """Compares the lengths in this status, and warns where they have drifted."""
        tallies, queues = status.tallies, status.queues
        if sum(tallies.trained_by_prompt_length.values()) < FEWEST_GROUPS:
            return
        drift = drift_of(tallies, queues)
        if drift <= self._warn_above:
            return
        self._warn_above = drift + WARN_AGAIN
        log.warning(
            "The prompts that were trained differ in length from those that were begun (total variation distance %.2f;"
            " groups by length up to a power of two: begun %s, trained %s). Groups are being dropped or trimmed by"
            " length: see staleness.on_over_bound, staleness.on_straggler and broker.lease_ttl_s.",
            drift,
            dict(sorted(tallies.dispatched_by_prompt_length.items())),
            dict(sorted(tallies.trained_by_prompt_length.items())),
        )
