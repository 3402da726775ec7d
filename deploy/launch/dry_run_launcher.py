"""The launcher of `--dry-run`: it shows what a run would start, for a shell or for a program, and starts nothing."""

from collections.abc import Callable
from typing import Any

from headway.broker.connection.address import PASSWORD, without_secrets

from .base import BROKER, Command, Handle, Launcher, Resources


class PrintedLauncher(Launcher):
    """Hands every command to `show`, in the order of start."""

    starts_processes = False

    def __init__(self, show: Callable[[Command], object]) -> None:
        self._show = show

    def start(self, command: Command) -> "PrintedHandle":
        self._show(command)
        return PrintedHandle(command)


class PrintedHandle(Handle):
    """The handle of a shown command: it is done from the start."""

    def exit_code(self) -> int:
        return 0

    def is_done(self) -> bool:
        return True

    def terminate(self) -> None:
        """Do nothing: no process runs."""

    def kill(self) -> None:
        """Do nothing: no process runs."""

    def log(self) -> str:
        return ""


def as_text(command: Command) -> str:
    """Return a comment with the command's name and resources, and the command's line for a shell."""
    takes = "; ".join([*_taken(command.resources), *([f"log: {command.log}"] if command.log else [])])
    url = command.variables().get(BROKER, "")
    hidden = [f"# Its URL's password is not shown: set {PASSWORD}."] if url and without_secrets(url) != url else []
    return "\n".join([f"# {command.name}" + (f": {takes}" if takes else ""), *hidden, command.line()])


def as_builtins(command: Command) -> dict[str, Any]:
    """Return the command for JSON."""
    taken = command.resources
    return {
        "name": command.name,
        "argv": command.argv,
        "environment": command.shown_variables(),
        "directory": str(command.directory()),
        "log": str(command.log) if command.log else None,
        "resources": {
            "processes": taken.processes,
            "threads": taken.threads,
            "gpus": taken.gpus,
            "devices": taken.devices,
        },
        "line": command.line(),
    }


def _taken(resources: Resources) -> list[str]:
    taken = [] if resources.processes == 1 else [f"{resources.processes} processes"]
    if resources.gpus is not None:
        taken.append(f"{resources.gpus or 'no'} GPU{'s' * (resources.gpus != 1)}")
    if resources.devices is not None:
        taken[-1:] = [f"{taken[-1]} ({resources.devices})"] if taken else [f"GPUs {resources.devices}"]
    if resources.threads is not None:
        taken.append(f"{resources.threads} thread{'s' * (resources.threads != 1)} each")
    return taken
