"""The warnings of a run, in logs and on terminals: workers that were set aside, and steps that train nothing because
the rewards of each group are all equal. The learner's log also tells which process the run waits for once nothing has
moved for a while.
"""

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from headway.broker.client.broker import BlockingBroker
from headway.broker.errors import HeadwayError
from headway.broker.schema.status import Fault, RunStatus
from headway.broker.schema.step_metrics import StepMetrics

from .bottleneck import Reminder, read_status

MEANINGS = {
    "version": "is of another version of Headway",
    "stalled": "was set aside, as its engine hangs",
    "failing": "was set aside, as its engine fails again and again",
    "weights": "was set aside, as its engine does not hold the published weights",
    "silent": "was set aside, as it does not answer",
    "slow": "was set aside, as it is slow",
}
"""The rules' sentences on a worker, by the names of the rules."""


class FaultReporter:
    """Remembers which faults a reader was told."""

    def __init__(self) -> None:
        self._reported: tuple[Fault, ...] = ()

    def news(self, status: RunStatus) -> Iterator[str]:
        """Yields a sentence for each fault that the last look did not have."""
        told, self._reported = self._reported, status.faults
        yield from (fault_text(fault) for fault in status.faults if fault not in told)


def fault_text(fault: Fault) -> str:
    """Returns who was set aside, and why."""
    meaning = MEANINGS.get(fault.rule, "was set aside")
    return f"Worker {fault.worker} on host {fault.host} {meaning}: {fault.reason}"


FLAT_STEPS = 3
"""Steps in a row that trained nothing before it is said: one or two may be chance."""


class FlatRewardReporter:
    """Remembers whether a reader was told that nothing is trained."""

    def __init__(self) -> None:
        self._is_reported = False

    def news(self, steps: Sequence[StepMetrics]) -> str:
        """Returns the warning once, and again only after a step that trained something; else an empty string. `steps`
        are the last ones, in order."""
        text, was_reported = flat_reward_text(steps), self._is_reported
        self._is_reported = bool(text)
        return "" if was_reported else text


def flat_reward_text(steps: Sequence[StepMetrics]) -> str:
    """Returns the warning if the last steps of one learner trained nothing, or else an empty string."""
    last = steps[-FLAT_STEPS:]
    if len(last) < FLAT_STEPS or len({step.incarnation for step in last}) > 1 or not all(map(_trains_nothing, last)):
        return ""
    return (
        f"Nothing is learned: no group of the last {FLAT_STEPS} steps has rewards that differ (their mean is"
        f" {last[-1].reward_mean:.3g}), so nothing is trained: a sample is compared with the others of its group."
        " `headway report` shows samples with their rewards. If all fail, take easier prompts or let the reward tell"
        " better answers from worse ones; if all succeed, take harder prompts. A larger learner.group_size helps if an"
        " answer succeeds now and then."
    )


def _trains_nothing(step: StepMetrics) -> bool:
    """Return whether all groups are flat and give no gradient. A critic, a teacher or a loss without a baseline may
    train flat groups."""
    return step.flat_groups == 1 and step.grad_norm == 0


LOOK_S = 10.0
JOIN_S = 5.0
log = logging.getLogger(__name__)


@contextmanager
def log_warnings(
    broker: BlockingBroker, on_look: Callable[[RunStatus], None], every_s: float = LOOK_S
) -> Iterator[None]:
    """Look at the run every so many seconds, in a thread of its own, log who waits, and give each look to `on_look`."""
    over = threading.Event()
    thread = threading.Thread(target=_watch, args=(broker, on_look, over, every_s), name="waits", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(JOIN_S)


def _watch(broker: BlockingBroker, on_look: Callable[[RunStatus], None], over: threading.Event, every_s: float) -> None:
    reminder, told = Reminder(), FaultReporter()
    while not over.wait(every_s):
        with suppress(HeadwayError):  # the learner itself says that the server is away
            status, waiting = broker.call(read_status(broker.broker))
            on_look(status)
            for text in told.news(status):
                log.warning("%s", text)
            is_us = waiting is not None and waiting.why == "no learner"  # the server takes no writes, ours among them
            if news := reminder.news(None if is_us else waiting):
                log.warning("%s", news)
