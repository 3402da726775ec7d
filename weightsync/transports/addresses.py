"""The address and the port at which the learner listens and workers reach it: the configured address, or that of its
connection to the broker, and no other; a port within the range that a firewall lets through.
"""

import errno
import ipaddress
import resource
import socket
from contextlib import suppress
from urllib.parse import urlsplit

from headway.broker.errors import WeightSyncError

_LOOPBACK = "127.0.0.1"
_REDIS_PORT = 6379
_DISCARD_PORT = 9


def towards_broker(url: str, timeout_s: float = 5.0) -> str:
    """Return this machine's address on its connection to the broker; loopback for unix sockets."""
    parts = urlsplit(url)
    if parts.scheme == "unix" or not parts.hostname:
        return _LOOPBACK
    port = parts.port or _REDIS_PORT
    try:
        with socket.create_connection((parts.hostname, port), timeout=timeout_s) as connection:
            return str(connection.getsockname()[0])
    except OSError as error:
        raise WeightSyncError(
            f"no connection to the broker at {parts.hostname}:{port}, from which the learner's own "
            f"address is taken ({error}); set weights.host to the address at which workers reach this machine"
        ) from error


def address_towards(host: str) -> str:
    """Return the address of the interface that leads to `host`, to which nothing is sent. Raises WeightSyncError if
    there is none."""
    try:
        (family, kind, _, _, address), *_ = socket.getaddrinfo(host, _DISCARD_PORT, type=socket.SOCK_DGRAM)
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise WeightSyncError(
            f"no interface of this machine leads to the learner at {host} ({error}): set weights.host to an address of "
            "the learner's that every worker reaches"
        ) from error


def learner_address(host: str | None, broker_url: str) -> str:
    """Return the address of this machine at which the learner listens and workers connect.

    Raises WeightSyncError where `host` is no address of this machine, or stands for all of them.
    """
    if host is None:
        return towards_broker(broker_url)
    with listen(host) as listener:
        if ipaddress.ip_address(listener.getsockname()[0]).is_unspecified:
            raise WeightSyncError(
                f"weights.host={host} is every interface of this machine, and none that a worker could be told: name "
                "the one at which workers reach the learner, or leave it out"
            )
    return host


_WAITING = 128
"""Connections that the system holds until they are accepted."""
Ports = tuple[int, int]
"""The first and the last of a range."""


def listen(address: str, ports: Ports | None = None) -> socket.socket:
    """Return a listening socket at `address`, on the first free port of the range, or on any free port.

    Raises WeightSyncError where the address is not this machine's, or no port of the range is free.
    """
    first, last = ports or (0, 0)
    if not 0 <= first <= last <= 65535:
        raise WeightSyncError(
            f"weights.ports is [{first}, {last}]: name the first and the last port, as [40000, 40009]"
        )
    for port in range(first, last + 1):
        try:
            return _bound(address, port)
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES) or port == last == 0:
                raise _not_ours(address, error) from error
    raise WeightSyncError(
        f"none of the ports {first} to {last} at {address} is free for this process: widen weights.ports by one port "
        "for each learner of this machine, above 1023 unless it runs as root"
    )


def _bound(address: str, port: int) -> socket.socket:
    (family, *_), *_ = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
    return socket.create_server((address, port), family=family, backlog=_WAITING)


def _not_ours(address: str, error: OSError) -> WeightSyncError:
    return WeightSyncError(
        f"the learner cannot listen at weights.host={address} ({error}): set it to the address of one of this "
        "machine's interfaces at which workers reach it (`ip address` lists them), or leave it out, and the address of "
        "the way to the broker is taken; a public or translated address belongs to no interface"
    )


def is_loopback(listener: socket.socket) -> bool:
    """Return whether only processes of this machine can reach it."""
    return ipaddress.ip_address(listener.getsockname()[0]).is_loopback


def allow_many_files() -> None:
    """Raise this process's limit of open files as far as it may: each connection is an open file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(ValueError, OSError):  # some systems allow less than their hard limit; then the limit stays
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
