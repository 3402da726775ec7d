"""The transports by themselves: groups outside the default one, deadlines, damage, and a server's protection."""

import errno
import http.client
import math
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest
import torch
import torch.distributed
from msgspec.structs import replace

from headway.broker.errors import WeightSyncError
from headway.broker.schema import WeightVersion
from headway.broker.schema.weights import BroadcastGroup, Probe, WeightManifest
from headway.broker.user_code.import_paths import ImportRoots
from headway.weightsync.config import WeightsConfig
from headway.weightsync.deliveries import BufferPool
from headway.weightsync.limits import Deadline
from headway.weightsync.puller import Puller
from headway.weightsync.receiver import join
from headway.weightsync.sender import Sender
from headway.weightsync.tensors.staging import stage
from headway.weightsync.transports import http_pull
from headway.weightsync.transports.addresses import learner_address, listen
from headway.weightsync.transports.base import BroadcastGroupTransport, SupersededError, abilities_of
from headway.weightsync.transports.broadcast import check_transport, form_group, seal
from headway.weightsync.transports.http_pull import HttpPull, PullServer
from headway.weightsync.transports.rendezvous import BlockingStore, Rendezvous
from tests import plugged
from tests.weightsync.conftest import TIMEOUT_S
from tests.weightsync.worker_process import worker_info

