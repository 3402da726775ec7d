"""The words between a trainer and the engine that it started, one JSON object a line."""

import json
import socket
from typing import IO, Any


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def tell(to: IO[str], what: dict[str, Any]) -> None:
    to.write(json.dumps(what) + "\n")
    to.flush()


def answer_of(lines: IO[str], key: str) -> dict[str, Any]:
    """Return the next line with `key`; other lines are the engine's own."""
    for line in lines:
        if line.startswith("{") and key in (answer := json.loads(line)):
            return dict(answer)
    raise SystemExit("the engine ended early")
