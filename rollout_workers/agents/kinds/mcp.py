"""`mcp`: the model calls the tools of MCP servers, which are programs (stdio) or have an address (streamable HTTP).

Each episode has sessions of its own, and with them processes of its own of servers that are programs.
"""

import asyncio
import sys
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from headway.broker.errors import CallDeadlineError, ConfigError, HeadwayError
from headway.broker.installation import check_extra
from headway.broker.user_code.import_paths import ImportRoots
from headway.rollout_workers.agents.conversation import Tool, begin
from headway.rollout_workers.agents.episode import Agent, AgentEpisode, AgentTask, Outcome, Resume
from headway.rollout_workers.agents.tools.toolbox import (
    ArgumentsError,
    Count,
    Seconds,
    Toolbox,
    ToolError,
    ToolLimits,
    ToolTurns,
)

from .base import check_program, outcome, program_path

MOST_PAGES = 100
"""The most pages of tools that are asked of a server."""


class McpServer(msgspec.Struct, frozen=True, kw_only=True):
    """A server: a command, or an address."""

    command: list[str] = []
    """A program and its arguments. The program lies below the operator's directory (./server.py), or is allowed by
    --allow-import."""
    environment: dict[str, str] = {}
    """Further environment variables of the program, which has few of this process's."""
    url: str = ""
    """The address of a server that runs, such as http://127.0.0.1:8000/mcp."""
    headers: dict[str, str] = {}
    """Headers of requests to it."""


class McpOptions(ToolLimits, frozen=True, kw_only=True):
    """The servers of the agent, and its limits."""

    servers: Annotated[dict[str, McpServer], Meta(min_length=1)]
    """By names for errors."""
    tools: list[str] = msgspec.field(default_factory=list)
    """The tools that the model may call; empty: all."""
    system_prompt: str = ""
    """What the model reads first."""
    max_turns: Count = 20
    """The most answers of the model."""
    open_s: Seconds = 60.0
    """A server that takes longer to open a session ends its episode."""
    resume: Resume = "restart"
    """replay: where what the tools do ends with the session, and the same calls get the same results."""


class ServerFailedError(HeadwayError):
    """An MCP server cannot be started or reached, or speaks another protocol."""


class McpAgent(Agent):
    """Opens sessions for each episode. The run's reward functions score the last answer."""

    def __init__(self, options: McpOptions, roots: ImportRoots, where: str) -> None:
        for name, server in options.servers.items():
            key = f"{where}.servers.{name}"
            if bool(server.command) == bool(server.url):
                raise ConfigError(f"{key}: give it either a command or a url.")
            if server.command:
                check_program(server.command, roots, f"{key}.command")
        check_extra("agents", "mcp", f"{where.removesuffix('.options')}.kind=mcp")
        self._options = options
        self._directory = roots.directory
        self.resume: Resume = options.resume

    async def rollout(self, episode: AgentEpisode, task: AgentTask) -> Outcome:
        """Play one episode. Raises ServerFailedError."""
        options, raised, result = self._options, None, None
        async with _Sessions() as sessions:
            try:
                toolbox = Toolbox(await self._tools(sessions, options.servers), options)
                messages = begin(task.messages, options.system_prompt)
                await ToolTurns(episode, messages, toolbox, options.max_turns).answer()
                result = outcome(None, toolbox.measures)
            except Exception as error:  # noqa: BLE001 - the sessions would put it into a group of errors
                raised = error
        if raised is not None:
            raise raised
        return result

    async def check(self) -> None:
        """See Agent. It starts the servers that are programs. Raises ServerFailedError."""
        await self._check({name: server for name, server in self._options.servers.items() if server.command})

    async def check_servers(self) -> None:
        """See Agent. Raises ServerFailedError."""
        if any(server.url for server in self._options.servers.values()):
            await self._check(self._options.servers)

    async def _check(self, servers: Mapping[str, McpServer]) -> None:
        raised: Exception | None = None
        async with _Sessions() as sessions:
            try:
                await self._tools(sessions, servers)
            except Exception as error:  # noqa: BLE001 - the sessions would put it into a group of errors
                raised = error
        if raised is not None:
            raise raised

    async def _tools(self, sessions: "_Sessions", servers: Mapping[str, McpServer]) -> list["McpTool"]:
        """Return the tools that these servers offer to the model."""
        found = list[McpTool]()
        for name, server in servers.items():
            session = await sessions.open(name, self._streams(server), self._options.open_s)
            found += await _listed(name, session)
        is_all = len(servers) == len(self._options.servers)
        if is_all and (missing := set(self._options.tools) - {tool.name for tool in found}):
            raise ServerFailedError(
                f"agent.tools: no MCP server offers {', '.join(sorted(missing))}. Offered:"
                f" {', '.join(tool.name for tool in found) or 'none'}."
            )
        offered = [tool for tool in found if not self._options.tools or tool.name in self._options.tools]
        if twice := [name for name, count in Counter(tool.name for tool in offered).items() if count > 1]:
            raise ServerFailedError(f"agent.servers: several MCP servers offer a tool {twice[0]!r}; name others.")
        return offered

    @asynccontextmanager
    async def _streams(self, server: McpServer) -> AsyncIterator[Sequence[Any]]:
        """Connect to a server."""
        from mcp import StdioServerParameters, stdio_client
        from mcp.client.streamable_http import streamable_http_client
        from mcp.shared._httpx_utils import create_mcp_http_client

        if server.url:
            async with (
                create_mcp_http_client(headers=dict(server.headers)) as client,
                streamable_http_client(server.url, http_client=client) as streams,
            ):
                yield streams
            return
        program, *arguments = program_path(server.command, self._directory)
        parameters = StdioServerParameters(
            command=program, args=arguments, env=dict(server.environment), cwd=str(self._directory)
        )
        async with stdio_client(parameters, errlog=sys.stderr) as streams:
            yield streams


