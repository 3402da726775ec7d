"""The output of --dry-run."""

from collections.abc import Iterator
from contextlib import contextmanager

from headway.deploy.launch.base import Command, Launcher
from headway.deploy.launch.dry_run_launcher import PrintedLauncher, as_builtins, as_text
from headway.deploy.printing import say, say_json


@contextmanager
def shown(as_json: bool) -> Iterator[Launcher]:
    """Yield a launcher whose commands are printed: each as it is given, or all at the end as one JSON object."""
    if not as_json:
        yield PrintedLauncher(lambda command: say(as_text(command)))
        return
    commands: list[Command] = []
    yield PrintedLauncher(commands.append)
    say_json({"commands": [as_builtins(command) for command in commands]})
