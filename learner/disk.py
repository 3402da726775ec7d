"""Writes that reach the disk, whole or not at all, and messages with a remedy for those that the system refused."""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from headway.broker.errors import HeadwayError

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


UNFINISHED = ".part"
"""The ending of files that a process left when it was killed during a write."""


@contextmanager
def write_errors(path: Path) -> Iterator[None]:
    """Turn the system's refusal of `path` into a HeadwayError with the remedy."""
    try:
        yield
    except OSError as error:
        raise HeadwayError(not_written(path, error)) from error


def append_line(path: Path, line: bytes) -> None:
    """Append the line and its end, both or neither. Raises HeadwayError and leaves the file as it was.

    A process that is killed meanwhile may tear the line: a process that continues the file calls `cut_torn_line` first.
    """
    with write_errors(path), path.open("ab", buffering=0) as file:
        before = file.seek(0, os.SEEK_END)
        try:
            _write_all(file.fileno(), line + b"\n")
        except OSError:
            file.truncate(before)
            raise


def cut_torn_line(path: Path) -> None:
    """Keep only the file's whole lines. Raises HeadwayError."""
    with write_errors(path):
        content = path.read_bytes() if path.exists() else b""
        if content and not content.endswith(b"\n"):
            os.truncate(path, content.rfind(b"\n") + 1)


def replace_file(path: Path, content: bytes) -> None:
    """Replace the file durably. Raises HeadwayError and leaves the file as it was."""
    part = path.with_name(f".{path.name}{UNFINISHED}")
    try:
        with write_errors(path):
            with part.open("wb", buffering=0) as file:
                _write_all(file.fileno(), content)
                os.fsync(file.fileno())
            part.replace(path)
            sync(path.parent)
    except HeadwayError:
        with suppress(OSError):
            part.unlink()
        raise


def _write_all(descriptor: int, content: bytes) -> None:
    """Write all of it: a disk that is nearly full takes a part, and raises only at the next write."""
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(descriptor, rest) :]
