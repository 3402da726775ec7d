"""A member of a broadcast group sends messages that torch would not survive: it is dropped, and the run goes on."""

import socket
import struct
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
from msgspec.structs import replace

from headway.broker import BlockingBroker
from headway.broker.errors import WeightSyncError
from headway.broker.schema.weights import BroadcastGroup
from headway.weightsync.config import WeightsConfig
from headway.weightsync.deliveries import BufferPool
from headway.weightsync.limits import Deadline
from headway.weightsync.receiver import join
from headway.weightsync.sender import Sender
from headway.weightsync.transports.broadcast import form_group, seal
from headway.weightsync.transports.rendezvous import BlockingStore, Rendezvous, message_format

from .conftest import TIMEOUT_S
from .test_transports import CPU, DATA, LOCAL, V0, V1, WEIGHTS, group, manifest
from .worker_process import HEARTBEAT_TTL_S, worker_info

HONEST, HOSTILE = worker_info("w", V0, 0), worker_info("v", V0, 0)


def sized(field: bytes) -> bytes:
    return struct.pack("<Q", len(field)) + field


def address(family: int = socket.AF_INET, host: str = LOCAL, port: int = 1) -> bytes:
    """Return an address as gloo writes it on Linux."""
    at = struct.pack("<H", family) + struct.pack(">H", port)
    if family == socket.AF_INET6:
        at += bytes(4)
    if family != socket.AF_UNIX:
        at += socket.inet_pton(family, host)
    return at.ljust(128, b"\0") + b"\xff" * 8


def word(at: bytes = address(), numbers: tuple[int, ...] = (0, 1, 2), name: bytes = b"host") -> bytes:
    return sized(name) + sized(at) + struct.pack(f"<{len(numbers)}Q", *numbers)


RIGHT = word()
WRONG = {
    "empty": b"",
    "a name longer than the message": struct.pack("<Q", 1 << 60) + RIGHT[8:],
    "no name": word(name=b""),
    "an odd name": word(name=b"\xff\n"),
    "a long name": word(name=b"a" * 256),
    "an address longer than the message": sized(b"host") + struct.pack("<Q", 1 << 40) + bytes(200),
    "a short address": word(address()[:-1]),
    "no numbers": word(numbers=()),
    "too few numbers": word(numbers=(0, 1)),
    "a large number": word(numbers=(0, 1, 1 << 63)),
    "half a number": RIGHT[:-4],
    "more behind it": RIGHT + b"x",
    "another family": word(address(socket.AF_UNIX)),
    "no port": word(address(port=0)),
    "all hosts": word(address(host="255.255.255.255")),
    "many hosts": word(address(host="224.0.0.1")),
    "many hosts of IPv6": word(address(socket.AF_INET6, "ff02::1")),
    "no host": word(address(host="0.0.0.0")),
    "text": b"127.0.0.1:80",
}


def test_the_words_of_a_real_group_are_taken(blocking_store: BlockingStore) -> None:
    of_three = replace(group(), members=("w",), at_once=1)
    Rendezvous(blocking_store, of_three).open()
    stores = [Rendezvous(blocking_store, of_three, who).store_of(0) for who in ("", "w")]
    with ThreadPoolExecutor(2) as threads:
        forming = [
            threads.submit(form_group, "gloo", store, rank, 2, LOCAL, Deadline(30)) for rank, store in enumerate(stores)
        ]
        for formed in forming:
            formed.result().close()
    for rank, store in enumerate(stores):
        assert message_format("gloo").fault(store.get(f"group/0/{rank}"), 2) == ""


