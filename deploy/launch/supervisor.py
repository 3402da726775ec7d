"""Keeps one run's processes alive or stops them all: workers are restarted, a learner is not.

Everything happens in the main thread (see `parent_watch.py`), in one loop: look at the children, act, sleep a moment.
"""

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType

from headway.broker.errors import BUG_EXIT, LASTING_EXIT, SIGNALLED_EXIT, UNHEALTHY_EXIT, VERSION_EXIT, HeadwayError
from headway.deploy.printing import say

from .base import DRAIN_NOTICE, Command, Handle, Launcher
from .local_launcher import LocalLauncher
from .process_pool import Pool, Slot

POLL_S = 0.1
MAX_BACKOFF_S = 10.0
MAX_UNHEALTHY_BACKOFF_S = 600.0
UNHEALTHY_PLACE = (
    "{} processes in a row were set aside in this place, while others are well: look at its host and its GPU, or take"
    " a worker away with `headway scale -1`."
)


class RoleFailedError(HeadwayError):
    """A role keeps failing. The message has the role's own last error."""

    def __init__(self, message: str, exit_code: int = 1, *, needs_room: bool = False) -> None:
        """`needs_room`: whether a full disk is the reason."""
        super().__init__(message)
        self.exit_code = exit_code
        self.needs_room = needs_room


