"""The kinds of sandboxes that this machine can run, and one that confines nothing, to show what the others prevent."""

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headway.broker.errors import ConfigError
from headway.broker.installation import is_installed
from headway.rollout_workers.agents.sandbox import KINDS, Sandbox, Sandboxes, SandboxOptions, open_sandboxes
from headway.rollout_workers.agents.sandbox.launched import LaunchedCommand, LaunchedSandbox, bootstrap_argv

PATIENT = SandboxOptions(seconds=600)
"""For runs that end by themselves, on a machine however busy."""

HERE = tuple(kind for kind in KINDS if kind != "container" or os.environ.get("HEADWAY_TEST_CONTAINER") == "1")
"""The kinds that are tried; containers are asked for, with HEADWAY_TEST_CONTAINER=1 and the image python:3.11-slim."""

FOUND: dict[str, Sandboxes | str] = {}


class UnconfinedSandbox(LaunchedSandbox):
    """Runs the tests' own code like a sandbox, with everything in its reach."""

    kind = "sandlock"  # whose remedy the canary would name

    def command(self) -> LaunchedCommand:
        """Start Python as it is, in a directory that the test has made."""
        argv = bootstrap_argv(sys.executable)
        return LaunchedCommand(argv=argv, environment=dict(os.environ), chdir=self.options.readable[0])


async def found(kind: str) -> Sandboxes | str:
    """Return a kind, verified once, or why this machine cannot run it."""
    if kind not in FOUND:
        FOUND[kind] = await _find(kind)
    return FOUND[kind]


async def _find(kind: str) -> Sandboxes | str:
    try:
        return await open_sandboxes(kind, PATIENT)
    except ConfigError as error:
        if kind == "monty" and is_installed("pydantic_monty"):
            raise
        return str(error)


async def open_one(kind: str, **options: Any) -> Sandbox:
    """Return a sandbox, or skip the test with the reason why this machine has none of the kind."""
    known = await found(kind)
    if isinstance(known, str):
        pytest.skip(known)
    return type(known.open())(msgspec.structs.replace(PATIENT, **options))


def named(name: str) -> list[int]:
    """Return the processes that run under this name of at most 15 characters."""
    pids = []
    for path in Path("/proc").glob("[0-9]*/comm"):
        with contextlib.suppress(OSError):
            if path.read_text().strip() == name:
                pids.append(int(path.parent.name))
    return pids


def children() -> list[int]:
    """Return the processes that this one started, without those that have ended."""
    pids = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, parent = path.read_text().rpartition(")")[2].split()[:2]
            if int(parent) == os.getpid() and state != "Z":
                pids.append(int(path.parent.name))
    return pids


async def until(is_so: Callable[[], object]) -> None:
    """Wait until a function returns something true."""
    deadline = time.monotonic() + 300
    while not is_so():
        assert time.monotonic() < deadline, "it never came to be"
        await asyncio.sleep(0.02)
