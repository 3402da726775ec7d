"""A file system of its own for the files of one role, which can be full.

It needs root; elsewhere only a limit on the size of a process's files can stop its writes.
"""

import os
import resource
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

ROOM_BYTES = 1 << 30
"""The size of the disk, whose memory is taken only when it is used."""
_PAGE = 4096
_ATTEMPTS = 20


class Disk:
    """A tmpfs at `directory`, from `mount` to `unmount`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.is_mounted = False

    def mount(self) -> None:
        """Mount the disk, or leave an ordinary directory where the system does not allow a mount."""
        self._directory.mkdir(parents=True, exist_ok=True)
        options = f"size={ROOM_BYTES},mode=700"
        self.is_mounted = os.geteuid() == 0 and _mount("-t", "tmpfs", "-o", options, "tmpfs", str(self._directory))

    def unmount(self) -> None:
        """Unmount the disk and lose its files. Idempotent."""
        if self.is_mounted:
            subprocess.run(["umount", "--lazy", self._directory], check=False)
            self.is_mounted = False

    @asynccontextmanager
    async def full(self) -> AsyncIterator[None]:
        """Leave no room for anything more meanwhile."""
        assert self.is_mounted, "full disks need a file system of their own"
        try:
            for _ in range(_ATTEMPTS):  # a process that writes meanwhile makes the size too small
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
    """Let no file of this process grow meanwhile, on a system that allows no mounts."""
    soft, hard = _limit(pid)
    _limit(pid, (0, hard))
    try:
        yield
    finally:
        _limit(pid, (soft, hard))


def _limit(pid: int, new: tuple[int, int] | None = None) -> tuple[int, int]:
    """Set a limit on the size of the files that the process writes, and return the earlier limit."""
    try:
        return resource.prlimit(pid, resource.RLIMIT_FSIZE, *([new] if new else []))
    except ProcessLookupError:  # the process has ended meanwhile
        return resource.RLIM_INFINITY, resource.RLIM_INFINITY


def _mount(*arguments: str) -> bool:
    return subprocess.run(["mount", *arguments], capture_output=True, check=False).returncode == 0
