"""At which address the learner is reached: the configured one, else that of its way to the broker."""

import socket
from urllib.parse import urlsplit

from broker.errors import WeightSyncError

from .transports.collective import local_address

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


def learner_addresses(host: str | None, broker_url: str) -> tuple[str, str]:
    """(the address to tell workers, the local interface behind it)."""
    if host is None:
        own = towards_broker(broker_url)
        return own, own
    return host, host if _is_local(host) else towards_broker(broker_url)


def _is_local(host: str) -> bool:
    """A public or translated address leads here but belongs to no interface of this machine."""
    try:
        socket.create_server((host, 0)).close()
    except OSError:
        return False
    return True
