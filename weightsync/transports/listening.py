"""Opens the learner's port: at the configured address and no other, within the range that a firewall lets through."""

import errno
import ipaddress
import resource
import socket
from contextlib import suppress

from headway.broker.errors import WeightSyncError

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
