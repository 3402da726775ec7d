"""Routes take each command to the only server, or to the node of a cluster that holds its key.

The driver's own cluster client is not used: every verb would cost a round trip of its own, and one node's failure
would close the connections to all.
"""

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from itertools import count
from typing import Any, Protocol

from redis.crc import key_slot
from redis.exceptions import AskError, MovedError, RedisError
from redis.exceptions import ConnectionError as LostConnectionError

from headway.broker.keys import PREFIX, Keys

from .address import Address
from .round_trips import Command, Limit, RoundTrips

_SLOTS = 16384
_LONGEST_LOOK_S = 1.0


class Routes(Protocol):
    """The seam between a client and one server, or several."""

    keeps_order: bool
    """Whether the commands of one request are carried out in order."""

    async def send(self, commands: Sequence[Command]) -> list[Any]:
        """Returns the replies in order, with refusals among them as exceptions. Raises the error that kept a server
        from answering."""
        ...

    async def send_alone(self, command: Command) -> Any:
        """Returns the reply to a command that the server may take long to answer, on a connection of its own."""
        ...

    async def primaries(self) -> dict[str, RoundTrips]:
        """Returns every server that takes writes, each under the name of a key of the run that would lie on it."""
        ...

    async def close(self) -> None:
        """Cancels the commands that callers still wait for."""
        ...


def open_routes(address: Address, keys: Keys, timeout_s: float, limit: Limit) -> Routes:
    """Returns routes that are not connected yet. Raises BrokerError for unknown options of the URL."""
    return (Cluster if address.is_cluster else OneServer)(address, keys, timeout_s, limit)


class OneServer:
    """All keys on one server."""

    keeps_order = True

    def __init__(self, address: Address, keys: Keys, timeout_s: float, limit: Limit) -> None:
        self._server = RoundTrips(address.pool(timeout_s), timeout_s, limit)
        self._key = keys("durable")

    async def send(self, commands: Sequence[Command]) -> list[Any]:
        return await self._server.send(commands)

    async def send_alone(self, command: Command) -> Any:
        (reply,) = await self._server.send_alone([command])
        return reply

    async def primaries(self) -> dict[str, RoundTrips]:
        return {self._key: self._server}

    async def close(self) -> None:
        await self._server.close()


class Cluster:
    """Keys on several servers, by the cluster's slot map, which is read anew when it proves wrong.

    Commands that name no key of the run go to the server that holds the run's own slot.
    """

    keeps_order = False

    def __init__(self, address: Address, keys: Keys, timeout_s: float, limit: Limit) -> None:
        self._address = address
        self._keys = keys
        self._timeout_s = timeout_s
        self._limit = limit
        self._first = self._open(address)
        self._nodes = dict[tuple[str, int], RoundTrips]()
        self._by_slot: list[RoundTrips | None] = [None] * _SLOTS
        self._is_outdated = True
        self._looking = asyncio.Lock()

    async def send(self, commands: Sequence[Command]) -> list[Any]:
        await self._look()
        parts = defaultdict[RoundTrips, list[int]](list)
        for position, command in enumerate(commands):
            parts[self._node(self._key(command))].append(position)
        replies: list[Any] = [None] * len(commands)
        answers = await asyncio.gather(
            *(self._ask(node, [commands[position] for position in positions]) for node, positions in parts.items())
        )
        for positions, answer in zip(parts.values(), answers, strict=True):
            for position, reply in zip(positions, answer, strict=True):
                replies[position] = reply
        return replies

    async def send_alone(self, command: Command) -> Any:
        await self._look()
        try:
            (reply,) = await self._node(self._key(command)).send_alone([command])
        except (RedisError, OSError):
            self._is_outdated = True
            raise
        self._is_outdated |= isinstance(reply, AskError)  # or MovedError, a subclass
        return reply

    async def primaries(self) -> dict[str, RoundTrips]:
        await self._look()
        missing = {node for node in self._by_slot if node is not None}
        found = dict[str, RoundTrips]()
        shards = count()
        while missing:
            key = self._keys.blob(f"{next(shards)}/durable")
            node = self._node(key)
            if node in missing:
                missing.remove(node)
                found[key] = node
        return found

    async def close(self) -> None:
        for node in [self._first, *self._nodes.values()]:
            await node.close()

    def _key(self, command: Command) -> str:
        named = (part for part in command[1:] if isinstance(part, str) and part.startswith(PREFIX))
        return next(named, self._keys.verbs)

    def _node(self, key: str) -> RoundTrips:
        node = self._by_slot[key_slot(key.encode())]
        if node is None:
            self._is_outdated = True
            raise LostConnectionError(f"no node of the cluster serves the slot of {key}")
        return node

    async def _ask(self, node: RoundTrips, commands: Sequence[Command]) -> list[Any]:
        try:
            replies = await node.send(commands)
        except (RedisError, OSError):
            self._is_outdated = True
            raise
        return [
            await self._redirected(command, reply) if isinstance(reply, AskError) else reply
            for command, reply in zip(commands, replies, strict=True)
        ]

    async def _redirected(self, command: Command, refusal: AskError) -> Any:
        """Returns the reply of the node to which a refusal points. While a slot moves, that node has the key already;
        where the slot has moved, the next attempt reads the slot map anew.

        A script is not sent there: it would see only the keys that have moved already.
        """
        self._is_outdated |= isinstance(refusal, MovedError)
        if isinstance(refusal, MovedError) or command[0] in ("FCALL", "FCALL_RO"):
            return refusal
        _, reply = await self._at(refusal.host, refusal.port).send([("ASKING",), command])
        return reply

    async def _look(self) -> None:
        """Reads the slot map where it is outdated, from the first node that answers."""
        async with self._looking:
            if self._is_outdated:
                self._read(await self._slots())
                self._is_outdated = False

    async def _slots(self) -> Any:
        error: Exception = LostConnectionError("no node of the cluster answers")
        for node in [*{*self._by_slot} - {None}, self._first]:
            assert node is not None
            try:
                async with asyncio.timeout(min(_LONGEST_LOOK_S, self._timeout_s)):
                    (reply,) = await node.send([("CLUSTER", "SLOTS")])
            except (RedisError, OSError) as caught:  # TimeoutError is an OSError
                error = caught
                continue
            if not isinstance(reply, RedisError):
                return reply
            error = reply
        raise error

    def _read(self, slots: Any) -> None:
        self._by_slot = [None] * _SLOTS
        for first, last, (host, port, *_), *_ in slots:
            node = self._at((host or b"").decode(), port)
            self._by_slot[first : last + 1] = [node] * (last + 1 - first)

    def _at(self, host: str, port: int) -> RoundTrips:
        if (host, port) not in self._nodes:
            self._nodes[host, port] = self._open(self._address.at(host, port))
        return self._nodes[host, port]

    def _open(self, address: Address) -> RoundTrips:
        return RoundTrips(address.pool(self._timeout_s), self._timeout_s, self._limit)