@dataclass
class Supervisor:
    """Runs pools of workers and a `learner` whose end ends the run. Without one it runs until all workers left."""

    pools: Sequence[Pool]
    learner: Command | None = None
    max_restarts: int = 5
    backoff_s: float = 0.5
    drain_notice: str = f"{DRAIN_NOTICE}, if it trains already"
    fails_when_stopped: bool = False
    """True for a stage without workers: a signal makes its process end with an error, which it prints itself."""
    say: Callable[[str], None] = say
    check: Callable[[], None] | None = None
    """Called now and then while all is well, to keep other processes alive. An error that it raises ends the run; while
    the learner stops, the error is said instead, and it is not called again."""
    launcher: Launcher = field(default_factory=LocalLauncher)

    def __post_init__(self) -> None:
        self._learner = Slot(self.learner) if self.learner is not None else None
        self._stops: list[signal.Signals] = []

    @property
    def restarts(self) -> int:
        """Restarts of all workers, for the summary."""
        return sum(pool.restarts for pool in self.pools)

    def run(self) -> int:
        """Supervise to the end: return 0 when all is done, 128 + signal when stopped. Raises RoleFailedError.

        Workers without a learner are done when all of them have handed their work back.
        """
        with self._signals():
            try:
                self._start()
                while not self._is_over():
                    if self.check is not None:
                        self.check()
                    self._watch_workers()
                    time.sleep(POLL_S)
                if self._stops:
                    self._drain()
                self._stop_workers()
            finally:
                self._kill_all()
        return 128 + self._stops[0] if self._stops and not self._workers_left() else 0

    def _start(self) -> None:
        if self._learner is not None:
            self._learner.start(self.launcher)
        for pool in self.pools:
            pool.resize(self.launcher, self.say)

    def _is_over(self) -> bool:
        if self._stops:
            return True
        if self._learner is None:
            return all(pool.has_left for pool in self.pools)
        return self._has_finished(self._learner)

    def _has_finished(self, learner: Slot) -> bool:
        assert learner.child is not None
        code = learner.child.exit_code()
        is_stopped = self._stops and (self.fails_when_stopped or code == -signal.SIGTERM)
        if code is not None and not learner.child.is_done() and not is_stopped:
            raise _failed(learner.child, "The run has been stopped.")
        return code is not None

    def _watch_workers(self) -> None:
        for pool in self.pools:
            for slot in pool.reap(self.say):
                assert slot.child is not None
                if slot.is_set_aside:
                    self._replace_set_aside(slot, slot.child)
                else:
                    self._restart_or_fail(slot, slot.child)
            for slot in pool.slots.values():
                if slot.verdict is not None and slot.is_running and not slot.killed_at:
                    slot.set_aside(pool.drain_s)
            pool.restart(self.launcher)
            pool.resize(self.launcher, self.say)

    def _restart_or_fail(self, slot: Slot, child: Handle) -> None:
        if child.exit_code() == LASTING_EXIT:
            raise _failed(child, f"Another start would not mend it: {self._what_has()} been stopped.")
        if child.exit_code() == VERSION_EXIT:
            self._give_up(slot, child)
            return
        if slot.has_recovered:
            slot.failures, slot.bug = 0, ""
        slot.failures += 1
        bug = _bug(child) if child.exit_code() == BUG_EXIT else ""
        if bug and bug == slot.bug and not self._is_anyone_well():
            raise _failed(child, f"So it did before: {self._what_has()} been stopped.")
        slot.bug = bug
        if child.exit_code() == UNHEALTHY_EXIT and self._is_anyone_well():
            self._replace(slot, child)
            return
        if slot.failures > self.max_restarts:
            after = f"after {self.max_restarts} restarts" if self.max_restarts else "and workers.max_restarts is 0"
            raise _failed(child, f"It failed again {after}: {self._what_has()} been stopped.")
        pause = min(self.backoff_s * 2 ** (slot.failures - 1), MAX_BACKOFF_S)
        self.say(_exit_report(child, f"Restarting it in {pause:g} s ({slot.failures} of {self.max_restarts})."))
        self._restart(slot, child, pause)

    def _restart(self, slot: Slot, child: Handle, pause: float) -> None:
        child.kill()  # kills what it may have left in its session
        slot.child, slot.restart_at = None, time.monotonic() + pause
        slot.was_signalled = child.exit_code() == SIGNALLED_EXIT

    def _replace(self, slot: Slot, child: Handle) -> None:
        """Start another process in its place, after longer and longer pauses where those become unhealthy too. The run
        goes on with the other workers."""
        pause = min(self.backoff_s * 2 ** (slot.failures - 1), MAX_UNHEALTHY_BACKOFF_S)
        remedy = f" {UNHEALTHY_PLACE.format(slot.failures)}" if slot.failures > self.max_restarts else ""
        self.say(_exit_report(child, f"Another process takes its place in {pause:g} s.{remedy}"))
        self._restart(slot, child, pause)

    def _replace_set_aside(self, slot: Slot, child: Handle) -> None:
        """Start another process in its place, after longer and longer pauses where those are set aside too."""
        assert slot.verdict is not None
        pause = min(self.backoff_s * 2 ** (slot.verdicts - 1), MAX_UNHEALTHY_BACKOFF_S)
        remedy = f" {UNHEALTHY_PLACE.format(slot.verdicts)}" if slot.verdicts > self.max_restarts else ""
        self.say(
            f"{slot.command.name} was set aside ({slot.verdict.rule}): {slot.verdict.reason}.\n"
            f"Another process takes its place in {pause:g} s.{remedy}"
        )
        self._restart(slot, child, pause)

    def _is_anyone_well(self) -> bool:
        """Whether any worker runs that has not failed lately. If none does, the cause is not one worker's."""
        return any(slot.is_running and (slot.failures == 0 or slot.has_recovered) for slot in self._workers())

    def _give_up(self, slot: Slot, child: Handle) -> None:
        """Start it never again. Raises RoleFailedError where no worker is left, and none has ended as it should."""
        child.kill()  # kills what it may have left in its session
        slot.child, slot.is_given_up = None, True
        if all(slot.is_given_up for slot in self._workers()) and not any(pool.departed for pool in self.pools):
            raise _failed(child, f"No worker is left: {self._what_has()} been stopped.", VERSION_EXIT)
        self.say(_exit_report(child, "Restarting it cannot mend this. The other workers go on without it."))

    def _what_has(self) -> str:
        return "the run has" if self._learner is not None else "the workers of this command have"

    def _drain(self) -> None:
        if self._learner is None or self._learner.child is None:
            return
        self.say(f"Stopping: {self.drain_notice}. Ctrl-C again stops at once.")
        self._learner.child.terminate()
        while not self._has_finished(self._learner) and len(self._stops) == 1:
            self._check_while_draining()
            time.sleep(POLL_S)

    def _check_while_draining(self) -> None:
        if self.check is None:
            return
        try:
            self.check()
        except HeadwayError as error:
            self.say(str(error))  # to raise it would kill the learner before its checkpoint
            self.check = None

    def _stop_workers(self) -> None:
        running = [slot.child for slot in self._workers() if slot.child is not None and slot.is_running]
        if not running or len(self._stops) > 1:
            return
        self.say(f"Stopping {len(running)} worker{'s' * (len(running) > 1)}: leases go back to the broker.")
        for child in running:
            child.terminate()
        drain_s = max(pool.drain_s for pool in self.pools)
        deadline = time.monotonic() + drain_s
        while any(child.exit_code() is None for child in running) and len(self._stops) < 2:
            if time.monotonic() > deadline:
                self.say(f"A worker did not stop within {drain_s:g} s and is killed.")
                return
            time.sleep(POLL_S)

    def _workers_left(self) -> bool:
        """Whether there was no learner to stop and every worker ended as it was asked to."""
        ends = [slot.was_signalled if slot.child is None else slot.child.is_done() for slot in self._workers()]
        return self._learner is None and all(ends)

    def _kill_all(self) -> None:
        if len(self._stops) > 1:
            self.say("Stopped at once. What was trained since the last checkpoint is trained again with --resume.")
        children = [slot.child for slot in self._all() if slot.child is not None]
        for child in children:
            child.begin_kill(is_patient=lambda: len(self._stops) < 2)
        for child in children:
            child.kill()
        for pool in self.pools:
            pool.note_dead(pool.slots.values())

    def _all(self) -> Iterator[Slot]:
        if self._learner is not None:
            yield self._learner
        yield from self._workers()

    def _workers(self) -> Iterator[Slot]:
        return (slot for pool in self.pools for slot in pool.slots.values())

    @contextmanager
    def _signals(self) -> Iterator[None]:
        def note(number: int, frame: FrameType | None) -> None:
            self._stops.append(signal.Signals(number))

        before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _bug(child: Handle) -> str:
    """Return the words of a bug, without the name of the file that has its traceback."""
    return " ".join(child.last_words().split()).partition(" The traceback is")[0]


def _failed(child: Handle, outcome: str, exit_code: int = 1) -> RoleFailedError:
    return RoleFailedError(_exit_report(child, outcome), exit_code, needs_room=child.needs_room())


def _exit_report(child: Handle, outcome: str) -> str:
    log = f" Its log: {child.command.log}" if child.command.log else ""
    return f"{child.command.name} {child.describe_exit()}: {child.last_words()}\n{outcome}{log}"
