# mypy: disable-error-code="attr-defined,untyped-decorator"
"""An MCP server of a few tools, over stdio, or over HTTP at a port: `python mcp_server.py [PORT]`."""

import os
import sys
import time

from mcp.server.fastmcp import FastMCP

server = FastMCP("counting", port=int(sys.argv[1]) if len(sys.argv) > 1 else 8000)
count = 0


@server.tool()
def add(number: int) -> int:
    """Add to what was added before in this session's process."""
    global count
    count += number
    return count


@server.tool()
def fail(reason: str) -> str:
    """Raise an error."""
    raise ValueError(reason)


@server.tool()
def sleep(seconds: float) -> str:
    """Sleep."""
    time.sleep(seconds)
    return "awake"


@server.tool()
def process() -> list[str]:
    """Return the number of the process, and the names of some variables."""
    return [str(os.getpid()), *(name for name in os.environ if name.startswith(("HEADWAY", "MINE")))]


if __name__ == "__main__":
    server.run(transport="streamable-http" if len(sys.argv) > 1 else "stdio")
