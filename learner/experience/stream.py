"""The learner's side of the broker, on rank 0: feed prompts, take batches, commit them, and outlive the server.

Every verb is repeated over server outages until it succeeds. After a server restart the learner first re-asserts what
it must not let the server forget: the announced version, what it has committed, what it has taken. Every batch is
logged before it is trained; one that the broker has lost, and one that it has settled, is trained again from the log.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from enum import StrEnum
from typing import Any, TypeVar

import torch

from headway.broker import BlockingBroker
from headway.broker.client.evaluations import EvaluationProgress
from headway.broker.client.learner import Claim, NotReady, TakenBatch
from headway.broker.errors import HeadwayError, RunNotFoundError
from headway.broker.schema import Group, Owner, Prompt, TrajectoryId, WeightVersion
from headway.broker.schema.status import RunStatus
from headway.broker.schema.step_metrics import StepMetrics
from headway.broker.schema.weights import Probe
from headway.learner.data.prompts.cursor import PromptCursor
from headway.learner.objective.shaping import is_informative
from headway.weightsync.publisher import Publisher

from .broker_retries import BrokerRetries, StopRequested, WaitTimeout
from .length_drift import DriftWatch
from .log import ExperienceLog
from .log_files import tids_of
from .publication_state import PublicationState, State


class WaitReason(StrEnum):
    """The event that the batch waits for. Rank 0 sends the value to the other ranks."""

    FOR_WEIGHTS = "weights"
    """Workers cannot generate the batch before this step's weights are published. Where earlier steps were to be
    replayed, their batches are lost: what follows is a branch of its own."""
    FOR_COMMIT = "commit"
    """The broker's store is full with what was trained: a durable checkpoint lets it be freed."""
    FOR_DEVICE = "device"
    """Engines need the device that they share with the learner."""
    FOR_RANKS = "ranks"
    """The other ranks have waited long: they must hear that rank 0 lives."""


DRAW_S = 1.0
"""Seconds after which the learner draws no further prompt before it feeds those that it has: a slow source must not
keep workers from the first of them, nor the learner from batches that are ready."""


class PromptFeed:
    """Keeps `wanted` prompts in the pool: admission runs max_lag + 1 steps ahead of training.

    It draws prompts in the caller's thread and not on the client's event loop, where a slow source would hold up all
    other calls of the learner.
    """

    def __init__(self, blocking: BlockingBroker, owner: Owner, cursor: PromptCursor, wanted: int) -> None:
        self._call = blocking.call
        self._prompts = blocking.broker.prompts
        self._owner = owner
        self._cursor = cursor
        self._wanted = wanted
        self._first = wanted
        """The prompts from the cursor's place on that are fed however many are in the pool: those of a branch that was
        abandoned may lie there, and workers begin the oldest first."""
        self._next: list[Prompt] = []
        """The cursor gave these prompts and the broker has not confirmed them yet: an outage must not lose them."""
        self._is_closed = False
        self._useless_refeed_at = ""

    def keep_ahead(self) -> None:
        """Feeds the prompts that are missing, or those of them that `DRAW_S` leaves time for, and closes the feed after
        the last one. Idempotent."""
        ahead, has_lost = self._call(self._prompts.waiting())
        self._feed_lost(has_lost)
        missing = self._wanted - ahead if ahead < self._wanted // 2 else 0
        if not self._next and (count := max(missing, self._first)):
            self._draw(count)
        if self._next:
            self._call(self._prompts.feed(self._next, self._owner))
            self._first = max(0, self._first - len(self._next))
            self._next = []
        if self._cursor.is_exhausted and not self._is_closed:
            self._call(self._prompts.close_feed(self._owner))
            self._is_closed = True

    def restart(self) -> None:
        """Feeds again from the checkpoint's cursor, as the server has forgotten some prompts."""
        self._cursor.feed_again()
        self._is_closed = False

    def _draw(self, count: int) -> None:
        """Takes prompts from the cursor: at least one, if there is one left, and no more than `count`."""
        until = time.monotonic() + DRAW_S
        while len(self._next) < count and not self._cursor.is_exhausted:
            self._next += self._cursor.next(1)
            if time.monotonic() > until:
                return

    def _feed_lost(self, has_lost: bool) -> None:
        """Feeds again the prompts that the server has lost. Where that brings nothing back, a resumed learner's cursor
        has not drawn the lost ones yet, and the next try waits until the cursor has moved."""
        if not has_lost:
            self._useless_refeed_at = ""
        elif self._useless_refeed_at != self._cursor.position:
            brought_back = self._call(self._prompts.feed(self._cursor.fed_before(), self._owner))
            self._useless_refeed_at = "" if brought_back else self._cursor.position


