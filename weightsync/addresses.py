"""At which address the learner is reached: the configured one, else that of its way to the broker."""

import ipaddress
from urllib.parse import urlsplit

from broker.errors import WeightSyncError

from .transports.collective import local_address
from .transports.listening import listen

_LOOPBACK = "127.0.0.1"
_REDIS_PORT = 6379


def towards_broker(url: str, timeout_s: float = 5.0) -> str:
    """This machine's address on its connection to the broker; loopback for unix sockets."""
    parts = urlsplit(url)
    if parts.scheme == "unix" or not parts.hostname:
        return _LOOPBACK
    port = parts.port or _REDIS_PORT
    try:
        return local_address(parts.hostname, port, timeout_s)
    except OSError as error:
        raise WeightSyncError(
            f"no connection to the broker at {parts.hostname}:{port}, from which the learner's own "
            f"address is taken ({error}); set weights.host to the address at which workers reach this machine"
        ) from error


def learner_address(host: str | None, broker_url: str) -> str:
    """At which the learner listens, and which workers are told: one of this machine's.

    Raises WeightSyncError where `host` is none of these, or all of them.
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
