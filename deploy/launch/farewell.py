"""How a role says that its work is done. Exit code 0 does not: code of the user's in it may call `os._exit(0)`."""

import os
from pathlib import Path

ENVIRONMENT = "HEADWAY_FAREWELL"
"""Names a file to the process of a role; its supervisor looks for it once that has ended."""


def say_farewell() -> None:
    """To be called by the role itself, last of all: a worker has handed its work back, a learner has concluded."""
    if path := os.environ.get(ENVIRONMENT):
        Path(path).touch()
