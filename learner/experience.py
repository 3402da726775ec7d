"""The learner's side of the broker, on rank 0: feed prompts, take batches, commit them, and outlive the server.

Every verb is repeated over server outages until it succeeds. After a server restart the learner first re-asserts what
it must not let the server forget: the announced version, what it has committed, what it has taken.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from typing import Any, TypeVar

import torch

from broker import BlockingBroker
from broker.batches import Claim
from broker.errors import BrokerUnavailableError, ServerRestartedError
from broker.schema import Group, Probe, RunStatus, StepMetrics, TrajectoryId, WeightVersion
from weightsync.publisher import Publisher

from .prompts.cursor import PromptCursor

log = logging.getLogger(__name__)
T = TypeVar("T")

POLL_S = 0.01
RETRY_S = 0.5
PATIENCE_S = 60.0
"""Ranks that wait for this one give up after half an hour of silence."""
REMEMBERED_STEPS = 64
"""A server can lose the commits of its last second; so many steps' commits are told it again."""


class Interrupted(Exception):  # noqa: N818 - no error: the loop ends in order
    """The learner was asked to stop while it waited."""


class NeedsLearner(Exception):  # noqa: N818 - no error: the loop goes on from here
    """The loop must act before waiting on.

    `rewind`: publish this step's weights; `bytes`: commit what was trained; `time`: let the other ranks see that this
    one lives.
    """

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = what


class Experience:
    """What the learner trains on, as a stream of pinned batches."""

    def __init__(
        self,
        blocking: BlockingBroker,
        claim: Claim,
        publisher: Publisher,
        cursor: PromptCursor,
        *,
        groups_per_step: int,
        max_lag: int,
        should_stop: Callable[[], bool],
    ) -> None:
        self.owner = claim.owner
        self._blocking = blocking
        self._publisher = publisher
        self._cursor = cursor
        self._groups_per_step = groups_per_step
        self._max_lag = max_lag
        self._should_stop = should_stop
        self._taken: dict[int, tuple[TrajectoryId, ...]] = {}
        self._committed: deque[str] = deque(maxlen=REMEMBERED_STEPS * groups_per_step)
        self._announced: WeightVersion | None = None
        self._is_down = False
        self._is_feed_closed = False
        self._is_replay_lost = False

    def take(self, step: int) -> list[Group] | None:
        """The batch of `step`, waiting for it; the same one however often it is asked for. None: nothing will come."""
        self._feed()
        until = time.monotonic() + PATIENCE_S
        while True:
            batch = self._insist(lambda: self._blocking.broker.batches.take(self.owner, step, self._groups_per_step))
            if batch is not None:
                break
            if self._should_stop():
                raise Interrupted
            self._ask_for_help(self._blocking.broker.batches.waiting_for, until)
            time.sleep(POLL_S)
            self._feed()
        self._taken[step] = tuple(t.tid for group in batch.groups for t in group.trajectories)
        return list(batch.groups) or None

    def commit(self, step: int) -> None:
        """A durable checkpoint contains every step below `step`: what they trained may be forgotten."""
        done = sorted({tid.group for s, tids in self._taken.items() if s < step for tid in tids})
        watermark = self._cursor.watermark
        with suppress(Interrupted):  # the next learner commits what this checkpoint contains when it claims the run
            self._insist(lambda: self._blocking.broker.batches.commit(self.owner, step, done, watermark))
        self._taken = {s: tids for s, tids in self._taken.items() if s >= step}
        self._committed.extend(done)

    def publish(self, version: WeightVersion, tensors: Iterable[tuple[str, torch.Tensor]], probe: Probe) -> None:
        """Broadcast and announce `version`; the tensors are iterated once, whatever happens to the server."""
        staged = self._publisher.stage(tensors)
        with suppress(Interrupted):
            report = self._outlive(lambda: self._publisher.publish(version, staged, probe))
            self._announced = version
            if report.failed:
                log.warning(
                    "Version %d.%d: %s. Workers left out pull it.", version.incarnation, version.step, report.failed
                )

    def report(self, metrics: StepMetrics) -> None:
        """Show one step to everybody who looks at the run."""
        with suppress(Interrupted):
            self._insist(lambda: self._blocking.broker.status.report_step(self.owner, metrics))

    def set_state(self, state: str) -> None:
        """What the run is doing, for people: training, finished, stopped. After the last two, workers leave."""
        with suppress(Interrupted):
            self._insist(lambda: self._blocking.broker.status.set_state(self.owner, state))

    def status(self) -> RunStatus | None:
        """One look at the run; None where the server is away and the learner was asked to stop."""
        with suppress(Interrupted):
            return self._insist(self._blocking.broker.status.snapshot)
        return None

    def _insist(self, verb: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Repeat `verb` until the server has answered it. Raises Interrupted when asked to stop during an outage."""
        return self._outlive(lambda: self._blocking.call(verb()))

    def _outlive(self, act: Callable[[], T]) -> T:
        """The same for anything that talks to the broker."""
        while True:
            try:
                result = act()
            except ServerRestartedError:
                self._reassert()
            except BrokerUnavailableError as error:
                if self._should_stop():
                    raise Interrupted from error
                if not self._is_down:
                    log.warning("%s Training waits for it.", error)
                self._is_down = True
                time.sleep(RETRY_S)
            else:
                if self._is_down:
                    log.warning("The broker answers again.")
                self._is_down = False
                return result

    def _ask_for_help(self, waiting_for: str, until: float) -> None:
        if waiting_for in ("rewind", "announce") or self._is_replay_lost:
            self._is_replay_lost = False
            raise NeedsLearner("rewind")
        if waiting_for == "bytes" and self._taken:
            raise NeedsLearner("bytes")
        if time.monotonic() > until:
            raise NeedsLearner("time")

    def _feed(self) -> None:
        """Keep the pool ahead of admission, which runs max_lag + 1 steps ahead of training."""
        wanted = (self._max_lag + 2) * self._groups_per_step
        ahead = 0 if self._cursor.is_exhausted else self._insist(self._blocking.broker.prompts.fed_ahead)
        if not self._cursor.is_exhausted and ahead < wanted // 2:
            prompts = self._cursor.next(wanted - ahead)
            self._insist(lambda: self._blocking.broker.prompts.feed(prompts, self.owner))
        if self._cursor.is_exhausted and not self._is_feed_closed:
            self._insist(lambda: self._blocking.broker.prompts.close_feed(self.owner))
            self._is_feed_closed = True

    def _reassert(self) -> None:
        log.warning("The broker's server was restarted; telling it what has been announced, taken and trained.")
        self._insist(
            lambda: self._blocking.broker.batches.reassert(
                self.owner, announced=self._announced, committed_groups=list(self._committed), pinned=self._taken
            )
        )
        self._is_replay_lost = self._announced is None  # a server that forgot what is replayed cannot deliver it
        self._cursor.feed_again()
        self._is_feed_closed = False
