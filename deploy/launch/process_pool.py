"""A pool of workers: processes of one kind, whose number may change while they run."""

import os
import secrets
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Self

from headway.broker.errors import SIGNALLED_EXIT
from headway.broker.schema.status import PoolInfo
from headway.deploy.recipe.pools import MAIN, SCORER
from headway.rollout_workers.health import Verdict

from .base import Command, Handle, Launcher

DRAIN_WORKER_S = 20.0
"""Seconds for a worker to drain, unless its pool has another time. Then it is killed."""
NAMED_AS_ENDED = 32
"""The most ended processes that a report names: it has to stay small."""
MOST_DEAD = 4096
"""The most dead processes of which the broker is told once an outage is over."""
HEALTHY_S = 60.0
"""Seconds after which a living worker has recovered, so that its restarts are counted anew."""
HEALED_S = 3600.0
"""Seconds after which a worker that its supervisor judges has recovered, so that verdicts are counted anew."""


class Dead(NamedTuple):
    """A process that has ended without handing its work back."""

    session: str
    is_scorer: bool
    """Whether it held requests for scores, and not samples."""


@dataclass
class Slot:
    """One role's place: the process in it, and its record."""

    command: Command
    child: Handle | None = None
    tag: str = ""
    session: str = ""
    started: float = 0.0
    failures: int = 0
    """Failures in a row."""
    bug: str = ""
    """The last words of its last failure, if that was a bug: another start may be the way out of it once."""
    restart_at: float = 0.0
    is_given_up: bool = False
    """Whether another start would not mend its failure, which need not be that of other workers."""
    killed_at: float = 0.0
    """The time at which a worker that was asked to leave is killed; 0: it was not asked."""

    worker: str = ""
    """Its process's name among all workers of the run, once that has reported."""
    verdict: Verdict | None = None
    """Why its process is to be replaced. Any thread may set it."""
    is_working: bool = False
    """Whether its process has reported that it works. Any thread may set it."""
    is_set_aside: bool = False
    """Whether its process was asked to hand its work back, so that another one can take its place."""
    was_signalled: bool = False
    """Whether its process has handed its work back at another's signal, and no process runs in its place yet."""
    verdicts: int = 0
    """Processes in a row that were set aside here."""

    def start(self, launcher: Launcher) -> None:
        """Start the process, or start it again."""
        self.worker, self.verdict, self.is_set_aside, self.killed_at = "", None, False, 0.0
        self.is_working = self.was_signalled = False
        self.tag, self.session = secrets.token_hex(4), secrets.token_hex(16)
        self.child = launcher.start(replace(self.command, tag=self.tag, session=self.session))
        self.started = time.monotonic()

    def set_aside(self, drain_s: float) -> None:
        """Ask its process to hand its work back and end within so many seconds."""
        assert self.child is not None
        self.verdicts = 1 if time.monotonic() - self.started > HEALED_S else self.verdicts + 1
        self.is_set_aside, self.killed_at = True, time.monotonic() + drain_s
        self.child.terminate()

    @property
    def is_leaving(self) -> bool:
        return self.killed_at > 0 and not self.is_set_aside

    @property
    def has_recovered(self) -> bool:
        """Whether its process has lived long enough to count failures anew."""
        return time.monotonic() - self.started > HEALTHY_S

    @property
    def is_running(self) -> bool:
        return self.child is not None and self.child.exit_code() is None

    @property
    def has_place(self) -> bool:
        """Whether its process runs, and not only waits for a place."""
        return self.is_running and self.child is not None and self.child.has_place()


