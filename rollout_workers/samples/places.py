"""Workers share the samples that a run has under way, where the recipe says no number (`engine.max_concurrent`)."""

import logging

LEAST = 8
"""The least share of a worker: fewer samples would not keep an engine at work while others are scored and leased."""

log = logging.getLogger(__name__)


class SharedPlaces:
    """Counts the samples that a worker has its engine generate at a time: all that the engine batches, or this worker's
    share of those that the run may have under way, where that is less.

    Without the share the worker that asks first would lease them all, and an engine that batches much would leave the
    others idle.
    """

    def __init__(self, worker: str, batched: int, under_way: int = 0) -> None:
        """`batched`: requests that the engine can batch. `under_way`: the most samples that the run generates at a
        time; 0: the worker takes as many as its engine batches, whatever others do."""
        self._worker = worker
        self._batched = batched
        self._under_way = under_way
        self.now = min(batched, under_way) if under_way else batched
        """Samples that the worker takes now."""
        self._is_said = False

    def hear(self, serving: int) -> None:
        """Note that so many workers share the run's samples, this one included."""
        if not self._under_way:
            return
        places = min(self._batched, max(-(-self._under_way // max(1, serving)), LEAST))
        if places != self.now or not self._is_said:
            self.now, self._is_said = places, True
            log.info(
                "worker %s: takes up to %d samples at a time: its engine batches %d, and the run has at most %d under"
                " way; workers that share them: %d",
                self._worker,
                places,
                self._batched,
                self._under_way,
                serving,
            )
