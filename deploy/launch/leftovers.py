"""A started process has a directory for temporary files of its own, which is removed with it, however it ends.

Engines put sockets and files there, under names that only they know, and leave them there: a process that is killed
leaves all of them, and one that ends in order leaves some. Their processes get the same directory as TMPDIR.
"""

import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from broker.installation import SHARED_TMPDIR, shared_temporary_directory

IN_RAM = Path("/dev/shm")
LONGEST_DIRECTORY = 48
"""Bytes of a directory in which the one for temporary files can lie: engines make sockets and directories of sockets
there, and the path of a socket may have 107."""
SHORT_DIRECTORY = "/tmp"
"""The directory that is taken where the others are longer."""
LEAST_NAME = 20
"""Characters of a name, at least, that no other process has by chance: `tempfile` and `uuid` make them random."""


class TemporaryFiles:
    """The directory of one process and of those that it starts."""

    def __init__(self, preferred: Path) -> None:
        """Make it in the directory `preferred` if that is short. Raises OSError."""
        parents = (str(preferred), str(shared_temporary_directory()), SHORT_DIRECTORY)
        parent = next((one for one in parents if len(os.fsencode(one)) <= LONGEST_DIRECTORY), SHORT_DIRECTORY)
        self._directory = Path(tempfile.mkdtemp(prefix="headway-", dir=parent))

    def variables(self) -> dict[str, str]:
        """Return environment variables by which the process takes it. What compilers have kept stays where it was."""
        usual = shared_temporary_directory()
        compiled = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or str(usual / f"torchinductor_{os.getuid()}")
        return {"TMPDIR": str(self._directory), SHARED_TMPDIR: str(usual), "TORCHINDUCTOR_CACHE_DIR": compiled}

    def remove(self) -> None:
        """Remove it, and shared memory that is called like something in it. Its processes must have ended. Idempotent.

        vLLM calls shared memory of several processes NAME-..., with the name of the file by which these have met, and
        the engine for SGLang does the same with the directory of its sockets.
        """
        with suppress(OSError):
            names = tuple(f"{name}-" for name in os.listdir(self._directory) if len(name) >= LEAST_NAME)
            for shared in IN_RAM.iterdir() if names else ():
                if shared.name.startswith(names):
                    shared.unlink(missing_ok=True)
        shutil.rmtree(self._directory, ignore_errors=True)
