"""Writes that reach the disk, and messages for those that the system refused, each with the remedy for its reason."""

import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
FULL_IN_WORDS = ("No space left on device", "Disk quota exceeded", "(os error 28)", "(os error 122)")
"""The words for it of libraries that raise errors of their own, such as safetensors."""
REMEDIES = {
    errno.EACCES: "Give this user the right to it, or choose another place (run.directory=...).",
    errno.EPERM: "Give this user the right to it, or choose another place (run.directory=...).",
    errno.EROFS: "It is mounted read-only: mount it otherwise, or choose another place (run.directory=...).",
    errno.EMFILE: "Raise this process's limit on open files (ulimit -n, LimitNOFILE= of systemd).",
    errno.ENFILE: "Raise the machine's limit on open files (sysctl fs.file-max).",
    errno.ENOMEM: "Free memory on this machine, or give this process more.",
    errno.EIO: "The disk fails: see `dmesg`, and choose another place (run.directory=...).",
    errno.EADDRINUSE: "Another process has this port: end it, or choose another port.",
    errno.EADDRNOTAVAIL: "This machine has no such address: name one of its own.",
    errno.ECONNREFUSED: "Nothing listens there: is the other process running, and is this its address?",
    errno.ECONNRESET: "The other process has ended, or ended the connection: look at its log.",
    errno.EHOSTUNREACH: "There is no way to that machine: check the address and the network between.",
    errno.ENETUNREACH: "There is no way to that machine: check the address and the network between.",
}
"""The remedy where the system refuses, by the number of its error."""
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
    remedy = REMEDIES.get(error.errno or 0, "Make the place writable, or choose another (run.directory=...).")
    return f"{path} could not be written: {reason}. {remedy}"


def system_fault(error: BaseException) -> str:
    """Returns what is to be done about a fault of the system that an error tells of, or the error that it came from;
    "" for any other error, which may be a bug."""
    for one in _chain(error):
        if (isinstance(one, OSError) and one.errno in FULL) or any(words in str(one) for words in FULL_IN_WORDS):
            return f"Make room, then go on with --resume: {_description(one)}."
        if isinstance(one, OSError) and one.errno in REMEDIES:
            return f"{_description(one)}. {REMEDIES[one.errno]}"
    return ""


def _description(error: BaseException) -> str:
    if not isinstance(error, OSError) or not error.strerror:
        return " ".join(str(error).split())[:300].rstrip(".")
    return error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yields an error and those that it was raised from."""
    while error is not None:
        yield error
        error = error.__cause__


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
