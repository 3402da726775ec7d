"""Sandboxes run code that a model wrote, confined in time, memory, processes, files, network and output.

    a tool ───code──► Sandbox (`base.py`) ── monty.py       a subset of Python in an interpreter without the machine
      ▲                  │                └─ launched.py ── launcher.py (a process for each run) ── what confines it:
      └──── Ran ─────────┘                     landlocked.py   sandlock: Landlock and seccomp; no privileges
            outcome, output                    bubblewrap.py   namespaces
                                               container.py    docker or podman
                                                 └─ bootstrap.py, in there, sets limits and runs the code

The invariant: no code of a model runs where it is not confined. A kind that is missing or that its canary finds open
is an error that names the remedy, and nothing takes its place.
"""

from collections.abc import Callable

from headway.broker.errors import ConfigError
from headway.broker.installation import check_extra

from .base import Ran, Sandbox, SandboxOptions

KINDS = ("monty", "sandlock", "bubblewrap", "container")

__all__ = ["KINDS", "Ran", "Sandbox", "SandboxOptions", "Sandboxes", "open_sandboxes"]


class Sandboxes:
    """A kind of sandbox that has been found to confine code on this machine."""

    def __init__(self, kind: str, options: SandboxOptions, open_one: Callable[[SandboxOptions], Sandbox]) -> None:
        """Keep what `open_sandboxes` has verified."""
        self.kind, self.options, self._open = kind, options, open_one

    def open(self) -> Sandbox:
        """Return a sandbox for one episode."""
        return self._open(self.options)


async def open_sandboxes(kind: str = "monty", options: SandboxOptions | None = None) -> Sandboxes:
    """Return a kind of sandbox, after some runs that try to get out of it: once for each process, since that takes
    a second or two. Raises ConfigError where the kind is missing, or does not confine code here."""
    from .canary import check

    chosen = options or SandboxOptions()
    open_one = _opener(kind, chosen)
    await check(open_one, chosen)
    return Sandboxes(kind, chosen, open_one)


def _opener(kind: str, options: SandboxOptions) -> Callable[[SandboxOptions], Sandbox]:
    match kind:
        case "monty":
            check_extra("agents", "pydantic_monty", "The sandbox monty", name="pydantic-monty")
            _refuse_reading(kind, options)
            from .monty import MontySandbox

            return MontySandbox
        case "sandlock":
            check_extra("agents", "sandlock", "The sandbox sandlock")
            from .landlocked import SandlockSandbox, check_kernel

            check_kernel()
            return SandlockSandbox
        case "bubblewrap":
            from .bubblewrap import BubblewrapSandbox, check_command

            check_command(options.bubblewrap_command)
            return BubblewrapSandbox
        case "container":
            from .container import ContainerSandbox, check_client

            check_client(options.container_command)
            return ContainerSandbox
    raise ConfigError(f"There is no sandbox {kind!r}. Choose one of {', '.join(KINDS)}.")


def _refuse_reading(kind: str, options: SandboxOptions) -> None:
    if options.readable or options.python_path:
        raise ConfigError(
            f"The sandbox {kind} reads nothing of the machine: `readable` and `python_path` need another."
        )
