"""`Endpoint`: routes requests to dialects and sessions, and gives each one outcome, which it counts."""

import asyncio
import logging
import socket
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, Literal, NamedTuple
from urllib.parse import quote, unquote
from weakref import WeakKeyDictionary

import msgspec
from aiohttp import web

from headway.broker.errors import ConfigError
from headway.rollout_workers.agents.calls import (
    CallRefusedError,
    ChatAnswer,
    ChatCall,
    Claims,
    Session,
    SessionAwayError,
    SessionEndedError,
    Sessions,
)

from .admission import Calls
from .anthropic_messages import AnthropicMessages
from .connections import AgentServer, Bodies, ClientResponse, EndpointSettings
from .dialect import Asked, Dialect
from .known_parts import KnownParts
from .native import Native, finished, rewarded
from .openai_chat import OpenAIChat
from .openai_responses import OpenAIResponses
from .problems import Problem, ProblemError, problem_of
from .refused_calls import RefusedCalls
from .vllm_generate import VllmGenerate

logger = logging.getLogger(__name__)

WAITING_IN_KERNEL, TAKEN_AT_ONCE = 4096, 128
"""Connections that wait until they are taken, and those of them that are taken before they are counted."""
WAITING = b": the answer is still to come\n\n"
LONGEST_KEY = 256
CLOSING = Problem(status=503, kind="closing", message="this endpoint closes; the episode may go on", retry_after_s=2)


class Exchange(NamedTuple):
    """A request that has found its session."""

    request: web.BaseRequest
    response: ClientResponse
    session_name: str
    session: Session
    dialect: Dialect


class Route(NamedTuple):
    """What answers requests of one path."""

    method: Literal["GET", "POST"]
    dialect: Dialect
    answer: Callable[[Exchange], Awaitable[None]]


