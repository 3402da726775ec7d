"""Writes that reach the disk, and messages for those that the system refused, each with the remedy for its reason."""

import errno
import os
import shutil
from pathlib import Path

FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
LINE_BYTES = 4096
GONE = {errno.ENOENT, errno.ENOTDIR, errno.ESTALE}


def not_written(path: Path, error: OSError) -> str:
    """Returns sentences that name `path`, the reason and the remedy."""
    if error.errno in GONE:
        return gone(path.parent)
    reason = error.strerror or str(error)
    if error.errno in FULL:
        return (
            f"{path} could not be written: {reason} ({free_mib(path):.1f} MiB are free there). Make room, then go on"
            " with --resume."
        )
    return f"{path} could not be written: {reason}. Make the place writable, or choose another (run.directory=...)."


def gone(directory: Path) -> str:
    """Returns sentences for a directory that was removed meanwhile."""
    return (
        f"{directory} is gone: it was removed while it was written to. Bring it back and go on with --resume, or"
        " start the run anew."
    )


def is_full(path: Path) -> bool:
    """True where the file system of `path` takes hardly another line; False where it cannot be asked."""
    try:
        return shutil.disk_usage(path.parent).free < LINE_BYTES
    except OSError:
        return False


def free_mib(path: Path) -> float:
    """Returns the free space, in MiB, of the file system that `path` is to be on."""
    existing = next(parent for parent in path.absolute().parents if parent.exists())
    return shutil.disk_usage(existing).free / 2**20


def sync(path: Path) -> None:
    """Wait until this file, or this folder's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
