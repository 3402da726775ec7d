"""A full file system, for the test's own process."""

import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def no_files_over(nbytes: int) -> Iterator[None]:
    """Limit the size of every file to so many bytes, so that writes fail as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def small_disk(directory: Path, nbytes: int) -> Iterator[Path]:
    """Make `directory` a small file system of `nbytes` meanwhile, or limit each file where mounting is not allowed."""
    directory.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={nbytes}", "headway-test", str(directory)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        with no_files_over(nbytes):
            yield directory
        return
    try:
        yield directory
    finally:
        subprocess.run(["umount", str(directory)], check=True)
