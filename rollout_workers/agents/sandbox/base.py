"""`Sandbox` runs code that a model wrote, and nothing of it anywhere else."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import PurePosixPath
from types import MappingProxyType
from typing import Annotated, Literal, get_args

import msgspec

RunOutcome = Literal["ok", "raised", "timeout", "memory", "processes", "output", "disk", "killed", "refused"]
OUTCOMES: tuple[str, ...] = get_args(RunOutcome)

NO_FILES: Mapping[str, bytes] = MappingProxyType({})


class Ran(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one run."""

    outcome: RunOutcome
    """raised: an exception, or an exit code other than 0. timeout, memory, processes, output and disk: it was ended at
    that limit, or ended itself when it met it. killed: by a signal, or by `close`. refused: it was never started."""
    output: str = ""
    error: str = ""
    """What it wrote to its standard error, such as a traceback, or why it was ended or refused."""
    seconds: float = 0.0


class SandboxOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of each run, and what it may read."""

    seconds: Annotated[float, msgspec.Meta(gt=0)] = 10.0
    memory_bytes: Annotated[int, msgspec.Meta(ge=64 << 20)] = 256 << 20
    """Of all its processes together."""
    processes: Annotated[int, msgspec.Meta(ge=1)] = 16
    """Processes and threads at once."""
    output_bytes: Annotated[int, msgspec.Meta(ge=1)] = 64 << 10
    """Of its output, and as much of its errors."""
    scratch_bytes: Annotated[int, msgspec.Meta(ge=1 << 20)] = 16 << 20
    """Of the directory in which it runs, the only one that it may write. Each run begins with an empty one."""
    input_bytes: Annotated[int, msgspec.Meta(ge=1)] = 4 << 20
    """The longest code, with its files and its input."""
    readable: tuple[str, ...] = ()
    """Further files and directories that code may read (sandlock, bubblewrap, container)."""
    python_path: tuple[str, ...] = ()
    """Directories of packages that code may import; each is readable too (sandlock, bubblewrap, container)."""
    image: str = "python:3.11-slim"
    """The image of a container."""
    container_command: tuple[str, ...] = ("docker",)
    """docker or podman, with what goes before `run`."""
    container_arguments: tuple[str, ...] = ()
    """What goes before the image, such as --runtime=runsc."""
    bubblewrap_command: str = "bwrap"


class Sandbox(ABC):
    """A place for the runs of one episode. It outlives the scoring of the episode, and `close` frees it."""

    kind: str
    keeps_state: bool
    """Whether a run finds the names that earlier runs defined."""

    def __init__(self, options: SandboxOptions) -> None:
        """Prepare for runs; nothing is started."""
        self.options = options
        self.is_closed = False

    @abstractmethod
    async def run(self, code: str, files: Mapping[str, bytes] = NO_FILES, stdin: str = "") -> Ran:
        """Run code beside `files`, which are named relative to where it runs. Whatever the code does, this returns.

        One run at a time; others wait for it. Cancelled, it ends the code and all processes of it before it raises.
        """

    @abstractmethod
    async def close(self) -> None:
        """End what runs, with all its processes, and free what the sandbox holds. Idempotent; runs are refused after
        it."""

    async def __aenter__(self) -> "Sandbox":
        """Return itself."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close it."""
        await self.close()

    def refusal(self, code: str, files: Mapping[str, bytes], stdin: str) -> Ran | None:
        """Return why a run is not started, or None."""
        if self.is_closed:
            return Ran(outcome="refused", error="The sandbox is closed.")
        try:
            size = (
                len(code.encode()) + len(stdin.encode()) + sum(len(name.encode()) + len(files[name]) for name in files)
            )
        except UnicodeEncodeError:
            return Ran(outcome="refused", error="The code or its input is no text: it has half of a surrogate pair.")
        if "\0" in code:
            return Ran(outcome="refused", error="The code has a null character.")
        if size > self.options.input_bytes:
            return Ran(
                outcome="refused", error=f"The code and its input have {size} bytes; {self.options.input_bytes} may be."
            )
        for name in files:
            parts = PurePosixPath(name).parts
            if not parts or parts[0] == "/" or ".." in parts or "\0" in name:
                return Ran(
                    outcome="refused", error=f"A file is to be named relative to where the code runs, not {name!r}."
                )
        return None
