"""A started process has a directory for temporary files of its own, which is removed with it, however it ends.

Engines put sockets and files there, under names that only they know, and leave them there: a process that is killed
leaves all of them, and one that ends in order leaves some. Their processes get the same directory as TMPDIR.
"""

import getpass
import os
import re
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from headway.broker.installation import SHARED_TMPDIR, shared_temporary_directory

IN_RAM = Path("/dev/shm")
LONGEST_DIRECTORY = 48
"""Bytes of a directory in which the one for temporary files can lie: engines make sockets and directories of sockets
there, and the path of a socket may have 107."""
SHORT_DIRECTORY = "/tmp"
"""The directory that is taken where the others are longer."""
MEETING = re.compile(r"vllm_dist_[0-9a-f]{32}")
"""Matches the name of the file by which vLLM's processes meet, which no other process has by chance: half of it is
random. They call the shared memory through which they talk NAME-..., with the name of that file."""


class TemporaryFiles:
    """The directory of one process and of those that it starts."""

    def __init__(self, preferred: Path) -> None:
        """Make it in the directory `preferred` if that is short. Raises OSError."""
        parents = (str(preferred), str(shared_temporary_directory()), SHORT_DIRECTORY)
        parent = next((one for one in parents if len(os.fsencode(one)) <= LONGEST_DIRECTORY), SHORT_DIRECTORY)
        self._directory = Path(tempfile.mkdtemp(prefix="headway-", dir=parent))

    def variables(self) -> dict[str, str]:
        """Return environment variables by which the process takes it. What torch has compiled stays where torch keeps
        it in a process without such a directory."""
        usual = shared_temporary_directory()
        compiled = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or str(usual / f"torchinductor_{_name_in_caches()}")
        return {"TMPDIR": str(self._directory), SHARED_TMPDIR: str(usual), "TORCHINDUCTOR_CACHE_DIR": compiled}

    def remove(self) -> None:
        """Remove it, and shared memory that vLLM has named after a file in it. Its processes must have ended.
        Idempotent."""
        for path in self._shared_memory():
            with suppress(OSError):  # the others are removed all the same
                path.unlink()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _shared_memory(self) -> list[Path]:
        with suppress(OSError):  # it is removed already, or this system has no such directory
            names = tuple(f"{name}-" for name in os.listdir(self._directory) if MEETING.fullmatch(name))
            return [path for path in IN_RAM.iterdir() if path.name.startswith(names) and _is_ours(path)]
        return []


def _name_in_caches() -> str:
    """Return this user's name as torch writes it in the name of its cache."""
    try:
        return re.sub(r'[\\/:*?"<>|]', "_", getpass.getuser())
    except (KeyError, ModuleNotFoundError, OSError):  # containers have users without a name
        return f"uid_{os.getuid()}"


def _is_ours(path: Path) -> bool:
    with suppress(OSError):  # it is gone
        return path.lstat().st_uid == os.geteuid()
    return False
