"""The meeting of an epoch's members in the broker: they check in, learn whether the group is formed, and acknowledge
versions. It consists of messages in the broker, by key:

in/{worker}                the random bytes by which the first process of this worker's name checked in
verdict                    open, then go | void
turn/{version}/{wave}      set once it is this wave's turn to receive the version (`staging: none`; not a swap turn)
ack/{version}/{worker}     empty, or what went wrong
wave/{wave}/...            torch's own keys of that wave's process group

Each message is taken from its sender alone: the learner sends `verdict` and `turn`, a worker its own `in` and `ack`,
and each rank its own part of torch's keys (`store.MessageFormat`).
"""

import secrets
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from headway.broker.client.weights import LEARNER, RendezvousStore
from headway.broker.errors import BrokerError, WeightSyncError
from headway.broker.schema import WeightVersion
from headway.broker.schema.weights import BroadcastGroup
from headway.weightsync.limits import Deadline
from headway.weightsync.transports.store import BrokerStore

from .store import message_format

T = TypeVar("T")
_OPEN, _GO, _VOID = b"open", b"go", b"void"
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.002, 0.05
_MAX_MESSAGE_BYTES = 4096


class BrokerCall(Protocol):
    """Runs a coroutine of the broker for a thread, and returns its result or raises its error."""

    def __call__(self, coroutine: Coroutine[Any, Any, T], /) -> T: ...


@dataclass(frozen=True)
class BlockingStore:
    """The broker's rendezvous, usable from threads."""

    call: BrokerCall
    rendezvous: RendezvousStore


class Rendezvous:
    """The meeting of one epoch. Every call raises the broker's errors."""

    def __init__(self, blocking_store: BlockingStore, group: BroadcastGroup, who: str = LEARNER) -> None:
        """`who` is the worker that takes part in it, or the learner."""
        self._blocking_store = blocking_store
        self._group = group
        self._name = group.meeting
        self._who = who
        self._what = f"broadcast group {group.epoch}"

    def open(self) -> None:
        """Open the epoch. The learner does so before it tells members: one that finds no open epoch comes too late."""
        rendezvous = self._blocking_store.rendezvous
        self._blocking_store.call(rendezvous.create(self._name, self._group.members, {"verdict": _OPEN}))

    def check_in(self) -> bool:
        """Check this worker in. Returns False if a process of its name has already done so, as a restarted worker must
        not pose as its predecessor, or if the epoch is over."""
        own = secrets.token_bytes(8)
        said = self._blocking_store.call(
            self._blocking_store.rendezvous.set_once(self._name, self._who, _in_key(self._who), own)
        )
        return said == own

    def await_members(self, members: Iterable[str], deadline: Deadline) -> tuple[str, ...]:
        """Return the members that did not check in by the deadline."""
        keys = {worker: _in_key(worker) for worker in members}
        return tuple(worker for worker in keys if worker not in self._await_all(keys, deadline))

    def decide(self, stands: bool) -> None:
        """Tell all members that check in, now or later, whether the group will be formed."""
        self._write("verdict", _GO if stands else _VOID)

    def await_verdict(self, deadline: Deadline) -> bool:
        """Wait for the verdict. Returns whether the group is to be formed now."""
        for pause_s in _pauses():
            (verdict,) = self._read([(LEARNER, "verdict")])
            if verdict != _OPEN:
                return verdict == _GO
            deadline.check(f"{self._what}: the learner's message whether it is formed")
            deadline.pause(pause_s)
        raise AssertionError

    def begin(self, version: WeightVersion, wave: int) -> None:
        """Tell a wave of members that `version` is sent to it from now on."""
        self._write(_turn_key(version, wave), b"")

    def await_wave(self, version: WeightVersion, wave: int, deadline: Deadline) -> None:
        """Wait until `version` is sent to this wave."""
        for pause_s in _pauses():
            if self._read([(LEARNER, _turn_key(version, wave))]) != [None]:
                return
            deadline.check(f"{self._what}: this worker's turn to receive version {version}")
            deadline.pause(pause_s)

    def store_of(self, wave: int) -> BrokerStore:
        """Return the store for the process group of one wave."""
        blocking_store, group = self._blocking_store, self._group
        ranks = (LEARNER, *group.members[wave * group.at_once :][: group.at_once])
        return BrokerStore(
            blocking_store.call,
            blocking_store.rendezvous,
            self._name,
            f"wave/{wave}/",
            who=self._who,
            ranks=ranks,
            message_format=message_format(group.transport),
        )

    def acknowledge(self, version: WeightVersion, failure: str) -> None:
        """Tell the learner that this worker holds `version`, or (failure not empty) why it does not."""
        self._write(_ack_key(version, self._who), failure.encode()[:_MAX_MESSAGE_BYTES])

    def await_acknowledgements(
        self, version: WeightVersion, members: Iterable[str], deadline: Deadline
    ) -> dict[str, str]:
        """Return what each member answered by the deadline: "" for success. Members without an answer are absent."""
        answers = self._await_all({worker: _ack_key(version, worker) for worker in members}, deadline)
        return {worker: answer[:_MAX_MESSAGE_BYTES].decode(errors="replace") for worker, answer in answers.items()}

    def forget(self, version: WeightVersion, members: Iterable[str], waves: int) -> None:
        """Forget the messages about `version`, which all members have acknowledged."""
        said = [(worker, _ack_key(version, worker)) for worker in members]
        said += [(LEARNER, _turn_key(version, wave)) for wave in range(1, waves)]
        self._blocking_store.call(self._blocking_store.rendezvous.delete(self._name, LEARNER, said))

    def end(self) -> None:
        """End the epoch: a member that comes later finds nothing."""
        self._blocking_store.call(self._blocking_store.rendezvous.remove(self._name, self._group.members))

    def _await_all(self, keys: dict[str, str], deadline: Deadline) -> dict[str, bytes]:
        """Return the messages that these members have sent by the deadline, each under its key."""
        for pause_s in _pauses():
            said = dict(zip(keys, self._read(list(keys.items())), strict=True))
            if None not in said.values() or deadline.is_over():
                break
            deadline.pause(pause_s)
        return {who: message for who, message in said.items() if message is not None}

    def _write(self, key: str, value: bytes) -> None:
        self._blocking_store.call(self._blocking_store.rendezvous.set(self._name, self._who, key, value))

    def _read(self, messages: Sequence[tuple[str, str]]) -> list[bytes | None]:
        return self._blocking_store.call(self._blocking_store.rendezvous.get(self._name, messages)) if messages else []


def _pauses() -> Iterator[float]:
    """Yield ever longer pauses: many members may wait for one that does not come."""
    pause_s = _FIRST_PAUSE_S
    while True:
        yield pause_s
        pause_s = min(1.5 * pause_s, _LONGEST_PAUSE_S)


@contextmanager
def translated(what: str) -> Iterator[None]:
    """Wrap a worker's requests to its broker, and turn their errors into WeightSyncError, like all errors that keep it
    from a group."""
    try:
        yield
    except BrokerError as error:
        raise WeightSyncError(f"{what}: {error}") from error


def _in_key(worker: str) -> str:
    return f"in/{worker}"


def _turn_key(version: WeightVersion, wave: int) -> str:
    return f"turn/{version}/{wave}"


def _ack_key(version: WeightVersion, worker: str) -> str:
    return f"ack/{version}/{worker}"