@pytest.mark.parametrize("host", [LOCAL, "10.1.2.3", "::1", "fe80::1"])
def test_addresses_of_single_hosts_are_taken(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    assert message_format("gloo").fault(word(address(family, host)), 3) == ""


@pytest.mark.parametrize("kind", WRONG)
def test_words_of_another_form_are_refused(kind: str) -> None:
    assert message_format("gloo").fault(RIGHT, 3) == ""
    assert message_format("gloo").fault(WRONG[kind], 3)


@pytest.mark.parametrize(
    ("transport", "key", "right", "wrong"),
    [
        ("nccl", "group/0", bytes(128), [b"", bytes(127), bytes(129)]),
        ("ipc", "socket", b"/proc/12/fd/3/s", [b"", b"/tmp/s", b"/proc/12/fd/3/../s", b"/proc/12/fd/3/s\n"]),
    ],
)
def test_the_learner_alone_names_what_all_members_meet_at(
    transport: str, key: str, right: bytes, wrong: list[bytes]
) -> None:
    messages = message_format(transport)
    assert messages.sender(key) == 0
    assert messages.fault(right, 3) == ""
    assert all(messages.fault(other, 3) for other in wrong)


def test_roots_of_a_large_nccl_group_name_themselves() -> None:
    """torch asks several ranks for a name where there are more than 128."""
    assert message_format("nccl").sender("group/UniqueNCCLID:1") is None


@pytest.mark.parametrize("key", ["group/0/3", "group/0/", "group/0/-1", "group/0/x", "group/0/²", "group/" + "9" * 99])
def test_a_key_of_no_rank_is_heard_from_nobody_in_particular(blocking_store: BlockingStore, key: str) -> None:
    Rendezvous(blocking_store, group()).open()
    store = Rendezvous(blocking_store, group()).store_of(0)
    Rendezvous(blocking_store, group(), "w").store_of(0).set("group/0/1", RIGHT)
    with pytest.raises(RuntimeError, match=r"no rank|no message came"):
        store.wait([key], timedelta(seconds=0.05))


class Attack:
    """A learner's sender, an honest worker and a hostile one, both in threads."""

    def __init__(
        self, blocking_store: BlockingStore, blocking: BlockingBroker, say: Callable[[BroadcastGroup], None]
    ) -> None:
        for info in (HONEST, HOSTILE):
            blocking.call(blocking.broker.status.heartbeat(info, HEARTBEAT_TTL_S))
        self._blocking_store, self._say = blocking_store, say
        self._threads = ThreadPoolExecutor(4)
        self.groups = list[BroadcastGroup]()
        self.received: Future[bool]
        config = WeightsConfig(broadcast_timeout_s=10 * TIMEOUT_S)
        self.sender = Sender(blocking_store, 1, 0, LOCAL, config, self._put)

    def _put(self, formed: BroadcastGroup) -> None:
        self.groups.append(formed)
        self.received = self._threads.submit(self._receive, formed)
        if HOSTILE.worker in formed.members:
            self._threads.submit(self._attack, formed)

    def _attack(self, formed: BroadcastGroup) -> None:
        assert Rendezvous(self._blocking_store, formed, HOSTILE.worker).check_in()
        self._say(formed)

    def _receive(self, formed: BroadcastGroup) -> bool:
        try:
            joined = join(self._blocking_store, HONEST.worker, formed, threading.Event())
        except WeightSyncError:
            return False
        assert joined is not None
        offer = replace(manifest(V1), fingerprints=())
        _, landed = joined.receive(offer, BufferPool(CPU), threading.Event())
        joined.close()
        return all(torch.equal(a, b) for a, b in zip(landed.buckets, DATA, strict=True))

    def close(self) -> None:
        self.sender.close()
        self._threads.shutdown()


@pytest.mark.parametrize(
    "kind", ["empty", "no numbers", "a name longer than the message", "an address longer than the message"]
)
def test_a_word_that_would_end_the_learner_costs_its_speaker_the_group(
    blocking_store: BlockingStore, blocking: BlockingBroker, kind: str
) -> None:
    """torch reads beyond these messages, or asks for more memory than there is."""

    def say(formed: BroadcastGroup) -> None:
        rank = formed.members.index(HOSTILE.worker) + 1
        key = f"wave/0/group/0/{rank}"
        assert blocking_store.call(blocking_store.rendezvous.set(formed.meeting, HOSTILE.worker, key, WRONG[kind]))

    attack = Attack(blocking_store, blocking, say)
    epoch, told = attack.sender.prepare(lambda: [HONEST, HOSTILE], V1)
    assert [formed.members for formed in attack.groups] == [("v", "w"), ("w",)]
    assert epoch == attack.groups[-1].epoch
    assert "the message of v" in told
    sealed = seal(V1, WEIGHTS.fingerprints, CPU)
    assert attack.sender.send(V1, lambda: (*DATA, sealed)) == (("w",), "")
    assert attack.received.result()
    behind = replace(HOSTILE, version=V1)  # it says that it has pulled, and is in no group all the same
    assert attack.sender.prepare(lambda: [HONEST, behind], V1) == (epoch, "")
    attack.close()
