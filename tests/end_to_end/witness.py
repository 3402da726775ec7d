"""A user's own engine and backend, which write down when they are on the device. Every role of a run imports this.

Processes of one machine share a clock, so the lines of all are in the order in which things happened.
"""

import json
import os
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from headway.learner.backends.fsdp.backend import FsdpBackend
from headway.rollout_workers.engines.base import Chunk, GenerationRequest
from headway.rollout_workers.engines.embedded.embedded_engine import open_embedded

FILE = "WITNESS"
"""The variable that names the file."""


class Event(msgspec.Struct, frozen=True):
    """An action of an engine or of a learner's rank."""

    at_s: float
    pid: int
    what: str
    """The action: began, leaves, back of a learner's rank; opened, awake, sampled, asleep of an engine."""


def note(what: str) -> None:
    with Path(os.environ[FILE]).open("a") as file:
        file.write(json.dumps([time.monotonic(), os.getpid(), what]) + "\n")


def events(path: Path) -> list[Event]:
    """Return the events in order, without a last line that is still being written."""
    lines = path.read_text().rpartition("\n")[0].splitlines() if path.exists() else []
    return sorted((Event(*json.loads(line)) for line in lines), key=lambda event: event.at_s)


class Engine:
    """The embedded engine with notes."""

    def __init__(self, config: Any, model_dir: Path, *, seed: int) -> None:
        note("opened")
        self._engine = open_embedded(config, model_dir, seed=seed)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Chunk]:
        async for chunk in self._engine.generate(request):
            note("sampled")
            yield chunk

    async def sleep(self) -> None:
        await self._engine.sleep()
        note("asleep")

    async def wake(self) -> None:
        note("awake")
        await self._engine.wake()


class Backend(FsdpBackend):
    """The fsdp backend with notes."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        note("began")
        super().__init__(*arguments, **options)

    @contextmanager
    def off_device(self) -> Iterator[None]:
        with super().off_device():
            note("leaves")
            yield
            note("back")
