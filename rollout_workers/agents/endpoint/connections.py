"""Connections of clients, what they send and what they are sent: bounded in number, size and time."""

import asyncio
import resource
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, cast

import msgspec
from aiohttp import web

from .known_parts import KnownParts
from .problems import Problem, ProblemError, overloaded, unreadable

FULL = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 2\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


LINGER_S = 2.0
"""A client that is sending what is not read is heard for so long."""


class EndpointSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an endpoint allows its clients."""

    ignore_sampling: bool = False
    """Whether temperature, top_p, seed and the like that clients send are ignored; else those that differ from the
    run's are refused."""
    connections: int = 8192
    """No more at a time; at most half of the descriptors that the process may have."""
    calls: int = 4096
    """No more are answered at a time."""
    session_calls: int = 256
    """No more of one episode are answered at a time."""
    body_bytes: int = 16 * 2**20
    """The largest request."""
    body_values: int = 2_000_000
    """The most JSON values of a request, each of which takes memory."""
    bodies_bytes: int = 512 * 2**20
    """The most bytes of all requests that are being answered."""
    read_s: float = 60.0
    """In which a request's body must come."""
    write_s: float = 60.0
    """In which a client must take an answer."""
    idle_s: float = 75.0
    """After which a connection without a request is closed."""
    call_s: float = 3600.0
    """In which a call must be answered."""
    quiet_s: float = 15.0
    """After which a client that streams is told that its answer is still to come, again and again."""


class _Connection(web.RequestHandler):
    """A connection, which is refused where there are too many."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take it, or say that there are too many."""
        assert isinstance(self._manager, AgentServer)
        if self._manager.has_room:
            super().connection_made(transport)
        else:
            self._manager.refuse(cast(asyncio.Transport, transport))  # uvloop's are no subclass


class _Refused(asyncio.Protocol):
    """Hears a refused client out for an instant: one whose request is not read may lose the answer with it."""

    def __init__(self, transport: asyncio.Transport, refused: "set[_Refused]") -> None:
        self.transport = transport
        self._refused = refused
        refused.add(self)
        self._end = asyncio.get_running_loop().call_later(LINGER_S, transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the client."""
        self._end.cancel()
        self._refused.discard(self)


class AgentServer(web.Server):
    """An HTTP server that refuses connections beyond a number."""

    def __init__(
        self,
        answer: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]],
        settings: EndpointSettings,
        note_refused: Callable[[], None],
    ) -> None:
        super().__init__(
            answer,
            handler_cancellation=True,  # when the client leaves
            keepalive_timeout=settings.idle_s,
            lingering_time=LINGER_S,
            access_log=None,
            read_bufsize=2**16,
        )
        self._most = min(settings.connections, max(resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2, 16))
        self._note_refused = note_refused
        self._refused = set[_Refused]()

    def __call__(self) -> web.RequestHandler:
        """Return the protocol of a new connection."""
        return _Connection(self, loop=self._loop, **self._kwargs)

    @property
    def has_room(self) -> bool:
        """Whether one more connection is taken."""
        return len(self._connections) < self._most

    def refuse(self, transport: asyncio.Transport) -> None:
        """Tell a client that there are too many."""
        self._note_refused()
        transport.write(FULL)
        if len(self._refused) < max(self._most // 4, 1):
            transport.set_protocol(_Refused(transport, self._refused))
            transport.write_eof()
        else:
            transport.close()

    async def shutdown(self, timeout: float | None = None) -> None:
        """Close all connections, after so many seconds at most for those whose requests are being answered."""
        for refused in list(self._refused):
            refused.transport.abort()
        await super().shutdown(timeout)


class Bodies:
    """Reads the bodies of requests, each of which counts until it is answered."""

    def __init__(self, settings: EndpointSettings) -> None:
        self._settings = settings
        self._held_bytes = 0

    @asynccontextmanager
    async def read(self, request: web.BaseRequest, known: KnownParts | None = None) -> AsyncIterator[dict[str, Any]]:
        """Yield the JSON object of a request, with those parts that are `known` already. Raises ProblemError."""
        held = 0
        chunks = list[bytes]()

        def hold(chunk: bytes) -> None:
            nonlocal held
            chunks.append(chunk)
            held += len(chunk)
            self._held_bytes += len(chunk)
            self._check(held)

        try:
            await self._receive(request, hold)
            body = b"".join(chunks)
            chunks.clear()
            yield self._decoded(body, known or KnownParts())
        finally:
            self._held_bytes -= held

    async def _receive(self, request: web.BaseRequest, hold: Callable[[bytes], None]) -> None:
        self._check(request.content_length or 0)
        if request.headers.get("Expect", "").lower() == "100-continue":
            await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        try:
            async with asyncio.timeout(self._settings.read_s):
                async for chunk in request.content.iter_any():
                    hold(chunk)
        except TimeoutError as error:
            message = f"the request's body did not come within {self._settings.read_s:g} s"
            raise ProblemError(Problem(status=408, kind="slow", message=message)) from error
        except web.RequestPayloadError as error:
            raise unreadable("the request's body is damaged") from error

    def _check(self, size: int) -> None:
        if size > self._settings.body_bytes:
            raise too_large(f"a request may have {self._settings.body_bytes} bytes and no more")
        if self._held_bytes > self._settings.bodies_bytes:
            raise overloaded("the endpoint has too many large requests at once")

    def _decoded(self, body: bytes, known: KnownParts) -> dict[str, Any]:
        if sum(map(body.count, (b",", b"[", b"{"))) > self._settings.body_values:
            raise too_large(f"a request may have {self._settings.body_values} values and no more")
        try:
            return known.decoded(body or b"{}")
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise unreadable(f"the request's body is no JSON object that can be read: {error}"[:300]) from error


def too_large(message: str) -> ProblemError:
    """Return the error for a request that is larger than any may be."""
    return ProblemError(Problem(status=413, kind="too_large", message=message))


class ClientResponse:
    """The response to one request. What it has sent, the kernel has taken for the client."""

    def __init__(self, request: web.BaseRequest, write_s: float) -> None:
        self._request = request
        self._write_s = write_s
        self.sent: web.StreamResponse | None = None
        """None until it has begun."""

    async def send_json(self, body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        """Send a whole response. Raises ConnectionError if the client did not take it."""
        encoded = msgspec.json.encode(body)
        self.sent = web.Response(body=encoded, status=status, content_type="application/json", headers=headers)
        if status in (429, 503):  # a client that has to wait keeps no place that another one needs
            self.sent.force_close()
        await self._written(self.sent, None, is_last=True)

    async def send_events(self, events: bytes, *, is_last: bool = False) -> None:
        """Send a part of a response that streams. Raises ConnectionError if the client did not take it."""
        if self.sent is None:
            self.sent = web.StreamResponse(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
            self.sent.content_type = "text/event-stream"
        await self._written(self.sent, events, is_last=is_last)

    async def _written(self, response: web.StreamResponse, chunk: bytes | None, *, is_last: bool) -> None:
        transport = self._request.transport
        if transport is None:
            raise ConnectionResetError("the client has left")
        transport.set_write_buffer_limits(0)  # so that to drain means that the kernel has all
        try:
            async with asyncio.timeout(self._write_s):
                if not response.prepared:
                    await response.prepare(self._request)
                if chunk is not None:
                    await response.write(chunk)
                if is_last:
                    await response.write_eof()
                await self._request.writer.drain()
        except TimeoutError as error:
            transport.abort()
            raise ConnectionAbortedError(f"the client took no answer for {self._write_s:g} s") from error
        if self._request.transport is None or transport.is_closing():
            raise ConnectionResetError("the client has left")
