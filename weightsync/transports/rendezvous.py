"""The rendezvous of an epoch's members in the broker: they check in, learn whether the group is formed, and acknowledge
versions. It consists of messages in the broker, by key:

in/{worker}                the random bytes by which the first process of this worker's name checked in
verdict                    open, then go | void
turn/{version}/{wave}      set once it is this wave's turn to receive the version (`staging: none`; not a swap turn)
ack/{version}/{worker}     empty, or what went wrong
wave/{wave}/...            torch's own keys of that wave's process group

Each message is taken from its sender alone: the learner sends `verdict` and `turn`, a worker its own `in` and `ack`,
and each rank its own part of torch's keys (`MessageFormat`).

`BrokerStore` is a torch store whose keys lie there, so a process group needs no further port to form, and only its
members and the learner write messages in it. torch calls it from its own threads while it forms a group, and not for
transfers afterwards. gloo and NCCL copy these messages into structures of C as they come, so one of another form can
end the process that reads it.
"""

import re
import secrets
import struct
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from ipaddress import ip_address
from typing import Any, Protocol, TypeVar

from torch.distributed import Store  # type: ignore[attr-defined]  # torch's stubs do not re-export it

from headway.broker.client.weights import LEARNER, NUMBERS, RendezvousStore
from headway.broker.errors import BrokerError, WeightSyncError
from headway.broker.schema import WeightVersion
from headway.broker.schema.weights import BroadcastGroup
from headway.weightsync.limits import Deadline

T = TypeVar("T")
LEARNER_RANK = 0
MAX_MESSAGE_BYTES = 1 << 16
"""In bytes. torch stores addresses and names of NCCL groups, which are shorter."""
_NCCL_ID_BYTES = 128
_SIZE = struct.Struct("<Q")
_ADDRESS_BYTES = 136
"""A `sockaddr_storage` and the number of a connection: `gloo::transport::tcp::Address`."""
_INET, _INET6 = 2, 10
_HOST_NAME = re.compile(rb"[A-Za-z0-9._-]{1,255}")
_LARGEST_NUMBER = 1 << 31
_IPC_PLACE = re.compile(rb"/proc/[0-9]{1,10}/fd/[0-9]{1,10}/s")


@dataclass(frozen=True)
class MessageFormat:
    """The form of the messages by which one transport's groups form."""

    sender: Callable[[str], int | None] = lambda key: None
    """Returns the rank that sends what lies under a key; None where any rank may."""
    fault: Callable[[bytes, int], str] = lambda message, size: ""
    """Returns what is wrong with a message that one rank has to send, in a group of so many ranks, or ""."""


def _rank_of(key: str) -> int | None:
    """Return the rank of gloo's key, which ends with it."""
    number = key.rpartition("/")[2]
    return int(number) if number.isascii() and number.isdigit() and len(number) < 10 else None


def _root_of(key: str) -> int | None:
    """Return the rank of NCCL's key, whose last part is a number. Where a group has several roots, each names itself
    under a key of another form."""
    return None if _rank_of(key) is None else LEARNER_RANK


def _gloo_fault(message: bytes, size: int) -> str:
    """Check gloo's message of one rank: its host's name and its address, each after its length, and the number of its
    connection to each rank (`gloo::transport::tcp::Rank`)."""
    name, rest = _cut(message)
    address, numbers = _cut(rest)
    if name is None or not _HOST_NAME.fullmatch(name):
        return "its host has no name"
    if address is None or len(address) != _ADDRESS_BYTES:
        return "it is no address"
    if len(numbers) != size * _SIZE.size:
        return f"it has not a number for each of {size} ranks"
    if any(number >= _LARGEST_NUMBER for (number,) in _SIZE.iter_unpack(numbers)):
        return "a number of a connection is out of bounds"
    return _address_fault(address)


def _cut(message: bytes) -> tuple[bytes | None, bytes]:
    """Return a field that begins with its length, or None where there is not so much, and what follows it."""
    if len(message) < _SIZE.size:
        return None, b""
    (length,) = _SIZE.unpack_from(message)
    rest = message[_SIZE.size :]
    return (None, b"") if length > len(rest) else (rest[:length], rest[length:])


def _address_fault(address: bytes) -> str:
    """Check a `sockaddr_storage`, to which gloo connects at once."""
    family, port = int.from_bytes(address[:2], "little"), int.from_bytes(address[2:4], "big")
    if family not in (_INET, _INET6):
        return f"its address is of family {family}"
    host = ip_address(address[4:8] if family == _INET else address[8:24])
    is_of_no_host = host.is_multicast or host.is_unspecified or (family == _INET and host.is_reserved)
    if not port or is_of_no_host:
        return f"nothing listens at {host}, port {port}"
    return ""


