"""Finds out whether a server obeys clients without a password, evicts keys, and keeps its keys on a disk."""

from dataclasses import dataclass

from redis.exceptions import AskError, MovedError, NoPermissionError, RedisError

from headway.broker.errors import BrokerError

from .address import Address
from .connection import ANSWER_S, Connection
from .round_trips import exchange

_NO_RUN = "headway-check"


@dataclass(frozen=True)
class ServerTraits:
    """The settings of a server, or of all primaries of a cluster together; None where this user may not ask."""

    is_open: bool
    """Whether it obeys clients that give no password."""
    evictions: tuple[str, ...] | None
    """The policies, other than noeviction, by which it evicts keys once its memory is full."""
    has_file: bool | None
    """Whether it keeps an append-only file."""


async def inspect(url: str, *, timeout_s: float = ANSWER_S) -> ServerTraits:
    """Asks the server. Raises BrokerUnavailableError where no server answers, BrokerError for an invalid URL."""
    connection = Connection(url, _NO_RUN, timeout_s)
    try:
        await connection.execute("PING")
        said = await _info(connection)
    finally:
        await connection.close()
    is_open = await _obeys_strangers(Address.parse(url), connection.keys("config"), timeout_s)
    if said is None:
        return ServerTraits(is_open, None, None)
    policies = {info.get("maxmemory_policy", "noeviction") for info in said}
    return ServerTraits(
        is_open=is_open,
        evictions=tuple(sorted(policies - {"noeviction"})),
        has_file=all(info.get("aof_enabled") == "1" for info in said),
    )


async def may_work(url: str, run: str, *, timeout_s: float = ANSWER_S) -> bool:
    """Returns whether the server lets this user see samples of the run, as workers and the learner may. Raises as
    `inspect` does."""
    connection = Connection(url, run, timeout_s)
    try:
        await connection.execute("EXISTS", connection.keys("payload:"))
    except BrokerError as error:
        if isinstance(error.__cause__, NoPermissionError):
            return False
        raise
    finally:
        await connection.close()
    return True


async def _info(connection: Connection) -> list[dict[str, str]] | None:
    try:
        replies = await connection.on_primaries(("INFO",))
    except BrokerError as error:
        if isinstance(error.__cause__, NoPermissionError):
            return None
        raise
    return [fields_of(reply) for reply in replies]


def fields_of(info: bytes) -> dict[str, str]:
    """Returns a server's own facts (INFO) by name."""
    lines = (line.partition(":") for line in info.decode(errors="replace").splitlines())
    return {name: value for name, colon, value in lines if colon}


async def _obeys_strangers(address: Address, key: str, timeout_s: float) -> bool:
    """Returns whether the server obeys a client without a password. A unix socket is guarded by the modes of its file
    and folder instead."""
    if address.url.startswith("unix:"):
        return False
    pool = address.anonymous().pool(timeout_s)
    try:
        (reply,) = await exchange(pool, [("GET", key)], timeout_s)
    except (RedisError, OSError):
        return False
    finally:
        await pool.aclose()
    return isinstance(reply, (AskError, MovedError)) or not isinstance(reply, RedisError)
