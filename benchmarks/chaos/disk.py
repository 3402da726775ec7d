"""A file system of its own for what one role writes, which can be full.

It needs root; elsewhere only a process can be kept from writing, by the limit on the size of its files.
"""

import os
import resource
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

ROOM_BYTES = 1 << 30
"""No memory is taken for it before it is used."""
_PAGE = 4096
_ATTEMPTS = 20


class Disk:
    """A tmpfs at `directory`, from `mount` to `unmount`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.is_mounted = False

    def mount(self) -> None:
        """Leaves it an ordinary directory where the system does not allow it."""
        self._directory.mkdir(parents=True, exist_ok=True)
        options = f"size={ROOM_BYTES},mode=700"
        self.is_mounted = os.geteuid() == 0 and _mount("-t", "tmpfs", "-o", options, "tmpfs", str(self._directory))

    def unmount(self) -> None:
        """What it holds is lost. Idempotent."""
        if self.is_mounted:
            subprocess.run(["umount", "--lazy", self._directory], check=False)
            self.is_mounted = False

    @asynccontextmanager
    async def full(self) -> AsyncIterator[None]:
        """No room for anything more meanwhile."""
        assert self.is_mounted, "full disks need a file system of their own"
        try:
            for _ in range(_ATTEMPTS):  # whoever writes meanwhile makes the size too small
                held = os.statvfs(self._directory)
                if self._resize((held.f_blocks - held.f_bfree) * held.f_frsize + _PAGE):
                    break
            yield
        finally:
            assert self._resize(ROOM_BYTES), f"{self._directory} cannot be given room again"

    def _resize(self, size: int) -> bool:
        return _mount("-o", f"remount,size={size}", str(self._directory))


@asynccontextmanager
async def no_file_grows(pid: int) -> AsyncIterator[None]:
    """Of this process, meanwhile: for a system that does not let us mount anything."""
    soft, hard = _limit(pid)
    _limit(pid, (0, hard))
    try:
        yield
    finally:
        _limit(pid, (soft, hard))


def _limit(pid: int, new: tuple[int, int] | None = None) -> tuple[int, int]:
    """On the size of files that it writes: the one that was there."""
    try:
        return resource.prlimit(pid, resource.RLIMIT_FSIZE, *([new] if new else []))
    except ProcessLookupError:  # it has ended meanwhile
        return resource.RLIM_INFINITY, resource.RLIM_INFINITY


def _mount(*arguments: str) -> bool:
    return subprocess.run(["mount", *arguments], capture_output=True, check=False).returncode == 0