def _nccl_fault(message: bytes, size: int) -> str:
    return "" if len(message) == _NCCL_ID_BYTES else f"the name of an NCCL group has {_NCCL_ID_BYTES} bytes"


def _ipc_fault(message: bytes, size: int) -> str:
    return "" if _IPC_PLACE.fullmatch(message) else "it is no place of a socket"


_FORMATS = {
    "gloo": MessageFormat(_rank_of, _gloo_fault),
    "nccl": MessageFormat(_root_of, _nccl_fault),
    "ipc": MessageFormat(lambda key: LEARNER_RANK, _ipc_fault),
}


def message_format(transport: str) -> MessageFormat:
    """Return the form of a transport's messages. Members of a group of another kind (ucc, a class of the user's own)
    may each send any message, which is bounded in length alone."""
    return _FORMATS.get(transport, MessageFormat())


_STORE_PAUSES_S = 0.001, 0.02


class BrokerStore(Store):
    """A store over a part of one meeting's messages. Its methods raise RuntimeError, as those of torch's own stores do.

    A caller that passes it to torch must keep a reference as long as torch uses it: torch does not keep the Python
    object.
    """

    timeout: timedelta
    """An attribute that torch reads and sets."""

    def __init__(
        self,
        call: Callable[..., Any],
        rendezvous: RendezvousStore,
        name: str,
        part: str,
        *,
        who: str,
        ranks: Sequence[str],
        message_format: MessageFormat,
    ) -> None:
        """`who` is the one of `ranks` that this process is: LEARNER, which is rank 0, or a member's name. A message
        that `message_format` refuses makes the call fail that asked for it."""
        super().__init__()
        self._call = call
        self._rendezvous = rendezvous
        self._name = name
        self._part = part
        self._who = who
        self._ranks = tuple(ranks)
        self._format = message_format
        self.refused = ""
        """The member whose message was refused, if any was."""

    def set(self, key: str, value: str | bytes) -> None:
        data = value.encode() if isinstance(value, str) else value
        self._own(self._ask(self._rendezvous.set(self._name, self._who, self._part + key, data)) or None)

    def get(self, key: str) -> bytes:
        (value,) = self._await([key], self.timeout)
        return value

    def add(self, key: str, amount: int) -> int:
        return int(self._own(self._ask(self._rendezvous.add(self._name, self._who, self._part + key, amount))))

    def check(self, keys: Sequence[str]) -> bool:
        return None not in self._read(keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._await(list(keys), timeout or self.timeout)

    def delete_key(self, key: str) -> bool:
        return bool(self._ask(self._rendezvous.delete(self._name, self._who, self._sources(key))))

    def clone(self) -> "BrokerStore":
        """Return this store itself: it may be shared."""
        return self

    def _await(self, keys: list[str], timeout: timedelta) -> list[bytes]:
        end, pause_s = time.monotonic() + timeout.total_seconds(), _STORE_PAUSES_S[0]
        while True:
            found = [value for value in self._read(keys) if value is not None and len(value) <= MAX_MESSAGE_BYTES]
            if len(found) == len(keys):
                return found
            if time.monotonic() >= end:
                raise RuntimeError(f"no message came under {', '.join(keys)} within {timeout.total_seconds():.1f} s")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _STORE_PAUSES_S[1])

    def _read(self, keys: Sequence[str]) -> list[bytes | None]:
        """Return the message under each key, of the rank that has to send it."""
        asked = [source for key in keys for source in self._sources(key)]
        said = dict(zip(asked, self._ask(self._rendezvous.get(self._name, asked)), strict=True))
        return [self._first(key, said) for key in keys]

    def _first(self, key: str, said: dict[tuple[str, str], bytes | None]) -> bytes | None:
        sources = self._sources(key)
        for who, name in sources:
            message = said[who, name]
            if message is None or who == NUMBERS:
                continue
            if len(sources) == 1 and (fault := self._format.fault(message, len(self._ranks))):
                self.refused = who
                raise RuntimeError(f"the message of {who or 'the learner'} under {name} is refused: {fault}")
            return message
        return said.get((NUMBERS, self._part + key))

    def _sources(self, key: str) -> list[tuple[str, str]]:
        """Return who may send what lies under `key`, and its name in the meeting."""
        name, rank = self._part + key, self._format.sender(key)
        if rank is None:
            return [(who, name) for who in (*self._ranks, NUMBERS)]
        if rank >= len(self._ranks):
            raise RuntimeError(f"no rank of {len(self._ranks)} sends what lies under {name}")
        return [(self._ranks[rank], name)]

    def _own(self, said: T | None) -> T:
        if said is None:
            raise RuntimeError(f"{self._who} is no member of this group, or another process has its name")
        return said

    def _ask(self, coroutine: Any) -> Any:
        try:
            return self._call(coroutine)
        except BrokerError as error:
            raise RuntimeError(str(error)) from error


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
