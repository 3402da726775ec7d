# mypy: disable-error-code="func-returns-value"
"""The learner's port against clients that belong to no worker, or do not read."""

import asyncio
import errno
import os
import resource
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from urllib.parse import urlsplit

import psutil
import pytest
import torch
from msgspec.structs import replace

from headway.broker.errors import WeightSyncError
from headway.weightsync.transports import http_connections
from headway.weightsync.transports.addresses import allow_many_files, learner_address, listen
from headway.weightsync.transports.certificate import new_identity, trusting
from headway.weightsync.transports.http_connections import MAX_UNAUTHENTICATED
from headway.weightsync.transports.http_pull import PullServer
from tests.weightsync.conftest import CONFIG, InProcessWorker, Learner, pull_then_receive
from tests.weightsync.test_transports import DATA, LOCAL, V0, listening, manifest, pull, until

IDLE = 1100
TIMEOUT_S = 30.0
GET = b"GET /1/0/0 HTTP/1.1\r\nAuthorization: Bearer secret\r\n\r\n"


@pytest.fixture(autouse=True)
def many_files() -> Iterator[None]:
    """Allow many open files, because this process has both ends of each connection."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    allow_many_files()
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.fixture(params=[False, True], ids=["plain", "tls"])
def pulls(request: pytest.FixtureRequest) -> Iterator[PullServer]:
    server = PullServer(LOCAL, "secret", TIMEOUT_S, tls=request.param)
    server.serve(V0, DATA)
    yield server
    server.close()


@pytest.fixture
def plain() -> Iterator[PullServer]:
    server = PullServer(LOCAL, "secret", TIMEOUT_S)
    assert server.url.startswith("http://")  # its address is a loopback one
    server.serve(V0, DATA)
    yield server
    server.close()


def connect(server: PullServer, says: bytes = b"") -> socket.socket:
    """Connect, through TLS if the client says anything and the server uses it."""
    connection = socket.create_connection((LOCAL, urlsplit(server.url).port or 0), timeout=TIMEOUT_S)
    if says and server.certificate:
        connection = trusting(server.certificate).wrap_socket(connection)
    connection.sendall(says)
    return connection


@contextmanager
def no_files() -> Iterator[list[int]]:
    """Use up this process's file descriptors; closing one of the yielded ones makes room for one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 10, hard))
    opened = []
    try:
        with suppress(OSError):
            while True:
                opened.append(os.open("/dev/null", os.O_RDONLY))
        yield opened
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in opened:
            os.close(descriptor)


def assert_pulled(server: PullServer) -> None:
    got = pull(replace(manifest(V0, server.url), pull_certificate=server.certificate))
    assert all(torch.equal(a, b) for a, b in zip(got, DATA, strict=True))


@pytest.mark.parametrize(("idle", "says"), [(IDLE, b""), (300, b"GET /1/0/0 HTTP/1.1\r\n"), (300, b"\x16\x03\x01")])
def test_who_connects_and_says_nothing_of_use_keeps_nobody_out(pulls: PullServer, idle: int, says: bytes) -> None:
    before = threading.active_count()
    with ExitStack() as open_ones:
        for _ in range(idle):
            open_ones.enter_context(connect(pulls, says))
        assert_pulled(pulls)
        until(lambda: kept_by(pulls) <= 4 * MAX_UNAUTHENTICATED + 1)
        assert threading.active_count() == before


def kept_by(server: PullServer) -> int:
    """Return the number of connections that the server's end has not closed."""
    port = urlsplit(server.url).port
    ends = psutil.Process().net_connections("tcp")
    return sum(end.laddr.port == port and end.status == psutil.CONN_ESTABLISHED for end in ends)


@pytest.mark.parametrize("strangers", [0, 40])
def test_a_learner_without_files_answers_who_has_the_secret(plain: PullServer, strangers: int) -> None:
    """A client without the secret makes room; where there is none, the client waits until there is a file again."""
    with ExitStack() as open_ones:
        for _ in range(strangers):
            open_ones.enter_context(connect(plain))
        until(lambda: kept_by(plain) == strangers)
        reader = open_ones.enter_context(socket.socket())
        with no_files() as opened:
            reader.connect((LOCAL, urlsplit(plain.url).port))
            reader.sendall(GET)
            if not strangers:
                reader.settimeout(0.5)
                with pytest.raises(TimeoutError):
                    reader.recv(1)
                os.close(opened.pop())
            reader.settimeout(TIMEOUT_S)
            assert reader.recv(12) == b"HTTP/1.1 200"
    assert_pulled(plain)


def test_who_does_not_read_costs_no_thread_and_keeps_nobody_out(pulls: PullServer) -> None:
    before = threading.active_count()
    with ExitStack() as open_ones:
        for _ in range(200):
            open_ones.enter_context(connect(pulls, GET))
        until(lambda: pulls._responder.answered == 200)
        assert_pulled(pulls)
        assert threading.active_count() == before
    until(lambda: pulls._responder.answered == 0)


def test_more_than_there_is_room_for_are_asked_to_come_again(
    pulls: PullServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_connections, "MOST", 5)
    readers = [connect(pulls, GET) for _ in range(5)]
    until(lambda: pulls._responder.answered == 5)
    with connect(pulls, GET) as late:
        answer = late.recv(1000)
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"\r\nRetry-After: 1\r\n" in answer
    leaving = threading.Timer(0.5, lambda: [reader.close() for reader in readers])
    leaving.start()
    assert_pulled(pulls)  # a retry succeeds
    leaving.join()