log = logging.getLogger(__name__)
T = TypeVar("T")

POLL_S = 0.01
PATIENCE_S = 60.0
"""The longest wait for a batch before other ranks hear from rank 0: they give up after half an hour of silence."""
REMEMBERED_STEPS = 64
"""A server can lose the commits of its last second; so many steps' commits are told it again."""


class LostExperienceError(HeadwayError):
    """A batch that the log had promised to hold is gone."""


class Experience:
    """The learner's stream of pinned batches."""

    def __init__(
        self,
        blocking: BlockingBroker,
        claim: Claim,
        publisher: Publisher,
        cursor: PromptCursor,
        experience_log: ExperienceLog,
        *,
        groups_per_step: int,
        max_lag: int,
        should_stop: Callable[[], bool],
        replacement_rounds: int,
        masks_truncated: bool,
    ) -> None:
        """Groups that teach nothing are replaced at most `replacement_rounds` times a batch; with `masks_truncated`,
        groups whose samples were all truncated teach nothing either."""
        self.owner = claim.owner
        self._blocking = blocking
        self._publisher = publisher
        self._cursor = cursor
        self._saved_watermark = cursor.watermark
        """The watermark in the checkpoint that is being written or was written last."""
        self._feed = PromptFeed(blocking, claim.owner, cursor, (max_lag + 2) * groups_per_step)
        self._log = experience_log
        self._groups_per_step = groups_per_step
        self._should_stop = should_stop
        self._retries = BrokerRetries(blocking, should_stop, self._reassert)
        self._drift = DriftWatch()

        self._replacement_rounds, self._masks_truncated = replacement_rounds, masks_truncated
        self._replaced = (-1, 0)
        """The last step of which groups were replaced, and how often they were."""

        self._taken: dict[int, tuple[TrajectoryId, ...]] = {}
        """The trajectories that were trained and are not committed yet, by step."""
        self._committed: deque[str] = deque(maxlen=REMEMBERED_STEPS * groups_per_step)
        """The groups that this learner committed last."""
        self._committed_step = claim.committed_step
        """Earlier learners had committed the steps below it when this one took the run over."""

        self._waited_s: tuple[float, ...] = ()
        self._counted_calls, self._counted_s = 0, 0.0
        """Calls to the broker, and their time, as of the last `broker_calls`."""

        self._publication_state = PublicationState()
        self._promised_to = 0
        """Replayed steps below it were committed: the broker has forgotten them, so only the log can give them."""

    def replay(self, steps: range) -> None:
        """Trains these steps from the log, as the broker has settled or lost their batches."""
        self._promised_to = min(steps.stop, self._committed_step)
        with suppress(StopRequested):
            self._replay(steps)

    def feed(self) -> None:
        """Feeds prompts before workers get the first weights; otherwise workers would not begin with the oldest
        ones."""
        with suppress(StopRequested):
            self._retries.retry_until_available(self._feed.keep_ahead)

    def take(
        self, step: int, meanwhile: Callable[[], None] | None = None, *, may_wait: bool = True
    ) -> TakenBatch | WaitReason:
        """The batch of `step`, waiting for it, or what the loop must do first. However often the caller asks, a step
        gets the same batch; one without groups means that nothing will come. Raises StopRequested.

        It calls `meanwhile` again and again while it waits. Without `may_wait` it answers FOR_DEVICE instead.
        """
        with self._retries.patience(PATIENCE_S):
            try:
                return self._take(step, meanwhile, may_wait)
            except WaitTimeout:
                return WaitReason.FOR_RANKS

    def _take(self, step: int, meanwhile: Callable[[], None] | None, may_wait: bool) -> TakenBatch | WaitReason:
        self._retries.retry_until_available(self._feed.keep_ahead)
        while isinstance(found := self._logged(step) or self._pinned(step), NotReady):
            if self._should_stop():
                raise StopRequested
            publication, is_lost = self._publication_state.publication, self._is_lost(found)
            if publication is not None and (is_lost or publication.is_over or not may_wait):
                self.settle()
            elif is_lost:
                if not self._replay_what_is_lost(step):
                    self._publication_state.abandon()
                    return WaitReason.FOR_WEIGHTS
            elif found is NotReady.BYTES and self._taken:
                return WaitReason.FOR_COMMIT
            elif not may_wait:
                return WaitReason.FOR_DEVICE
            else:
                self._pause(meanwhile)
        self._taken[step] = tids_of(found.groups)
        self._waited_s = found.waited_s
        return found

    @property
    def waited_s(self) -> Sequence[float]:
        """For how long the groups taken last had waited for the learner; empty where they came from the log."""
        return self._waited_s

    @property
    def long_prompts(self) -> int:
        """The prompts that were passed over so far, since they leave no room for a response."""
        return self._cursor.long_prompts

    def broker_calls(self) -> tuple[int, float]:
        """Returns how many calls the broker has answered since this was asked last, and the sum of their times in
        seconds."""
        broker = self._blocking.broker
        calls, seconds = broker.answered, broker.answer_s
        counted_calls, counted_s = self._counted_calls, self._counted_s
        self._counted_calls, self._counted_s = calls, seconds
        return calls - counted_calls, seconds - counted_s

    def commit(self, step: int) -> None:
        """Lets the broker forget the batches of the steps below `step`, which a durable checkpoint contains.

        The cursor may have gone on since `mark_dropped`, and the checkpoint has not.
        """
        done = sorted({tid.group for s, tids in self._taken.items() if s < step for tid in tids})
        watermark = self._saved_watermark
        with suppress(StopRequested):  # the next learner commits what this checkpoint contains when it claims the run
            self.retry(lambda: self._blocking.broker.batches.commit(self.owner, step, done, watermark))
        self._taken = {s: tids for s, tids in self._taken.items() if s >= step}
        self._committed.extend(done)
        if (status := self.status()) is not None:
            self._drift.check(status)

    def mark_dropped(self) -> None:
        """Marks in the cursor, before a checkpoint, the groups that the broker has dropped by a stated rule."""
        with suppress(StopRequested):
            self._cursor.mark_trained(self.retry(self._blocking.broker.batches.settled_without_training))
        self._saved_watermark = self._cursor.watermark

    def publish(self, version: WeightVersion, tensors: Iterable[tuple[str, torch.Tensor]], probe: Probe) -> None:
        """Broadcasts and announces `version` beside the next step, once the version before is announced. It iterates
        the tensors once, whatever happens to the server; they may change afterwards."""
        self.settle()
        self._publication_state.publish(version, self._publisher.begin(version, self._publisher.gather(tensors), probe))

    def serve_base(self, tensors: Iterable[tuple[str, torch.Tensor]], adapter_scale: float) -> None:
        """Let workers pull the frozen weights, which adapters change: all versions from now on are adapters."""
        self._publisher.serve_base(tensors, adapter_scale)

    def settle(self) -> None:
        """Wait until the version that was published last is announced, or the learner is asked to stop."""
        if (publication := self._publication_state.publication) is None:
            return
        try:
            report = self._retries.retry_until_available(publication.report)
        except StopRequested:
            self._publication_state.give_up()
            return
        self._publication_state.announce()
        if report.failed:
            log.warning("Version %s: %s. Workers left out pull it.", report.version, report.failed)

    def report(self, metrics: StepMetrics) -> None:
        """Adds one step to the run's status."""
        with suppress(StopRequested):
            self.retry(lambda: self._blocking.broker.status.report_step(self.owner, metrics))

    def set_state(self, state: str) -> None:
        """Sets the state that the run's status shows: training, finished or stopped. Workers leave after the last
        two."""
        with suppress(StopRequested):
            self.retry(lambda: self._blocking.broker.status.set_state(self.owner, state))

    def status(self) -> RunStatus | None:
        """Returns the run's status; None where the server has forgotten the run, or is away while the learner stops."""
        with suppress(StopRequested, RunNotFoundError):
            return self.retry(self._blocking.broker.status.snapshot)
        return None

    def ask_to_evaluate(self, version: WeightVersion, prompts: Sequence[Prompt], samples: int, keep_s: float) -> None:
        """Asks workers, which keep it for `keep_s` seconds, for samples of held-out prompts with `version`, which is
        about to be published."""
        with suppress(StopRequested):
            self.retry(lambda: self._blocking.broker.evaluations.ask(self.owner, version, prompts, samples, keep_s))

    def evaluation(self, version: WeightVersion) -> EvaluationProgress | None:
        """Returns how far the evaluation of `version` is; None where there is none. Raises StopRequested."""
        return self.retry(lambda: self._blocking.broker.evaluations.progress(self.owner, version))

    def end_evaluation(self, version: WeightVersion, *, is_skipped: bool) -> None:
        """Forgets the evaluation of `version`, and counts it if it `is_skipped`: it gave no result."""
        with suppress(StopRequested):
            self.retry(lambda: self._blocking.broker.evaluations.end(self.owner, version, is_skipped=is_skipped))

    def retry(self, verb: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Repeats `verb` until the server has answered it. Raises StopRequested where the learner is asked to stop
        meanwhile."""
        return self._retries.retry(verb)

    def _logged(self, step: int) -> TakenBatch | None:
        """Returns the batch of a step that the log gives; None where the broker is to be asked."""
        if step >= self._publication_state.replayed_to:
            return None
        groups = self._log.read(step)
        if groups is None and step < self._promised_to:
            raise LostExperienceError(
                f"The experience log held step {step} when this learner started, and does not any more. Start it again"
                " with --resume: what the log lacks is then generated anew."
            )
        return None if groups is None else TakenBatch(step, tuple(groups))

    def _pinned(self, step: int) -> TakenBatch | NotReady:
        """Logs and returns the batch that the broker has pinned to `step`, or says why there is none yet."""
        batch = self.retry(lambda: self._blocking.broker.batches.take(self.owner, step, self._groups_per_step))
        if isinstance(batch, NotReady):
            return batch
        if self._log.tids(step) and not self._log.holds(step, batch.groups):
            return NotReady.REWIND  # the server does not have what was trained
        useless = [group for group in batch.groups if not is_informative(group, masks_truncated=self._masks_truncated)]
        if self._is_new(step) and self._replace(step, useless):
            return NotReady.GROUPS
        if batch.groups:
            self._log.record(step, batch.groups)
        return batch

    def _is_new(self, step: int) -> bool:
        """True where no earlier learner has trained the step; a replayed batch stays as it was."""
        published = self._publication_state.published
        return published is not None and published.step == step and not self._log.tids(step)

    def _replace(self, step: int, groups: Sequence[Group]) -> bool:
        """Drops these groups so that others take their places (DAPO's dynamic sampling); False where they stay."""
        rounds = self._replaced[1] if self._replaced[0] == step else 0
        if not groups or rounds >= self._replacement_rounds:
            return False
        names = [group.prompt.group for group in groups]
        self.retry(lambda: self._blocking.broker.batches.drop(self.owner, step, names))
        self._replaced = (step, rounds + 1)
        return True

    def _is_lost(self, found: NotReady) -> bool:
        """True where no worker will generate the batch before the learner has replayed it or published its weights. A
        version under way may be all that is missing, and cannot be published twice."""
        return found in (NotReady.REWIND, NotReady.ANNOUNCE) or self._publication_state.state is State.FORGOTTEN

    def _pause(self, meanwhile: Callable[[], None] | None) -> None:
        """Waits a little before the learner looks for the batch again."""
        self._retries.check_patience()
        if meanwhile is not None:
            meanwhile()
        time.sleep(POLL_S)
        self._retries.retry_until_available(self._feed.keep_ahead)

    def _replay_what_is_lost(self, step: int) -> bool:
        """Replays the batches that the broker has lost from the log, so that no worker generates them again; False
        where the log lacks them."""
        held = range(step, self._log.held_until(step))
        if held:
            log.warning("The broker has lost the batch of step %d; %d are replayed from the log.", step, len(held))
            self._replay(held)
        return bool(held)

    def _replay(self, steps: range) -> None:
        self._publication_state.replay(steps.stop)
        self._taken |= {step: self._log.tids(step) for step in steps}
        self._resend_state()

    def _reassert(self) -> None:
        log.warning("The broker's server was restarted; telling it what has been announced, taken and trained.")
        self._resend_state()
        self._publication_state.restart()
        self._feed.restart()

    def _resend_state(self) -> None:
        self.retry(
            lambda: self._blocking.broker.batches.reassert(
                self.owner,
                announced=self._publication_state.announced,
                committed_groups=list(self._committed),
                pinned=self._taken,
            )
        )
