"""A URL says where the server is and as which user a process logs in; the password may stand elsewhere."""

import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self
from urllib.parse import SplitResult, parse_qs, parse_qsl, quote, unquote, urlencode, urlsplit, urlunsplit

import redis.asyncio as redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from headway.broker.errors import BrokerError

from .round_trips import open_pool

PASSWORD = "HEADWAY_BROKER_PASSWORD"
PASSWORD_FILE = "HEADWAY_BROKER_PASSWORD_FILE"
PASSWORD_FILE_OPTION = "password_file"
"""The option of a URL that names the file with the password."""
_CLUSTER = "+cluster"
_SCHEMES = ("redis", "rediss", "unix", f"redis{_CLUSTER}", f"rediss{_CLUSTER}")
_SECRETS = ("password", "ssl_password")
_FILES = (PASSWORD_FILE_OPTION, "ssl_ca_certs", "ssl_ca_path", "ssl_certfile", "ssl_keyfile")
_CONNECTIONS = 8


def without_password(url: str) -> str:
    """Returns the URL without its password, to be shown. Raises BrokerError for an invalid URL."""
    url = url.partition("?")[0]  # a password may stand there, too
    netloc = _split(url).netloc
    return url.replace(netloc, "***@" + netloc.rpartition("@")[2], 1) if "@" in netloc else url


def without_secrets(url: str) -> str:
    """Returns the URL without passwords, to be stored: it leads to the same server if the passwords come from
    elsewhere."""
    parts = _split(url)
    if not parts.scheme:
        return url
    where = parts.netloc.rpartition("@")[2]
    where = f"{parts.username}@{where}" if parts.username else where
    query = urlencode([pair for pair in parse_qsl(parts.query) if pair[0] not in _SECRETS], safe="/")
    return f"{parts.scheme}://{where}{parts.path}" + (f"?{query}" if query else "")


def with_whole_paths(url: str) -> str:
    """Returns the URL with absolute paths of files, for a process in another working directory."""
    where, mark, query = url.partition("?")
    options = (option.partition("=") for option in query.split("&"))
    whole = (
        f"{name}={quote(os.path.abspath(os.path.expanduser(unquote(value))))}"
        if name in _FILES
        else name + sign + value
        for name, sign, value in options
    )
    return where + mark + "&".join(whole)


def _split(url: str) -> SplitResult:
    try:
        return urlsplit(url)
    except ValueError as error:
        raise _no_url(url.partition("?")[0].rpartition("@")[2], error) from error


@dataclass(frozen=True, repr=False)
class Address:
    """One server, or the first one of a cluster to ask."""

    url: str
    """The URL as the driver reads it."""
    password: str | None
    """None where the URL has one, or none is needed."""
    is_cluster: bool
    has_password_file: bool = False
    """Whether the password is a file's, which may be another one by the next start of this process."""

    @classmethod
    def parse(cls, url: str) -> Self:
        """Reads a URL. Raises BrokerError for an invalid one, and for a password file that cannot be read.

        The password: the URL's, else the content of the file that the URL names as `password_file`, else
        $HEADWAY_BROKER_PASSWORD, else the content of the file that $HEADWAY_BROKER_PASSWORD_FILE names. Over a unix
        socket, which its file's mode protects, only the URL's password is sent.
        """
        shown = without_password(url)
        parts = urlsplit(url)
        if parts.scheme not in _SCHEMES:
            raise _no_url(shown, ValueError(f"its scheme is {parts.scheme!r}"))
        options = _options(url)
        url = _without_option(url, PASSWORD_FILE_OPTION)
        is_given = bool(parts.password) or "password" in options
        file = None if is_given else _password_file(options, parts.scheme)
        password = None if is_given or parts.scheme == "unix" else os.environ.get(PASSWORD) or None
        return cls(
            url=url.replace(_CLUSTER, "", 1) if parts.scheme.endswith(_CLUSTER) else url,
            password=_read_password(file) if file else password,
            is_cluster=parts.scheme.endswith(_CLUSTER),
            has_password_file=file is not None,
        )

    def anonymous(self) -> Self:
        """Returns the address of the same server without a user and a password."""
        where = self.url.partition("?")[0]
        netloc = _split(where).netloc
        url = self.url.replace(netloc, netloc.rpartition("@")[2], 1) if "@" in netloc else self.url
        for option in ("username", "password"):
            url = _without_option(url, option)
        return replace(self, url=url, password=None)

    def at(self, host: str, port: int) -> Self:
        """Returns the address of another node with the same credentials and options; an empty host is this one's."""
        parts = urlsplit(self.url)
        user = parts.netloc.rpartition("@")[0] + "@" if "@" in parts.netloc else ""
        where = _bracketed(host or parts.hostname or "localhost")
        return replace(self, url=urlunsplit(parts._replace(netloc=f"{user}{where}:{port}")))

    def pool(self, timeout_s: float) -> redis.ConnectionPool:
        """Returns a pool that has made no connection yet and never retries by itself. Raises BrokerError for unknown
        options, and for certificates that cannot be used."""
        _check_certificates(self.url)
        try:
            pool = open_pool(
                self.url,
                password=self.password,  # yields to the URL's
                max_connections=_CONNECTIONS,
                timeout=timeout_s,
                socket_timeout=None,
                socket_connect_timeout=timeout_s,
                health_check_interval=30,
                retry=Retry(NoBackoff(), 0),
            )
            pool.connection_class(**pool.connection_kwargs)  # makes no connection yet, but reads the URL's options
            return pool
        except (ValueError, TypeError) as error:
            raise _no_url(without_password(self.url), error) from error


def _password_file(options: Mapping[str, str], scheme: str) -> str | None:
    """Returns the file with the password, of a URL that has none itself; None where it is no file's."""
    if path := options.get(PASSWORD_FILE_OPTION):
        return path
    return None if scheme == "unix" or os.environ.get(PASSWORD) else os.environ.get(PASSWORD_FILE) or None


def _read_password(path: str) -> str:
    try:
        password = Path(path).expanduser().read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise BrokerError(
            f"The broker's password cannot be read from {path} ({error}): take the URL that the server's `headway"
            " broker` prints for your role, and on another machine a copy of that file."
        ) from error
    if not password:
        raise BrokerError(f"The broker's password cannot be read from {path}: the file is empty.")
    return password


def _options(url: str) -> dict[str, str]:
    return {name: values[-1] for name, values in parse_qs(urlsplit(url).query).items()}


def _check_certificates(url: str) -> None:
    """Raises BrokerError for a missing or invalid file, which the driver would report as a server that does not
    answer."""
    options = _options(url)
    try:
        if authority := options.get("ssl_ca_certs"):
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(authority)
        for name in ("ssl_certfile", "ssl_keyfile"):
            if name in options:
                Path(options[name]).read_bytes()
    except OSError as error:  # also for a file that is no certificate
        named = ", ".join(f"{name}={options[name]}" for name in _FILES if name.startswith("ssl_") and name in options)
        raise BrokerError(
            f"A certificate that the URL of {without_password(url)} names cannot be used ({error.strerror or error}):"
            f" {named}. Name files in PEM format that this process may read."
        ) from error


def _without_option(url: str, name: str) -> str:
    where, _, query = url.partition("?")
    rest = "&".join(option for option in query.split("&") if option.partition("=")[0] != name)
    return where + (f"?{rest}" if rest else "")


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _no_url(shown: str, error: Exception) -> BrokerError:
    return BrokerError(
        f"{shown!r} is no broker URL ({error}). Use redis://host:port, rediss://host:port (TLS), "
        "redis+cluster://host:port, rediss+cluster://host:port or unix:///path."
    )