@pytest.mark.parametrize(
    "says",
    [
        b"POST /1/0/0 HTTP/1.1\r\nAuthorization: Bearer secret\r\n\r\n",
        b"\xff\xfe\r\n\r\n",
        b"\r\n\r\n",
        b"GET /1/0/0\r\n\r\n",
        b"GET /" + b"9" * 3000 + b" HTTP/1.1\r\nAuthorization: Bearer secret\r\n\r\n",
        b"GET /1/0/0 HTTP/1.1\r\n" + b"a: b\r\n" * 300 + b"\r\n",
    ],
)
def test_what_is_no_request_is_not_answered(pulls: PullServer, says: bytes) -> None:
    with connect(pulls, says) as connection, suppress(ConnectionResetError):
        assert connection.recv(100) == b""
    assert_pulled(pulls)


@pytest.mark.parametrize("secret", ["", "Bearer", "Bearer secre", "Bearer secret2", "Basic secret", "Bearer s\xe9cret"])
def test_a_wrong_secret_is_refused_before_anything_is_looked_up(
    pulls: PullServer, secret: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_up: list[str] = []
    monkeypatch.setattr(pulls, "find", looked_up.append)
    monkeypatch.setattr(pulls, "is_ready", looked_up.append)
    says = b"GET /1/0/0 HTTP/1.1\r\nAuthorization: " + secret.encode("latin-1") + b"\r\n\r\n"
    with connect(pulls, says) as connection:
        assert connection.recv(100).startswith(b"HTTP/1.1 401 ")
    assert looked_up == []


@pytest.mark.parametrize("knows", ["another certificate", "none"])
def test_whoever_does_not_show_the_learners_certificate_is_not_told_the_secret(knows: str) -> None:
    impostor = PullServer(LOCAL, "secret", TIMEOUT_S, tls=True)
    impostor.serve(V0, DATA)
    _, certificate = new_identity()
    promised = replace(manifest(V0, impostor.url), pull_certificate=certificate if knows != "none" else "")
    with pytest.raises(
        WeightSyncError, match="does not show the learner's certificate" if knows != "none" else "failed"
    ):
        pull(promised)
    assert impostor._responder.answered == 0
    impostor.close()


def test_a_server_without_tls_is_told_nothing(plain: PullServer) -> None:
    _, certificate = new_identity()
    with pytest.raises(WeightSyncError, match="failed"):
        pull(replace(manifest(V0, plain.url), pull_certificate=certificate))


def test_what_others_can_reach_is_encrypted() -> None:
    address = own_address()
    if address is None:
        pytest.skip("this machine has no address but loopback")
    server = PullServer(address, "secret", TIMEOUT_S)
    server.serve(V0, DATA)
    assert server.url.startswith(f"https://{address}:")
    assert_pulled(server)
    server.close()


def own_address() -> str | None:
    """Return the address of an interface that leads elsewhere."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        probe.connect(("198.51.100.7", 9))
        return str(probe.getsockname()[0])
    return None


@pytest.mark.parametrize("host", ["198.51.100.7", "no.such.host.invalid"])
def test_an_address_that_is_not_this_machines_is_refused(host: str) -> None:
    with pytest.raises(WeightSyncError, match=r"cannot listen at weights\.host="):
        learner_address(host, "unix:///x")


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_every_interface_is_no_address_for_workers(host: str) -> None:
    with pytest.raises(WeightSyncError, match="is every interface of this machine"):
        learner_address(host, "unix:///x")


def free_port() -> int:
    with listen(LOCAL) as found:
        return int(found.getsockname()[1])


def test_ports_are_taken_from_a_range() -> None:
    first = free_port()
    servers = [PullServer(LOCAL, "secret", TIMEOUT_S, ports=(first, first + 40)) for _ in range(3)]
    assert all(first <= (urlsplit(server.url).port or 0) <= first + 40 for server in servers)
    taken = urlsplit(servers[0].url).port or 0
    with pytest.raises(WeightSyncError, match=f"none of the ports {taken} to {taken} at {LOCAL} is free"):
        PullServer(LOCAL, "secret", TIMEOUT_S, ports=(taken, taken))
    for server in servers:
        server.close()


@pytest.mark.parametrize("ports", [(2, 1), (-1, 5), (60000, 70000)])
def test_a_range_that_is_none_is_refused(ports: tuple[int, int]) -> None:
    with pytest.raises(WeightSyncError, match=r"weights\.ports is \["):
        listen(LOCAL, ports)


def test_the_limit_of_open_files_is_raised() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard - 1, hard))
    try:
        allow_many_files()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_versions_reach_members_and_newcomers_beside_idle_connections_to_every_port(
    url: str, run_name: str, start_inside: Callable[[str], InProcessWorker]
) -> None:
    before = listening()
    learner, worker = Learner(url, run_name, replace(CONFIG, tls=True)), start_inside("w")
    await pull_then_receive(learner, worker)
    for _ in range(600):  # connections of an earlier test, or of a replaced group, may still be closing
        if len(ports := listening() - before) == 3:
            break
        await asyncio.sleep(0.05)
    assert len(ports) == 3  # the learner's port, and gloo's of the learner and of the worker
    with ExitStack() as open_ones:
        for port in ports:
            for _ in range(IDLE):
                stranger = open_ones.enter_context(socket.socket())
                stranger.setblocking(False)
                assert stranger.connect_ex((LOCAL, port)) == errno.EINPROGRESS
        report = await asyncio.to_thread(learner.publish)
        assert (report.members, report.failed) == (("w",), "")
        assert await worker.next() == learner.version
        assert await start_inside("newcomer").next() == learner.version
        assert kept_by(learner.publisher._pull_server) <= 4 * MAX_UNAUTHENTICATED + 4
    await asyncio.to_thread(learner.close)
