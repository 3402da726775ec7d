"""The `python` tool: a model's code, run in a sandbox."""

import asyncio
from collections.abc import Mapping
from typing import Any

import msgspec

from headway.rollout_workers.agents.conversation import Tool

from .base import Ran, Sandbox

STATE = {
    True: "Names that earlier calls defined are kept.",
    False: "Each call begins afresh: nothing of earlier calls is kept.",
}
SUBSET = " Only a subset of Python is there: no third-party packages, few modules of the standard library."


class PythonTool:
    """A tool of one episode. Whoever opened its sandbox closes that."""

    def __init__(self, sandbox: Sandbox, name: str = "python") -> None:
        """Describe the sandbox to the model."""
        self.name = name
        self.sandbox = sandbox
        subset = SUBSET if sandbox.kind == "monty" else ""
        says = f"Runs Python code, and returns what it prints. {STATE[sandbox.keeps_state]}{subset}"
        self.schema: Tool = {
            "type": "function",
            "function": {
                "name": name,
                "description": f"{says} A call may take {sandbox.options.seconds:g} seconds.",
                "parameters": {
                    "type": "object",
                    "properties": {"code": {"type": "string", "description": "The code. Print what you want to see."}},
                    "required": ["code"],
                    "additionalProperties": False,
                },
            },
        }

    async def __call__(self, arguments: Mapping[str, Any]) -> str:
        """Run the code of a call, and return what the model reads. Raises ValueError for other arguments."""
        code = arguments.get("code")
        if not isinstance(code, str) or len(arguments) != 1:
            raise ValueError('the arguments are to be {"code": text}')
        return shown(await self.sandbox.run(code))

    async def call(self, arguments: str, deadline_s: float) -> str:
        """Run the code of a call whose arguments are JSON text. Raises ValueError for arguments that it does not
        understand, and TimeoutError, with the code ended, after `deadline_s`."""
        try:
            read = msgspec.json.decode(arguments, type=dict[str, Any])
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
            raise ValueError(f"the arguments are no JSON object: {error}") from None
        async with asyncio.timeout(deadline_s):
            return await self(read)


def python_tool(sandbox: Sandbox, name: str = "python") -> PythonTool:
    """Return a tool that runs code in this sandbox."""
    return PythonTool(sandbox, name)


def shown(ran: Ran) -> str:
    """Return a run as the model reads it."""
    parts = [part.rstrip("\n") for part in (ran.output, ran.error) if part.strip()]
    if ran.outcome not in ("ok", "raised"):
        parts.append(f"Error: {ran.outcome}")
    return "\n".join(parts) or ("(no output)" if ran.outcome == "ok" else "Error: the code ended with an error.")