@dataclass
class Pool:
    """The workers numbered 0, 1, 2, ... `command` returns the command that starts the worker of a number."""

    name: str
    count: int
    """The number of workers at the start."""
    command: Callable[[int], Command]
    drain_s: float = DRAIN_WORKER_S
    """Seconds for a worker to hand its work back and end. Then it is killed."""
    wanted: int = field(init=False)
    """The number of workers from now on. Any thread may set it."""
    slots: dict[int, Slot] = field(default_factory=dict, init=False)
    departed: int = field(default=0, init=False)
    """Workers that left by themselves since `wanted` changed, with their work handed back. They are not replaced."""
    is_run_over: bool = field(default=False, init=False)
    """Whether the run has ended, by the broker's record. Any thread may set it."""
    restarts: int = field(default=0, init=False)
    """Processes that were started in the place of others that ended."""
    dead: deque[Dead] = field(default_factory=lambda: deque(maxlen=MOST_DEAD), init=False)
    """Processes that ended without handing their work back; another thread tells the broker of them."""
    _ended: deque[tuple[str, float]] = field(default_factory=lambda: deque(maxlen=NAMED_AS_ENDED), init=False)
    """Tags of processes that ended, and when: others see at once that these workers are dead."""

    def __post_init__(self) -> None:
        self.wanted = self._followed = self.count

    @classmethod
    def of(cls, commands: Sequence[Command]) -> Self:
        """Return the pool of exactly these commands."""
        return cls(MAIN, len(commands), commands.__getitem__)

    def resize(self, launcher: Launcher, say: Callable[[str], None]) -> None:
        """Start the workers that are missing, or ask those that are too many to leave, the newest first."""
        if (wanted := self.wanted) != self._followed:
            say(f"Pool {self.name}: {wanted} worker{'s' * (wanted != 1)} wanted, {self._followed} before.")
            self._followed, self.departed = wanted, 0
        staying = [number for number, slot in self.slots.items() if not slot.is_leaving]
        for number in sorted(staying)[max(0, wanted - self.departed) :]:
            self._ask_to_leave(number)
        for _ in range(wanted - self.departed - len(staying)):
            number = next(number for number in range(len(self.slots) + 1) if number not in self.slots)
            self.slots[number] = Slot(self.command(number))
            self.slots[number].start(launcher)

    def restart(self, launcher: Launcher) -> None:
        """Start a process in each place whose own has ended, once its pause is over."""
        for slot in self.slots.values():
            if slot.child is None and not slot.is_given_up and time.monotonic() >= slot.restart_at:
                slot.start(launcher)
                self.restarts += 1

    def _ask_to_leave(self, number: int) -> None:
        slot = self.slots[number]
        if slot.child is None:  # it waits for its restart
            del self.slots[number]
            return
        slot.killed_at, slot.is_set_aside = time.monotonic() + self.drain_s, False
        slot.child.terminate()

    def reap(self, say: Callable[[str], None]) -> Iterator[Slot]:
        """Remove the slots of workers that have left, and yield the slots of those that failed or were set aside."""
        for number, slot in list(self.slots.items()):
            if slot.child is None:
                continue
            if slot.child.exit_code() is None:
                if 0 < slot.killed_at < time.monotonic():
                    say(f"{slot.command.name} did not leave within {self.drain_s:g} s and is killed.")
                    slot.child.kill()
                continue
            self._ended.append((slot.tag, time.monotonic()))
            self.note_dead([slot])
            has_left = slot.child.is_done() and not (slot.is_set_aside or slot.is_leaving or _is_signalled(slot.child))
            if has_left or slot.is_leaving:
                self.departed += has_left  # on purpose: the run is over, or `headway drain` asked it
                slot.child.kill()  # kills what it may have left in its session
                del self.slots[number]
            else:
                yield slot

    def note_dead(self, slots: Iterable[Slot]) -> None:
        """Keep those processes that ended without handing their work back."""
        ended = (slot for slot in slots if slot.child is not None and not slot.child.is_done())
        self.dead += [Dead(slot.session, is_scorer=slot.command.role == SCORER) for slot in ended]

    @property
    def has_left(self) -> bool:
        """Whether all workers that were not given up ended by themselves, or there are none and the run is over."""
        has_none = all(slot.is_given_up for slot in self.slots.values())
        return has_none and (self.departed > 0 or self.is_run_over)

    def info(self) -> PoolInfo:
        """Return the report for the broker."""
        slots = list(self.slots.values())  # a copy: another thread may change the slots meanwhile
        return PoolInfo(
            pool=self.name,
            host=socket.gethostname(),
            pid=os.getpid(),
            running=sum(slot.has_place and not slot.killed_at for slot in slots),
            working=sum(slot.has_place and slot.is_working and not slot.killed_at for slot in slots),
            leaving=sum(slot.child is not None and slot.killed_at > 0 for slot in slots),
            restarting=sum(slot.child is None and not slot.is_given_up for slot in slots),
            given_up=sum(slot.is_given_up for slot in slots),
            restarts=self.restarts,
            ended_s={tag: time.monotonic() - at for tag, at in list(self._ended)},
        )


def _is_signalled(child: Handle) -> bool:
    return child.exit_code() == SIGNALLED_EXIT
