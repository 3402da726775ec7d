"""The one place that talks to the server: verbs by name, retries on a lost connection, errors translated.

Every command may be sent twice, as a reply can be lost, so every verb is idempotent or harmless when repeated.
"""

import asyncio
import math
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

from redis.exceptions import (
    BusyLoadingError,
    OutOfMemoryError,
    RedisError,
    ResponseError,
)
from redis.exceptions import ConnectionError as LostConnectionError
from redis.exceptions import TimeoutError as SlowServerError

from headway.broker.errors import BrokerError, BrokerUnavailableError, ForeignRunError
from headway.broker.keys import RUNS, Keys
from headway.broker.schema import Owner

from .address import Address, without_password
from .function_library import Verbs, library, new_secret
from .round_trips import Argument, Command, RoundTrips
from .routes import open_routes
from .server_errors import ends_by_itself, foreign, is_lasting, translated, unavailable

__all__ = ["Argument", "Command", "Connection", "without_password"]

T = TypeVar("T")

ANSWER_S = 10.0
"""A server that has not answered for so long counts as away."""
_LAST_ANSWER_S = 1.0
"""Once an ending process has waited in vain, each of its calls waits at most so long for a server that hangs."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 0.5
_NOT_LOADED, _NO_LIBRARY = "Function not found", "Library not found"
_PAGE = 1000
"""Keys that a server looks at in one call of SCAN."""


@dataclass(frozen=True)
class KeyPage:
    """Some keys of one server."""

    server: RoundTrips
    cursor: bytes
    """The cursor of SCAN after these keys."""
    keys: tuple[bytes, ...]


class _Required:
    """The default of `absent`: there is no reply without a run, so the call waits for one."""


class Connection:
    """The connection to one run, on one server or on a cluster."""

    def __init__(self, url: str, run: str, timeout_s: float, session: str = "") -> None:
        self.keys = Keys(run)
        self.run = run
        self.url = without_password(url)
        self.identity = ""
        """The identity of the run that this client belongs to; empty until it has met one (see `join`)."""
        self.session = session or secrets.token_hex(16)
        """Proves to the server which worker calls: no other process leases, reports, sleeps or leaves in its name."""
        self.recipe = ""
        """A digest of the configuration that this worker or scorer obeys; empty where it does not say."""
        self.recipe_changed = asyncio.Event()
        """Set once the server refuses leases because the run has another one."""
        self.server_id = ""
        """The server that this client claimed the run on; learner verbs are refused by any other one."""
        self.answered_since_s = -math.inf
        """The monotonic time since which no command has failed or been refused; infinite between a failure and the next
        answer."""
        self.lacks_memory = asyncio.Event()
        """Set whenever the server refuses a command for want of memory; the garbage collection clears it."""
        self.answered = 0
        """Calls that were answered."""
        self.answer_s = 0.0
        """The sum of the times until they were answered, with what they waited for others to share a round trip."""
        self._timeout_s = timeout_s
        self._is_ending: Callable[[], bool] = lambda: False
        self._last_patience_s = self._patient_until_s = math.inf
        self._verbs: Verbs | None = None
        address = Address.parse(url)
        self._has_password_file = address.has_password_file
        self._routes = open_routes(address, self.keys, timeout_s, self._limit)

    async def close(self) -> None:
        await self._routes.close()

    def end_when(self, is_ending: Callable[[], bool], patience_s: float) -> None:
        """See `Broker.end_when`."""
        self._is_ending, self._last_patience_s, self._patient_until_s = is_ending, patience_s, math.inf

    async def execute(self, *command: Argument) -> Any:
        """Carries out one plain command and returns its reply."""
        return (await self.pipeline([command]))[0]

    async def execute_alone(self, *command: Argument) -> Any:
        """Carries out a command that makes the server wait, for less than this client's deadline, on its own
        connection."""
        return await self._attempt(lambda: self._send_alone(command))

    async def pipeline(self, commands: Sequence[Command]) -> list[Any]:
        """Carries out several plain commands in one round trip and returns their replies."""
        return await self._attempt(lambda: self._send(commands))

    async def script(
        self, name: str, *arguments: Argument, before: Sequence[Command] = (), absent: object = _Required
    ) -> Any:
        """Calls a verb and returns its reply. The commands `before` it are carried out first, where possible in the
        same round trip.

        `absent`: the reply where no learner has claimed the run; without it the call waits for a claim. Raises
        SchemaMismatchError where the learner has verbs of another version of Headway.
        """
        return await self._as_member(lambda: self._run(name, arguments, before, absent))

    async def untouched_script(self, name: str, *, absent: object) -> Any:
        """Calls a script as `script` does, without counting as use where the server can tell (from Redis 7.2 on)."""
        return await self._as_member(lambda: self._run(name, (), (), absent, is_untouched=True))

    async def _as_member(self, call: Callable[[], Awaitable[Any]]) -> Any:
        """Takes the identity of the run that has the name now, for a client that has none yet."""
        if not self.identity:
            await self.join()
        had_none = not self.identity
        try:
            return await self._attempt(call)
        except ForeignRunError:
            if not had_none:
                raise
            await self.join()  # a learner has claimed it meanwhile
            return await self._attempt(call)

    async def learner_script(
        self, name: str, owner: Owner, *arguments: Argument, before: Sequence[Command] = ()
    ) -> Any:
        """Calls a verb that only the run's owner may call, on the server on which it claimed the run."""
        return await self.script(name, owner.incarnation, owner.token, self.server_id, *arguments, before=before)

    async def join(self) -> str:
        """Joins the run that has the name now, and returns its identity, empty where there is none yet. Raises
        ForeignRunError where this client belongs to another run."""
        held = await self.execute("GET", self.keys("identity"))
        self.check_identity(held.decode() if held else "")
        return self.identity

    def check_identity(self, identity: str) -> None:
        """Checks that an answer comes from this client's run; a client without a run joins it. Raises
        ForeignRunError."""
        self.identity = self.identity or identity
        if identity and identity != self.identity:
            raise foreign(self.run, self.url, identity)

    async def load_verbs(self) -> str:
        """Loads the run's functions into the server before a claim, makes the run's secret where it has none, and lists
        the run. Returns the library that clients of the run have called until now, or ""."""
        secret, held = await self.pipeline([("GET", self.keys("secret")), ("GET", self.keys.verbs)])
        if secret is None:
            made = self.keys.secret or new_secret()
            place = self.keys("secret")
            _, secret = await self.pipeline([("SET", place, made, "NX"), ("GET", place)])
        self.keys.secret = secret.decode()
        current, _ = library(self.keys)
        previous = held.decode().partition(" ")[2] if held else ""
        try:
            await self._attempt(self._load)
            await self.execute("SADD", RUNS, self.run)
        except BrokerUnavailableError as error:
            if not isinstance(error.__cause__, OutOfMemoryError) or previous != current.library:
                raise
            self._verbs = current  # a full server has them already, and garbage is collected through them
        return "" if previous == current.library else previous

    async def unload_verbs(self, library: str) -> None:
        """Unloads a library. Clients that still call its functions get an error. Idempotent."""
        await self._attempt(lambda: self._on_primaries(lambda _, server: _unloaded(server, library)))

    async def on_primaries(self, command: Command) -> list[Any]:
        """Sends the command to every server that takes writes, and returns their replies."""
        sent = await self._attempt(lambda: self._on_primaries(lambda _, server: _replied(server, command)))
        return [reply for (reply,) in sent]

    async def scan(self, pattern: str) -> list[str]:
        """Returns the names of all keys that match, without those that are not UTF-8, which Headway never writes."""
        keys = {key.decode(errors="replace") async for page in self.pages(pattern) for key in page.keys}
        return sorted(key for key in keys if "\N{REPLACEMENT CHARACTER}" not in key)

    async def pages(self, pattern: str) -> AsyncIterator["KeyPage"]:
        """Yields all keys that match, server by server. A server looks at a few keys at a time, so no client is
        delayed.

        Raises BrokerUnavailableError where a server fails meanwhile.
        """
        for server in (await self._attempt(self._routes.primaries)).values():
            page = KeyPage(server, b"0", ())
            while True:
                cursor, keys = (await self.ask(page, [("SCAN", page.cursor, "MATCH", pattern, "COUNT", _PAGE)]))[0]
                page = KeyPage(server, cursor, tuple(keys))
                yield page
                if int(cursor) == 0:
                    break

    async def ask(self, page: "KeyPage", commands: Sequence[Command]) -> list[Any]:
        """Sends plain commands to the server that holds the keys of a page, and returns their replies."""
        return await self._attempt(lambda: _replied(page.server, *commands))

    async def make_durable(self, replicas: int, timeout_ms: int) -> bool:
        """Returns whether all earlier writes have reached the disks of all servers, and `replicas` replicas of each.

        Waits at most `timeout_ms`. Returns False after that, and where a server has neither an append-only file nor
        replicas to ask.
        """
        patience_ms = int(min(timeout_ms, 500 * self._timeout_s))  # below the socket's own deadline
        written = await self._attempt(
            lambda: self._on_primaries(lambda key, server: _written(server, key, replicas, patience_ms))
        )
        return all(written)

    async def _run(
        self,
        name: str,
        arguments: Sequence[Argument],
        before: Sequence[Command],
        absent: object,
        *,
        is_untouched: bool = False,
    ) -> Any:
        verbs = self._verbs or await self._find_verbs()
        if verbs is None:
            if absent is _Required:
                raise _NotLoadedError("no learner has claimed the run there")
            return absent
        call = (*verbs.call(name), 1, self.keys.of(self.identity), *arguments)
        if before and not self._routes.keeps_order:
            await self._send(before)
            before = ()
        try:
            return await self._untouched(call) if is_untouched else (await self._send([*before, call]))[-1]
        except ResponseError as error:
            if _NOT_LOADED not in str(error):
                raise
        if not self.keys.secret:
            self._verbs = None
            raise _NotLoadedError(f"its function {name} is not loaded: the run's learner does that, once it is up")
        await self._load()
        return (await self._send([*before, call]))[-1]

    async def _untouched(self, call: Command) -> Any:
        replies = await self._routes.send([("CLIENT", "NO-TOUCH", "ON"), call, ("CLIENT", "NO-TOUCH", "OFF")])
        return _accepted(replies[1:2])[0]

    async def _find_verbs(self) -> Verbs | None:
        (value,) = await self._send([("GET", self.keys.verbs)])
        self._verbs = None if value is None else Verbs.read(value, self.run)
        return self._verbs

    async def _load(self) -> Verbs:
        verbs, text = library(self.keys)
        await self._on_primaries(lambda _, server: _loaded(server, text))
        self._verbs = verbs
        return verbs

    async def _send(self, commands: Sequence[Command]) -> list[Any]:
        began_s = time.perf_counter()
        replies = await self._routes.send(commands)
        self.answered += 1
        self.answer_s += time.perf_counter() - began_s
        return _accepted(replies)

    async def _send_alone(self, command: Command) -> Any:
        (reply,) = _accepted([await self._routes.send_alone(command)])
        return reply

    async def _on_primaries(self, ask: Callable[[str, RoundTrips], Awaitable[T]]) -> list[T]:
        return [await ask(key, server) for key, server in (await self._routes.primaries()).items()]

    async def _attempt(self, send: Callable[[], Awaitable[T]]) -> T:
        """Sends again and again until the server answers or `timeout_s` has passed. Raises Headway's own errors."""
        began_s, pause_s = time.monotonic(), _FIRST_PAUSE_S
        while True:
            try:
                return await self._noted(send)
            except (LostConnectionError, SlowServerError, BusyLoadingError, OSError) as error:
                if time.monotonic() + pause_s >= self._until_s(began_s) or is_lasting(error):
                    waited_s = round(time.monotonic() - began_s, 1) if self._is_ending() else self._timeout_s
                    of_file = self._has_password_file
                    raise unavailable(error, url=self.url, timeout_s=waited_s, has_password_file=of_file) from error
            except ResponseError as error:
                if not ends_by_itself(error) or time.monotonic() + pause_s >= self._until_s(began_s):
                    raise translated(error, run=self.run, url=self.url, server_id=self.server_id) from error
            except RedisError as error:
                raise BrokerError(
                    f"Something at {self.url} answers, but not as a Redis or Valkey server ({error}): "
                    "check host and port of broker.url. Start a server with `headway broker`."
                ) from error
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _until_s(self, began_s: float) -> float:
        """Returns the time until which a call that began then is repeated."""
        if self._is_ending():
            self._patient_until_s = min(self._patient_until_s, time.monotonic() + self._last_patience_s)
        return min(began_s + self._timeout_s, self._patient_until_s)

    def _limit(self) -> AbstractAsyncContextManager[object]:
        """Returns what ends a call of an ending process that a server does not answer."""
        if not self._is_ending():
            return nullcontext()
        return asyncio.timeout(max(self._until_s(math.inf) - time.monotonic(), _LAST_ANSWER_S))

    async def _noted(self, send: Callable[[], Awaitable[T]]) -> T:
        try:
            reply = await send()
        except (RedisError, OSError) as error:
            self.answered_since_s = math.inf
            if isinstance(error, ResponseError) and not ends_by_itself(error):
                self._patient_until_s = math.inf  # a server that refuses is not away
            if isinstance(error, OutOfMemoryError):
                self.lacks_memory.set()
            raise
        self._patient_until_s = math.inf
        self.answered_since_s = min(self.answered_since_s, time.monotonic())
        return reply


