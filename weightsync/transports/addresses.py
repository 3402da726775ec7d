"""The address at which workers reach the learner: the configured one, or that of its connection to the broker."""

import ipaddress
import socket
from urllib.parse import urlsplit

from headway.broker.errors import WeightSyncError

from .listening import listen

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