class Endpoint:
    """An HTTP server for the agents of one process. The path, `/s/SESSION/...`, or the API key names a session."""

    def __init__(self, sessions: Sessions, settings: EndpointSettings, claims: Claims | None = None) -> None:
        """`claims` has the tasks of agents that no worker starts; None: there are none."""
        self._sessions = sessions
        self._claims = claims
        self._settings = settings
        self._calls = Calls(settings.calls, settings.session_calls, settings.call_s)
        self._bodies = Bodies(settings)
        self._known = WeakKeyDictionary[Session, KnownParts]()
        self.counts: dict[str, int] = Counter()
        """Requests by their outcome, and connections that were refused."""
        self.refused = RefusedCalls()
        self._server = AgentServer(self._respond, settings, lambda: self._count("connections_refused"))
        self._listener: asyncio.Server | None = None
        self._routes = self._all_routes()
        self._is_closing = False
        self.host = ""
        self.port = 0

    @classmethod
    async def start(
        cls,
        sessions: Sessions,
        host: str = "127.0.0.1",
        port: int = 0,
        settings: EndpointSettings | None = None,
        claims: Claims | None = None,
    ) -> "Endpoint":
        """Return an endpoint that listens; port 0 is any free one. Raises ConfigError if it cannot."""
        endpoint = cls(sessions, settings or EndpointSettings(), claims)
        loop = asyncio.get_running_loop()
        try:
            listener = await loop.create_server(endpoint._server, host, port, backlog=TAKEN_AT_ONCE)
        except OSError as error:
            raise ConfigError(f"the agents' endpoint cannot listen on {host}:{port}: {error}") from error
        for one in listener.sockets:
            with socket.fromfd(one.fileno(), one.family, one.type) as same:
                same.listen(WAITING_IN_KERNEL)
        endpoint._listener = listener
        endpoint.host, endpoint.port = host, listener.sockets[0].getsockname()[1]
        return endpoint

    def url_of(self, name: str) -> str:
        """Return the base URL of a session for a client of OpenAI's; without `/v1` it is for one of Anthropic's."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}/s/{quote(name, safe='')}/v1"

    async def close(self) -> None:
        """Stop listening, cancel the calls that are being answered, and close all connections."""
        self._is_closing = True
        if self._listener is not None:
            self._listener.close()
        await self._calls.close()
        self._server.pre_shutdown()
        await self._server.shutdown(5.0)
        if self._listener is not None:
            await self._listener.wait_closed()

    def _all_routes(self) -> dict[str, Route]:
        chat, messages, responses, native = OpenAIChat(), AnthropicMessages(), OpenAIResponses(), Native()
        return {
            "chat/completions": Route("POST", chat, self._answer_call),
            "messages": Route("POST", messages, self._answer_call),
            "messages/count_tokens": Route("POST", messages, self._count_tokens),
            "responses": Route("POST", responses, self._answer_call),
            "inference/v1/generate": Route("POST", VllmGenerate(), self._answer_call),
            "turn": Route("POST", native, self._answer_call),
            "reward": Route("POST", native, self._take_reward),
            "finish": Route("POST", native, self._finish),
            "models": Route("GET", chat, self._list_models),
        }

    async def _respond(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer a request, whatever it is."""
        response, dialect = ClientResponse(request, self._settings.write_s), self._routes["chat/completions"].dialect
        name = ""
        try:
            in_path, path = split_path(request.rel_url.raw_path)
            if path == "sessions" and self._claims is not None:
                await self._claim(request, response, self._claims)
                return response.sent or web.Response(status=500)
            route = self._routes.get("models" if path.startswith("models/") else path)
            dialect = dialect if route is None else route.dialect
            if "anthropic-version" in request.headers:
                dialect = self._routes["messages"].dialect
            if route is None or route.method != request.method:
                raise ProblemError(self._no_such_route(request, route))
            name, session = self._session(request, in_path)
            await route.answer(Exchange(request, response, name, session, dialect))
        except (ConnectionError, asyncio.CancelledError):  # of a client that has left; no one reads what is said
            self._count("disconnected")
            raise asyncio.CancelledError from None  # of any other error aiohttp would write to the log
        except Exception as error:  # noqa: BLE001 - problem_of logs what nobody expects
            problem = problem_of(error)
            self.refused.note(problem, name if self._is_live(name) else "")
            await self._tell(response, dialect, problem)
        assert response.sent is not None
        return response.sent

    async def _claim(self, request: web.BaseRequest, response: ClientResponse, claims: Claims) -> None:
        """Give a task to an agent that no worker starts, with the URL of its session as this client reaches it."""
        found = claims.claim(api_keys(request)[0] if api_keys(request) else "")
        self._count("claims" if found else "claims_without_task")
        if found is not None:
            found["base_url"] = f"{request.scheme}://{request.host}/s/{found['session']}/v1"
        await response.send_json(found or {}, 200 if found else 204)

    async def _tell(self, response: ClientResponse, dialect: Dialect, problem: Problem) -> None:
        """Tell a client why it gets no answer."""
        self._count(problem.kind)
        try:
            if response.sent is not None:
                await response.send_events(dialect.error_event(problem), is_last=True)
                return
            headers = {"Retry-After": str(problem.retry_after_s)} if problem.retry_after_s else {}
            await response.send_json(dialect.error(problem), problem.status, headers)
        except ConnectionError:
            self._count("disconnected")
            raise asyncio.CancelledError from None

    def _no_such_route(self, request: web.BaseRequest, route: Route | None) -> Problem:
        if route is not None:
            message = f"{request.path[-80:]!r} takes {route.method}"
            return Problem(status=405, kind="wrong_method", message=message)
        paths = ", ".join(self._routes)
        message = f"there is no path {request.path[-80:]!r} here; below /s/SESSION/v1/ there are {paths}"
        return Problem(status=404, kind="not_found", message=message)

    def _session(self, request: web.BaseRequest, in_path: str) -> tuple[str, Session]:
        """Return the session that a request names, and by which name. Raises SessionEndedError, CallRefusedError for
        one that names two, and ProblemError for one that names none."""
        keys = api_keys(request)
        names = [in_path] if in_path else keys
        if not names:
            message = "no episode is named: use its URL, or its key as the API key"
            raise ProblemError(Problem(status=401, kind="unauthorized", message=message))
        found = next((name for name in names if self._is_live(name)), names[0])
        session = self._sessions.session(found)
        others = {*keys, request.headers.get("X-Session-ID", "")} - {found, ""}
        if any(self._is_live(other) for other in others):
            raise CallRefusedError("the request names two episodes: its path, API key and X-Session-ID contradict")
        return found, session

    def _is_live(self, name: str) -> bool:
        try:
            self._sessions.session(name)
        except (SessionEndedError, SessionAwayError):
            return False
        return True

    async def _answer_call(self, exchange: Exchange) -> None:
        known = self._known.setdefault(exchange.session, KnownParts())
        async with self._bodies.read(exchange.request, known) as body:
            asked = exchange.dialect.read(body, ignores_sampling=self._settings.ignore_sampling)
            call = with_headers(asked.call, exchange.request)
            self._check_open()
            task = self._calls.start(exchange.session_name, exchange.session, call)
            try:
                await self._deliver(task, exchange, asked)
            except BaseException:
                lose(task, exchange.session)
                raise
        self._count("answered")
        self._count("auxiliary", by=call.role == "auxiliary")
        self._count("retries", by=call.is_retry)

    async def _deliver(self, task: asyncio.Task[ChatAnswer], exchange: Exchange, asked: Asked) -> None:
        """Wait for an answer, and send it. A client that streams is told to wait."""
        quiet_s = self._settings.quiet_s if asked.streams else None
        while not (await asyncio.wait({task}, timeout=quiet_s))[0]:
            await exchange.response.send_events(WAITING)
        if task.cancelled():
            raise ProblemError(CLOSING)
        answer = task.result()
        if asked.streams:
            events = b"".join(exchange.dialect.events(asked, answer, exchange.session))
            await exchange.response.send_events(events, is_last=True)
        else:
            await exchange.response.send_json(exchange.dialect.answer(asked, answer, exchange.session))

    async def _count_tokens(self, exchange: Exchange) -> None:
        async with self._bodies.read(exchange.request) as body:
            call = exchange.dialect.read(body, ignores_sampling=True).call
            await exchange.response.send_json({"input_tokens": exchange.session.count_tokens(call)})
        self._count("token_counts")

    async def _list_models(self, exchange: Exchange) -> None:
        """List the one model, with the fields of OpenAI's and of Anthropic's clients."""
        name = exchange.session.model
        model = {"id": name, "object": "model", "created": 0, "owned_by": "headway"}
        model |= {"type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z"}
        page = {"object": "list", "data": [model], "has_more": False, "first_id": name, "last_id": name}
        is_list = split_path(exchange.request.rel_url.raw_path)[1] == "models"
        await exchange.response.send_json(page if is_list else model)
        self._count("model_lists")

    async def _take_reward(self, exchange: Exchange) -> None:
        async with self._bodies.read(exchange.request) as body:
            exchange.session.give_reward(rewarded(body))
        await exchange.response.send_json({})
        self._count("rewards")

    async def _finish(self, exchange: Exchange) -> None:
        async with self._bodies.read(exchange.request) as body:
            await exchange.session.finish(*finished(body))
        await exchange.response.send_json({})
        self._count("finishes")

    def _check_open(self) -> None:
        if self._is_closing:
            raise ProblemError(CLOSING)

    def _count(self, outcome: str, *, by: int = 1) -> None:
        if by:
            self.counts[outcome] = self.counts.get(outcome, 0) + by