def pairs(flat: Any) -> list[tuple[str, str]]:
    """Returns the fields of a hash from a reply of either version of the protocol."""
    items = flat.items() if isinstance(flat, dict) else zip(flat[::2], flat[1::2], strict=True)
    return [(name.decode(), value.decode()) for name, value in items]


def text(value: bytes) -> str:
    """Returns text that a worker wrote, whatever its bytes are."""
    return value.decode(errors="backslashreplace")


class _NotLoadedError(LostConnectionError):
    """The server lacks the run's functions: the learner loads them when it claims the run."""


def _accepted(replies: list[Any]) -> list[Any]:
    """Returns the replies, or raises the first refusal among them."""
    for reply in replies:
        if isinstance(reply, RedisError):
            raise reply
    return replies


async def _replied(server: RoundTrips, *commands: Command) -> list[Any]:
    return _accepted(await server.send(commands))


async def _loaded(server: RoundTrips, text: str) -> None:
    _accepted(await server.send([("FUNCTION", "LOAD", "REPLACE", text)]))


async def _unloaded(server: RoundTrips, library: str) -> None:
    (reply,) = await server.send([("FUNCTION", "DELETE", library)])
    if not isinstance(reply, ResponseError) or _NO_LIBRARY not in str(reply):
        _accepted([reply])


async def _written(server: RoundTrips, key: str, replicas: int, patience_ms: int) -> bool:
    """Returns whether earlier writes are on disk and on the replicas. It writes on a connection of its own before it
    asks, as a server waits only for the writes of the connection that asks."""
    written, on_disk, on_replicas = await server.send_alone(
        [("SET", key, "", "PX", 1000), ("WAITAOF", 1, 0, patience_ms), ("WAIT", replicas, patience_ms)]
    )
    _accepted([written, on_replicas])
    has_file = not isinstance(on_disk, ResponseError)  # else there is no file, or an older server
    return (on_disk[0] == 1 if has_file else replicas > 0) and on_replicas >= replicas
