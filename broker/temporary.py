"""The directory of temporary files that all processes of a machine share. A supervised worker has one of its own beside
it, which is removed with what is left in it."""

import os
import tempfile
from pathlib import Path

SHARED = "HEADWAY_SHARED_TMPDIR"
"""The variable that names it to a process whose TMPDIR is its own."""


def shared_temporary_directory() -> Path:
    """Return it, for what is to be found by other processes or after this one's end."""
    return Path(os.environ.get(SHARED) or tempfile.gettempdir())
