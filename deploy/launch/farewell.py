"""A role says that its work is done. Exit code 0 does not say so: a user's code may call `os._exit(0)`."""

import os
from pathlib import Path

ENVIRONMENT = "HEADWAY_FAREWELL"
"""The variable that names a file to a role's process. Its supervisor looks for the file once the process has ended."""
DRAIN_NOTICE = "the learner finishes its step and writes a checkpoint"
"""The work of a learner that is asked to stop. Its supervisor says so, or the learner itself where it has none."""


def say_farewell() -> None:
    """Write the file. The role itself calls this last, when a worker has handed its work back or a learner has
    concluded. Its directory may be gone: the last other process of the run on this node removes it."""
    if path := os.environ.get(ENVIRONMENT):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).touch()