def lose(task: asyncio.Task[ChatAnswer], session: Session) -> None:
    """Tell a session that the client has no answer: by cancelling the call, or after it."""

    def note(ended: asyncio.Task[ChatAnswer]) -> None:
        if not ended.cancelled() and ended.exception() is None:
            session.note_lost(ended.result())

    if task.done():
        note(task)
    else:
        task.add_done_callback(note)  # a call may return although it was cancelled
        task.cancel()


def api_keys(request: web.BaseRequest) -> list[str]:
    """Return the keys that a request has."""
    bearer = request.headers.get("Authorization", "").partition(" ")[2].strip()
    return [key for key in (bearer, request.headers.get("x-api-key", "")) if key]


def split_path(raw_path: str) -> tuple[str, str]:
    """Return the session's name in a path, or "", and the rest of it without versions: clients differ in whether they
    add one to a base URL."""
    name, path = "", raw_path.strip("/")
    if path.startswith("s/"):
        name, _, path = path.removeprefix("s/").partition("/")
    while path.startswith("v1/"):
        path = path.removeprefix("v1/")
    return unquote(name), path


def with_headers(call: ChatCall, request: web.BaseRequest) -> ChatCall:
    """Return a call with what its request's headers say of it. Raises CallRefusedError."""
    more = dict[str, Any]()
    role = request.headers.get("X-Headway-Role")
    if role is not None:
        if role not in ("main", "auxiliary"):
            raise CallRefusedError("the header X-Headway-Role is either main or auxiliary", "X-Headway-Role")
        more["role"] = role
    if key := request.headers.get("Idempotency-Key"):
        if len(key) > LONGEST_KEY:
            raise CallRefusedError(f"the header Idempotency-Key has more than {LONGEST_KEY} characters")
        more["key"] = key
    if request.headers.get("x-stainless-retry-count", "0") != "0":
        more["is_retry"] = True
    return msgspec.structs.replace(call, **more)
