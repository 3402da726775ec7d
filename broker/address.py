"""Where the server is, and who we are there: a URL, and a password that need not stand in it."""

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self
from urllib.parse import SplitResult, parse_qs, parse_qsl, urlencode, urlsplit, urlunsplit

import redis.asyncio as redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from .driver import open_pool
from .errors import BrokerError

PASSWORD = "HEADWAY_BROKER_PASSWORD"
PASSWORD_FILE = "HEADWAY_BROKER_PASSWORD_FILE"
_CLUSTER = "+cluster"
_SCHEMES = ("redis", "rediss", "unix", f"redis{_CLUSTER}", f"rediss{_CLUSTER}")
_SECRETS = ("password", "ssl_password")
_CONNECTIONS = 8


def without_password(url: str) -> str:
    """The URL as it may be shown. Raises BrokerError where it is none."""
    url = url.partition("?")[0]  # a password may stand there, too
    netloc = _split(url).netloc
    return url.replace(netloc, "***@" + netloc.rpartition("@")[2], 1) if "@" in netloc else url


def without_secrets(url: str) -> str:
    """The URL as it may be written down: it leads to the same server once the passwords come from elsewhere."""
    parts = _split(url)
    if not parts.scheme:
        return url
    where = parts.netloc.rpartition("@")[2]
    where = f"{parts.username}@{where}" if parts.username else where
    query = urlencode([pair for pair in parse_qsl(parts.query) if pair[0] not in _SECRETS], safe="/")
    return f"{parts.scheme}://{where}{parts.path}" + (f"?{query}" if query else "")


def _split(url: str) -> SplitResult:
    try:
        return urlsplit(url)
    except ValueError as error:
        raise _no_url(url.partition("?")[0].rpartition("@")[2], error) from error


@dataclass(frozen=True, repr=False)
class Address:
    """One server, or the first one of a cluster to ask."""

    url: str
    """As the driver reads it."""
    password: str | None
    """None where the URL has one, or none is needed."""
    is_cluster: bool

    @classmethod
    def parse(cls, url: str) -> Self:
        """Raises BrokerError for what is no broker URL, and for a password file that cannot be read.

        The password: the URL's, else $HEADWAY_BROKER_PASSWORD, else the content of the file that
        $HEADWAY_BROKER_PASSWORD_FILE names. A unix socket, which its file's mode protects, is sent none but the URL's.
        """
        shown = without_password(url)
        parts = urlsplit(url)
        if parts.scheme not in _SCHEMES:
            raise _no_url(shown, ValueError(f"its scheme is {parts.scheme!r}"))
        has_password = parts.password or parse_qs(parts.query).get("password") or parts.scheme == "unix"
        return cls(
            url=url.replace(_CLUSTER, "", 1) if parts.scheme.endswith(_CLUSTER) else url,
            password=None if has_password else _password(),
            is_cluster=parts.scheme.endswith(_CLUSTER),
        )

    def at(self, host: str, port: int) -> Self:
        """The same credentials and options at another node; an empty host is this one's."""
        parts = urlsplit(self.url)
        user = parts.netloc.rpartition("@")[0] + "@" if "@" in parts.netloc else ""
        where = _bracketed(host or parts.hostname or "localhost")
        return replace(self, url=urlunsplit(parts._replace(netloc=f"{user}{where}:{port}")))

    def pool(self, timeout_s: float) -> redis.ConnectionPool:
        """Of connections, none of them made yet; it never retries by itself."""
        try:
            return open_pool(
                self.url,
                password=self.password,  # yields to the URL's
                max_connections=_CONNECTIONS,
                timeout=timeout_s,
                socket_timeout=None,
                socket_connect_timeout=timeout_s,
                health_check_interval=30,
                retry=Retry(NoBackoff(), 0),
            )
        except ValueError as error:
            raise _no_url(without_password(self.url), error) from error


def _password() -> str | None:
    if password := os.environ.get(PASSWORD):
        return password
    path = os.environ.get(PASSWORD_FILE)
    if not path:
        return None
    try:
        return Path(path).expanduser().read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise BrokerError(f"The broker's password cannot be read from {path} ({error}).") from error


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _no_url(shown: str, error: ValueError) -> BrokerError:
    return BrokerError(
        f"{shown!r} is no broker URL ({error}). Use redis://host:port, rediss://host:port (TLS), "
        "redis+cluster://host:port, rediss+cluster://host:port or unix:///path."
    )