V0, V1, V2, V3 = (WeightVersion(1, step) for step in range(4))
LOCAL = "127.0.0.1"
CPU = torch.device("cpu")
WEIGHTS = stage([("a", torch.full((5_000_000,), 1, dtype=torch.uint8)), ("b", torch.full((17,), 2.0))], 1024)
DATA = WEIGHTS.buckets


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a user's directory with a module of their own."""
    plugged.write(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("HEADWAY_IMPORT_PATH", str(tmp_path))
    monkeypatch.delitem(sys.modules, "plugged", raising=False)


def group(epoch: int = 1) -> BroadcastGroup:
    return BroadcastGroup(
        epoch=epoch,
        incarnation=1,
        transport="gloo",
        meeting=f"meeting {epoch}",
        learner=LOCAL,
        timeout_s=TIMEOUT_S,
        members=("w",),
        at_once=1,
    )


WHO = ("", "w")
"""The ranks of that group: the learner and a member."""
OWN = replace(group(), transport=plugged.TRANSPORT)


def manifest(version: WeightVersion, url: str = "") -> WeightManifest:
    return WeightManifest(
        version=version,
        tensors=WEIGHTS.tensors,
        buckets=WEIGHTS.sizes,
        fingerprints=WEIGHTS.fingerprints,
        probe=Probe(token_ids=[1], logprobs=[], tolerance=0.0),
        group_epoch=1,
        pull_url=url,
        pull_token="secret",
    )


def broadcast(
    blocking_store: BlockingStore,
    sent: tuple[torch.Tensor, ...],
    promised: WeightManifest,
    transport: str = "gloo",
    sealed_as: WeightVersion | None = None,
) -> tuple[object, tuple[tuple[str, ...], str]]:
    """Run one sender and one member, in threads.

    Returns (the member's version or its error, the sender's report).
    """
    groups: list[BroadcastGroup] = []
    put = threading.Event()

    def put_group(group: BroadcastGroup) -> None:
        groups.append(group)
        put.set()

    def receive() -> object:
        put.wait()
        joined = join(blocking_store, "w", groups[0], threading.Event())
        assert joined is not None
        try:
            manifest, landed = joined.receive(replace(promised, fingerprints=()), BufferPool(CPU), threading.Event())
            assert manifest == promised
            return landed.buckets
        except WeightSyncError as error:
            return str(error)
        finally:
            joined.close()

    config = WeightsConfig(transport=transport, broadcast_timeout_s=TIMEOUT_S)
    sender = Sender(blocking_store, 1, 0, LOCAL, config, put_group)
    with ThreadPoolExecutor(1) as threads:
        received = threads.submit(receive)
        assert sender.prepare(lambda: [worker_info("w", V0, 0)], promised.version) == (1, "")
        sealed = seal(sealed_as or promised.version, promised.fingerprints, CPU)
        report = sender.send(promised.version, lambda: (*sent, sealed))
        got = received.result()
    sender.close()
    return got, report


@pytest.mark.parametrize("transport", ["gloo", "ipc", plugged.TRANSPORT])
@pytest.mark.usefixtures("outside")
def test_bytes_arrive_without_a_default_group(blocking_store: BlockingStore, transport: str) -> None:
    assert not torch.distributed.is_initialized()
    got, report = broadcast(blocking_store, DATA, manifest(V1), transport)
    assert isinstance(got, tuple)
    assert all(torch.equal(a, b) for a, b in zip(got, DATA, strict=True))
    assert report == (("w",), "")


def test_bytes_arrive_beside_a_default_group(blocking_store: BlockingStore, tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        _, report = broadcast(blocking_store, DATA, manifest(V1))
        assert report == (("w",), "")
        torch.distributed.barrier()
    finally:
        torch.distributed.destroy_process_group()


def test_damage_on_the_way_is_found_and_told(blocking_store: BlockingStore) -> None:
    damaged = (DATA[0].clone(), DATA[1])
    damaged[0][4_999_999] = 7
    got, (reached, failed) = broadcast(blocking_store, damaged, manifest(V1))
    assert isinstance(got, str)
    assert "a in bucket 0 arrived damaged" in got
    assert reached == ()
    assert "w (a in bucket 0 arrived damaged" in failed


def test_the_fingerprints_of_another_version_are_refused(blocking_store: BlockingStore) -> None:
    got, (reached, _) = broadcast(blocking_store, DATA, manifest(V1), sealed_as=V0)
    assert got == f"version {V0} arrived where {V1} was offered"
    assert reached == ()


@pytest.mark.parametrize("transport", ["gloo", "ipc", plugged.TRANSPORT])
@pytest.mark.usefixtures("outside")
def test_a_member_that_never_comes_ends_with_the_deadline(blocking_store: BlockingStore, transport: str) -> None:
    for rank in range(2):
        of_kind = replace(group(rank), transport=transport)
        Rendezvous(blocking_store, of_kind).open()
        store = Rendezvous(blocking_store, of_kind, WHO[rank]).store_of(0)
        with pytest.raises(WeightSyncError, match=r"0\.3 s"):
            form_group(transport, store, rank, 2, LOCAL, Deadline(0.3))


def test_an_epoch_admits_each_name_once_and_nobody_after_its_end(blocking_store: BlockingStore) -> None:
    assert join(blocking_store, "w", group(), threading.Event()) is None  # no sender has opened it
    host = Rendezvous(blocking_store, group())
    host.open()
    assert host.await_members(["w"], Deadline(0.05)) == ("w",)
    host.decide(stands=False)
    assert join(blocking_store, "w", group(), threading.Event()) is None  # late: the answer is that the epoch is void
    Rendezvous(blocking_store, group(2)).open()
    guest = Rendezvous(blocking_store, group(2), "w")
    assert not Rendezvous(blocking_store, group(2), "another").check_in()
    assert guest.check_in()
    assert not guest.check_in()
    assert join(blocking_store, "w", group(2), threading.Event()) is None
    Rendezvous(blocking_store, group(2)).end()
    assert not guest.check_in()


def test_what_the_learner_has_said_no_member_says_otherwise(blocking_store: BlockingStore) -> None:
    host, guest = (Rendezvous(blocking_store, group(), who) for who in WHO)
    host.open()
    guest.decide(stands=True)
    assert guest._read([("", "verdict")]) == [b"open"]
    stores = [Rendezvous(blocking_store, replace(group(), transport="ipc"), who).store_of(0) for who in WHO]
    stores[1].set("socket", "/proc/1/fd/1/s")
    assert not stores[1].check(["socket"])
    stores[0].set("socket", "/proc/2/fd/2/s")
    assert stores[1].get("socket") == b"/proc/2/fd/2/s"


def test_a_store_in_the_broker_does_what_torch_wants_of_one(blocking_store: BlockingStore) -> None:
    Rendezvous(blocking_store, OWN).open()
    host, guest = (Rendezvous(blocking_store, OWN, who).store_of(0) for who in WHO)
    assert (host.add("n", 2), guest.add("n", 3)) == (2, 5)
    assert host.get("n") == b"5"
    guest.set("key", b"\x00\xff")
    assert guest.check(["key"])
    assert not host.check(["key", "other"])
    host.wait(["key"], timedelta(seconds=5))
    assert host.get("key") == b"\x00\xff"
    assert host.delete_key("key")
    assert not host.delete_key("key")
    with pytest.raises(RuntimeError, match=r"no message came under key within 0\.1 s"):
        host.wait(["key"], timedelta(seconds=0.1))
    with pytest.raises(RuntimeError, match="out of bounds"):
        guest.set("key", b"x" * 100_000)
    host.set("key", b"x" * 100_000)
    with pytest.raises(RuntimeError, match="no message came"):
        host.wait(["key"], timedelta(seconds=0.1))  # torch never sends so much


def test_a_member_waiting_for_the_verdict_can_be_cancelled(blocking_store: BlockingStore) -> None:
    cancelled = threading.Event()
    host = Rendezvous(blocking_store, group())
    host.open()
    with ThreadPoolExecutor(1) as threads:
        joining = threads.submit(join, blocking_store, "w", group(), cancelled)
        assert host.await_members(["w"], Deadline(10)) == ()
        cancelled.set()
        with pytest.raises(WeightSyncError, match="cancelled"):
            joining.result()


def test_nobody_connects_to_a_gloo_group_that_is_formed(blocking_store: BlockingStore) -> None:
    Rendezvous(blocking_store, group()).open()
    stores = [Rendezvous(blocking_store, group(), who).store_of(0) for who in WHO]
    before = listening()
    with ThreadPoolExecutor(2) as threads:  # of ports that are opened at once, all are left alone
        forming = [
            threads.submit(form_group, "gloo", store, rank, 2, LOCAL, Deadline(30)) for rank, store in enumerate(stores)
        ]
        members = [member.result() for member in forming]
    opened = sorted(listening() - before)
    assert len(opened) == 2
    strangers = [socket.socket() for _ in range(1100)]
    files = psutil.Process().num_fds()
    for number, stranger in enumerate(strangers):
        stranger.setblocking(False)
        assert stranger.connect_ex((LOCAL, opened[number % 2])) == errno.EINPROGRESS
    buckets = [torch.full((5000,), 7, dtype=torch.uint8), torch.empty(5000, dtype=torch.uint8)]
    for finish in [member.start(bucket, Deadline(30)) for member, bucket in zip(members, buckets, strict=True)]:
        finish()
    assert torch.equal(*buckets)
    assert psutil.Process().num_fds() == files
    assert all(stranger.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0 for stranger in strangers)
    for stranger in strangers:
        with pytest.raises(OSError, match="not connected"):
            stranger.getpeername()
        stranger.close()
    for member in members:
        member.close()


def listening() -> set[int]:
    """Return the ports on which this process listens."""
    return {end.laddr.port for end in psutil.Process().net_connections("tcp") if end.status == psutil.CONN_LISTEN}


@pytest.mark.parametrize("transport", ["gloo", "ipc", plugged.TRANSPORT])
@pytest.mark.usefixtures("outside")
def test_one_that_notices_deaths_does_so_before_the_deadline(blocking_store: BlockingStore, transport: str) -> None:
    of_kind = replace(group(), transport=transport)
    assert abilities_of(transport, ImportRoots()).notices_deaths

    Rendezvous(blocking_store, of_kind).open()

    def form(rank: int) -> BroadcastGroupTransport:
        store = Rendezvous(blocking_store, of_kind, WHO[rank]).store_of(0)
        return form_group(transport, store, rank, 2, LOCAL, Deadline(30))

    with ThreadPoolExecutor(2) as threads:
        learner, member = threads.map(form, range(2))
    waiting = member.start(DATA[0].clone(), Deadline(1000))
    learner.close()
    del learner  # gloo's connections close with the last reference
    with pytest.raises(WeightSyncError):
        waiting()
    member.close()


def test_a_group_of_a_transport_that_a_worker_does_not_import_is_not_joined(blocking_store: BlockingStore) -> None:
    store = Rendezvous(blocking_store, group(), "w").store_of(0)
    with pytest.raises(WeightSyncError, match=r"weights\.transport: 'subprocess:Popen' is not imported"):
        form_group("subprocess:Popen", store, 1, 2, LOCAL, Deadline(1))
    with pytest.raises(WeightSyncError, match=r"weights\.transport: there is no 'glo'; did you mean 'gloo'\?"):
        form_group("glo", store, 1, 2, LOCAL, Deadline(1))


def test_an_ipc_group_is_told_at_once_that_its_learner_is_gone(blocking_store: BlockingStore) -> None:
    ipc = replace(group(), transport="ipc")
    Rendezvous(blocking_store, ipc).open()

    def member() -> str:
        transport = form_group("ipc", Rendezvous(blocking_store, ipc, "w").store_of(0), 1, 2, LOCAL, Deadline(1e6))
        with pytest.raises(WeightSyncError, match="closed by another member") as told:
            transport.start(DATA[0].clone(), Deadline(1e6))()
        transport.close()
        return str(told.value)

    with ThreadPoolExecutor(1) as threads:
        joining = threads.submit(member)
        form_group("ipc", Rendezvous(blocking_store, ipc).store_of(0), 0, 2, LOCAL, Deadline(30)).close()
        assert "ipc broadcast of 5000192 bytes" in joining.result(30)


@pytest.mark.parametrize("name", ["nccl", "ucc"])
def test_transports_that_this_machine_lacks_say_what_to_do(name: str) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine may well have it")
    with pytest.raises(WeightSyncError, match=f"transport is {name}.*use weights.transport=gloo"):
        check_transport(name)


@pytest.mark.parametrize("host", [None, LOCAL, "127.0.0.2", "localhost"])
def test_the_learners_address(host: str | None) -> None:
    assert learner_address(host, "unix:///x") == host or LOCAL


def test_the_learners_address_is_that_of_its_way_to_the_broker() -> None:
    with listen(LOCAL) as server:
        port = server.getsockname()[1]
        assert learner_address(None, f"redis://user:pw@{LOCAL}:{port}/0") == LOCAL
    with pytest.raises(WeightSyncError, match=r"set weights\.host"):
        learner_address(None, f"redis://{LOCAL}:{port}")


@pytest.fixture
def pulls() -> Iterator[PullServer]:
    server = PullServer(LOCAL, "secret", TIMEOUT_S)
    yield server
    server.close()


def pull(promised: WeightManifest) -> tuple[torch.Tensor, ...]:
    return Puller(HttpPull(TIMEOUT_S), keeps_base=False).pull(promised, Deadline(math.inf)).buckets


def until(is_so: Callable[[], bool]) -> None:
    deadline = Deadline(240)
    while not is_so():
        deadline.check("what the test waits for")
        deadline.pause(0.01)


def fetch(server: PullServer, path: str, token: str = "secret") -> int:
    connection = http.client.HTTPConnection(LOCAL, urlsplit(server.url).port, timeout=240)
    connection.request("GET", path, headers={"Authorization": f"Bearer {token}"})
    with connection.getresponse() as response:
        return response.status


def test_pull_is_exact_and_ends_when_superseded(pulls: PullServer) -> None:
    pulls.serve(V0, DATA)
    pulls.serve(V1, DATA)
    got = pull(manifest(V1, pulls.url))
    assert all(torch.equal(a, b) for a, b in zip(got, DATA, strict=True))
    pulls.keep_only(V1, {})
    with pytest.raises(SupersededError):
        pull(manifest(V0, pulls.url))


@pytest.mark.parametrize("memory_is_reused", [False, True])
def test_who_is_in_the_middle_of_a_version_gets_it_to_its_end(
    memory_is_reused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pulls = PullServer(LOCAL, "secret", TIMEOUT_S, memory_is_reused=memory_is_reused)
    memory = tuple(bucket.clone() for bucket in DATA)
    pulls.serve(V0, memory)
    pull(manifest(V0, pulls.url))  # each bucket was read, and so was copied
    if memory_is_reused:
        pulls.release(V0)
        for bucket in memory:
            bucket.fill_(7)
    pulls.serve(V1, memory)
    pulls.keep_only(V1, {})
    got = pull(manifest(V0, pulls.url))
    assert all(torch.equal(a, b) for a, b in zip(got, DATA, strict=True))
    monkeypatch.setattr(http_pull, "PATIENCE_S", 0.0)
    until(lambda: not pulls._versions[V0].is_needed)
    pulls.keep_only(V1, {})
    with pytest.raises(SupersededError):
        pull(manifest(V0, pulls.url))
    pulls.close()


def test_a_few_older_versions_are_kept_for_those_who_read(pulls: PullServer) -> None:
    for version in (V0, V1, V2):
        pulls.serve(version, DATA)
        pull(manifest(version, pulls.url))
    pulls.serve(V3, DATA)
    pulls.keep_only(V3, {})
    for version in (V0, V1):
        pull(manifest(version, pulls.url))
    with pytest.raises(SupersededError):
        pull(manifest(V2, pulls.url))


def test_versions_that_were_read_make_room_for_one_that_is(pulls: PullServer) -> None:
    for version in (V0, V1):
        pulls.serve(version, DATA)
        pull(manifest(version, pulls.url))
    until(lambda: not any(pulls._versions[version].is_read_now for version in (V0, V1)))
    pulls.serve(V2, DATA)
    with pulls._versions[V2].being_read():
        pulls.serve(V3, DATA)
        pulls.keep_only(V3, {})
    for version in (V0, V2):  # the oldest of the remaining ones
        pull(manifest(version, pulls.url))
    with pytest.raises(SupersededError):
        pull(manifest(V1, pulls.url))


def test_a_version_is_needed_until_a_slow_reader_has_all_of_it(
    pulls: PullServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_pull, "PATIENCE_S", 0.0)
    pulls.serve(V0, DATA)
    with socket.create_connection((LOCAL, urlsplit(pulls.url).port or 0)) as reader:
        reader.sendall(b"GET /1/0/1 HTTP/1.0\r\nAuthorization: Bearer secret\r\n\r\n")
        until(lambda: b"\r\n\r\n" in reader.recv(1 << 20, socket.MSG_PEEK))  # the system's buffers hold all of it
        pulls.serve(V1, DATA)
        pulls.keep_only(V1, {})
        assert pulls._versions[V0].is_needed
    until(lambda: not pulls._versions[V0].is_needed)


def test_what_was_not_copied_in_time_is_served_no_more() -> None:
    pulls = PullServer(LOCAL, "secret", TIMEOUT_S, memory_is_reused=True)
    pulls.serve(V0, DATA)
    pulls.release(V0)
    with pytest.raises(SupersededError):
        pull(manifest(V0, pulls.url))
    pulls.close()


def test_what_is_forgotten_is_copied_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that seemed to fail announced the version, which a worker reads while its memory may be overwritten."""
    is_copying, goes_on, copy = threading.Event(), threading.Event(), http_pull.ServedVersion._copy

    def slow_copy(self: http_pull.ServedVersion, bucket: torch.Tensor) -> torch.Tensor | None:
        if bucket is memory[1]:
            is_copying.set()
            goes_on.wait(TIMEOUT_S)
        return copy(self, bucket)

    monkeypatch.setattr(http_pull.ServedVersion, "_copy", slow_copy)
    pulls = PullServer(LOCAL, "secret", TIMEOUT_S, memory_is_reused=True)
    memory = tuple(bucket.clone() for bucket in DATA)
    pulls.serve(V0, memory)
    fetch(pulls, "/1/0/0")
    assert is_copying.wait(TIMEOUT_S)
    late = pulls._versions[V0]
    pulls.forget(V0)
    memory[1].fill_(7)
    goes_on.set()
    assert late.read(1) is None
    pulls.close()


def test_pull_verifies(pulls: PullServer) -> None:
    pulls.serve(V0, (DATA[0], DATA[1] + 1))
    with pytest.raises(WeightSyncError, match="b in bucket 1 arrived damaged"):
        pull(manifest(V0, pulls.url))
    pulls.serve(V0, (DATA[0], DATA[0]))
    with pytest.raises(WeightSyncError, match="with 5000192 bytes instead of 256"):
        pull(manifest(V0, pulls.url))


def test_the_pull_server_answers_its_own_only(pulls: PullServer) -> None:
    pulls.serve(V0, DATA)
    assert fetch(pulls, "/1/0/0") == 200
    assert fetch(pulls, "/1/0/0", token="guess") == 401
    for path in (
        "/1/0/2",
        "/1/0",
        "/",
        "/../etc/passwd",
        "/1/0/-1",
        "/1/0/" + "9" * 500,
        "/a/b/c",
        "/1/0/²",
    ):
        assert fetch(pulls, path.encode("latin-1", "replace").decode("latin-1").replace("²", "%C2%B2")) == 404


def test_a_pull_from_a_dead_learner_fails_with_its_address(pulls: PullServer) -> None:
    pulls.serve(V0, DATA)
    pulls.close()
    with pytest.raises(WeightSyncError, match=pulls.url):
        pull(manifest(V0, pulls.url))


def test_a_cancelled_deadline_is_over() -> None:
    cancelled = threading.Event()
    deadline = Deadline(math.inf, cancelled)
    deadline.check("waiting")
    cancelled.set()
    assert deadline.is_over()
    with pytest.raises(WeightSyncError, match="waiting: cancelled"):
        deadline.check("waiting")
