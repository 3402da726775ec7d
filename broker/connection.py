"""The one place that talks to the server: scripts by digest, retries on a lost connection, errors translated.

Everything sent through here may be sent twice (a reply can be lost), so every verb is idempotent or harmless
when repeated.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import cache
from hashlib import sha1
from importlib.resources import files
from typing import Any, TypeVar
from urllib.parse import urlsplit, urlunsplit

import redis.asyncio as redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import (
    AuthenticationError,
    BusyLoadingError,
    NoScriptError,
    OutOfMemoryError,
    RedisError,
    ResponseError,
)
from redis.exceptions import ConnectionError as LostConnectionError
from redis.exceptions import TimeoutError as SlowServerError

from .errors import (
    BrokerError,
    BrokerUnavailableError,
    FencedError,
    ServerRestartedError,
    VersionRegressionError,
)
from .keys import Keys
from .owner import Owner

Argument = str | bytes | int | float
Command = tuple[Argument, ...]
T = TypeVar("T")

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 0.5
_CONNECTIONS = 32
_PASSING = ("MISCONF", "READONLY", "CLUSTERDOWN", "TRYAGAIN", "MASTERDOWN", "NOREPLICAS")
"""Refusals that end once somebody has mended the server: a full disk, a failover."""


@cache
def script_source(name: str) -> str:
    """A script with its shared prelude."""
    folder = files("broker") / "scripts"
    return (folder / "lib.lua").read_text() + (folder / f"{name}.lua").read_text()


@cache
def script_digest(name: str) -> str:
    """What EVALSHA calls the script."""
    return sha1(script_source(name).encode(), usedforsecurity=False).hexdigest()


def without_password(url: str) -> str:
    """The URL as it may be shown. Raises BrokerError where it is none."""
    url = url.partition("?")[0]  # a password may stand there, too
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise BrokerError(_no_url(url.rpartition("@")[2], error)) from error
    if "@" not in parts.netloc:
        return url
    return urlunsplit(parts._replace(netloc="***@" + parts.netloc.rpartition("@")[2]))


def _no_url(shown: str, error: ValueError) -> str:
    return f"{shown!r} is no broker URL ({error}). Use redis://host:port, rediss://host:port or unix:///path."


class Connection:
    """A pool of connections to one server, for one run."""

    def __init__(self, url: str, run: str, timeout_s: float) -> None:
        self.keys = Keys(run)
        self.run = run
        self.url = without_password(url)
        self.server_id = ""
        """The server that this client claimed the run on; learner verbs are refused by any other one."""
        self._timeout_s = timeout_s
        try:
            pool = redis.BlockingConnectionPool.from_url(
                url,
                max_connections=_CONNECTIONS,
                timeout=timeout_s,
                socket_timeout=timeout_s,
                socket_connect_timeout=timeout_s,
                health_check_interval=30,
                retry=Retry(NoBackoff(), 0),
            )
        except ValueError as error:
            raise BrokerError(_no_url(self.url, error)) from error
        self._redis: Any = redis.Redis(connection_pool=pool)

    async def close(self) -> None:
        await self._redis.aclose(close_connection_pool=True)

    async def execute(self, *command: Argument) -> Any:
        """One plain command."""
        return await self._attempt(lambda: self._redis.execute_command(*command))

    async def pipeline(self, commands: Sequence[Command], *, atomic: bool = False) -> list[Any]:
        """Several plain commands in one round trip."""
        return await self._attempt(lambda: self._pipeline(commands, atomic))

    async def script(self, name: str, *arguments: Argument, before: Sequence[Command] = ()) -> Any:
        """A script's reply; the commands `before` it go in the same round trip."""
        call: Command = ("EVALSHA", script_digest(name), 1, self.keys.meta, *arguments)
        try:
            return (await self._attempt(lambda: self._pipeline([*before, call], False)))[-1]
        except NoScriptError:
            await self.execute("SCRIPT", "LOAD", script_source(name))
            return (await self._attempt(lambda: self._pipeline([*before, call], False)))[-1]

    async def learner_script(
        self, name: str, owner: Owner, *arguments: Argument, before: Sequence[Command] = ()
    ) -> Any:
        """A script that only the run's owner may run, on the server that it claimed the run on."""
        return await self.script(name, owner.incarnation, owner.token, self.server_id, *arguments, before=before)

    async def scan(self, pattern: str) -> list[str]:
        """Names of all keys that match."""
        cursor, names = b"0", list[str]()
        while True:
            cursor, found = await self.execute("SCAN", cursor, "MATCH", pattern, "COUNT", 1000)
            names.extend(key.decode() for key in found)
            if int(cursor) == 0:
                return sorted(set(names))

    async def _pipeline(self, commands: Sequence[Command], atomic: bool) -> list[Any]:
        async with self._redis.pipeline(transaction=atomic) as pipe:
            for command in commands:
                pipe.execute_command(*command)
            replies: list[Any] = await pipe.execute(raise_on_error=False)
        for reply in replies:
            if isinstance(reply, RedisError):
                raise reply
        return replies

    async def _attempt(self, send: Callable[[], Awaitable[T]]) -> T:
        """Sends until it is answered or `timeout_s` has passed, and says what went wrong in our words."""
        deadline, pause_s = time.monotonic() + self._timeout_s, _FIRST_PAUSE_S
        while True:
            try:
                reply = await send()
                _refuse_lost_cancellation()
                return reply
            except AuthenticationError as error:
                raise BrokerUnavailableError(
                    f"The broker at {self.url} refuses our user or password ({error}): put them into the URL."
                ) from error
            except (LostConnectionError, SlowServerError, BusyLoadingError, OSError) as error:
                _refuse_lost_cancellation()
                if time.monotonic() + pause_s >= deadline:
                    raise self._unavailable(error) from error
            except NoScriptError:
                raise
            except ResponseError as error:
                raise self._translate(error) from error
            except RedisError as error:
                raise BrokerError(
                    f"Something at {self.url} answers, but not as a Redis or Valkey server ({error}): "
                    "check host and port of broker.url. Start a server with `headway broker`."
                ) from error
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _unavailable(self, error: Exception) -> BrokerUnavailableError:
        reason = str(error) or type(error).__name__
        return BrokerUnavailableError(
            f"No answer from the broker at {self.url} within {self._timeout_s:g} s ({reason}). "
            "Is it running? Start one with `headway broker`, or set broker.url."
        )

    def _translate(self, error: ResponseError) -> BrokerError:
        word, _, rest = str(error).partition(" ")
        match word:
            case "FENCED":
                return FencedError(
                    f"Another learner has taken run {self.run} over (incarnation {rest}), "
                    "or the run was deleted: this one must stop."
                )
            case "RESTARTED":
                return ServerRestartedError(
                    f"The server at {self.url} is no longer {self.server_id} but {rest}: "
                    "it restarted and may have lost its last second. Re-assert before going on."
                )
            case "REGRESSION":
                held = rest.split()
                return VersionRegressionError(
                    f"Run {self.run} has announced version ({held[0]}, {held[1]}) and been offered "
                    f"({held[2]}, {held[3]}); only newer weights of the run's owner can follow."
                )
            case "ADVANCED":
                return BrokerError(
                    f"Run {self.run} is already at step {rest}: resume it with --resume, where its checkpoints are, "
                    "choose another run.name, or start anew with --overwrite."
                )
            case "FULL":
                stored, cap = rest.split()
                return BrokerError(
                    f"Run {self.run} has stored {stored} bytes of samples, and one step needs more than "
                    f"broker.max_bytes={cap}: raise it, or lower learner.groups_per_step, learner.group_size or "
                    "sampling.max_new_tokens."
                )
        code = error.status_code or word
        if code in _PASSING:
            words = str(error) if code == word else f"{code} {error}"
            return BrokerUnavailableError(
                f"The server at {self.url} takes no commands now: {words} "
                "Once it is mended (a full disk? a failover?), learner and workers go on by themselves."
            )
        if isinstance(error, OutOfMemoryError):
            return BrokerError(
                f"The server at {self.url} is out of memory ({error}): raise its maxmemory, or lower broker.max_bytes."
            )
        return BrokerError(f"The server at {self.url} refused a command: {error}")


def _refuse_lost_cancellation() -> None:
    """Before Python 3.12 `asyncio.wait_for`, which the redis client uses, can swallow a cancellation."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