class _Sessions:
    """The open sessions of one episode. They are opened and closed by one task of their own, as the library asks."""

    def __init__(self) -> None:
        self._tasks: list[tuple[asyncio.Task[None], asyncio.Event]] = []

    async def __aenter__(self) -> "_Sessions":
        return self

    async def open(self, name: str, streams: Any, open_s: float) -> Any:
        """Return an open session. Raises ServerFailedError."""
        opened: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        closing = asyncio.Event()
        task = asyncio.create_task(_hold(streams, opened, closing))
        self._tasks.append((task, closing))
        try:
            async with asyncio.timeout(open_s):
                await asyncio.wait([opened, task], return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            raise ServerFailedError(f"The MCP server {name} did not open a session within {open_s:g} s.") from None
        if opened.done():
            return opened.result()
        error = task.exception()
        raise ServerFailedError(f"The MCP server {name} cannot be opened: {_innermost(error)!r}.") from error

    async def __aexit__(self, *raised: object) -> None:
        for task, closing in self._tasks:
            closing.set()
            _, late = await asyncio.wait([task], timeout=SESSION_CLOSE_S)
            if late:
                task.cancel()
        if self._tasks:
            await asyncio.wait([task for task, _ in self._tasks])
        for task, _ in self._tasks:
            with suppress(asyncio.CancelledError):
                task.exception()  # the episode has its outcome


SESSION_CLOSE_S = 10.0
"""A session that takes longer to close is cut off."""


async def _hold(streams: Any, opened: "asyncio.Future[Any]", closing: asyncio.Event) -> None:
    from mcp import ClientSession

    async with streams as connected, ClientSession(connected[0], connected[1]) as session:
        await session.initialize()
        opened.set_result(session)
        await closing.wait()


class McpTool:
    """A tool of a server."""

    def __init__(self, session: Any, told: Mapping[str, Any]) -> None:
        self.name = str(told["name"])
        self._session = session
        says, parameters = told.get("description") or "", dict(told.get("inputSchema") or {"type": "object"})
        self.schema: Tool = {
            "type": "function",
            "function": {"name": self.name, "description": says, "parameters": parameters},
        }

    async def call(self, arguments: str, deadline_s: float) -> Any:
        """Call it. Raises ArgumentsError, CallDeadlineError, and ToolError where it answers with an error."""
        try:
            given = msgspec.json.decode(arguments.strip() or "{}", type=dict[str, Any])
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
            raise ArgumentsError(str(error)) from error
        try:
            async with asyncio.timeout(deadline_s) as limit:
                result = (await self._session.call_tool(self.name, given)).model_dump(by_alias=True)
        except TimeoutError:
            if limit.expired():
                raise CallDeadlineError(f"ran past its deadline of {deadline_s:g} s") from None
            raise
        text = "\n".join(map(_text, result.get("content") or []))
        if result.get("isError"):
            raise ToolError(f"{self.name} failed: {text}")
        return text


async def _listed(name: str, session: Any) -> list[McpTool]:
    from mcp.types import PaginatedRequestParams

    tools, cursor = list[McpTool](), None
    for _ in range(MOST_PAGES):
        page = await session.list_tools(params=PaginatedRequestParams(cursor=cursor) if cursor else None)
        told = page.model_dump(by_alias=True)
        tools += [McpTool(session, tool) for tool in told["tools"]]
        cursor = told.get("nextCursor")
        if not cursor:
            return tools
    raise ServerFailedError(f"The MCP server {name} lists more than {MOST_PAGES} pages of tools.")


def _text(block: Mapping[str, Any]) -> str:
    """Return a part of a result as text: of images and the like, that they cannot be shown."""
    if block.get("type") == "text":
        return str(block["text"])
    resource = block.get("resource") or {}
    return str(resource["text"]) if "text" in resource else f"[a part of type {block.get('type')!r} is not shown]"


def _innermost(error: BaseException | None) -> BaseException | None:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
