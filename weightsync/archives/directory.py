"""An archive in a directory: a file for each blob, in a folder named after the run, which belongs to the archive alone.

A file gets its name once all of it is on the disk. So readers need no locks, and a tool that copies the directory to
other hosts copies whole files.
"""

import errno
import os
import re
import shutil
from collections.abc import Callable, Generator, Set
from concurrent.futures import Future
from pathlib import Path
from typing import BinaryIO

from headway.broker.errors import WeightSyncError
from headway.weightsync.limits import Deadline, RateLimiter
from headway.weightsync.transports.base import SupersededError, UnreachableError
from headway.weightsync.transports.threads import DaemonPool, in_time

_NAME = re.compile(r"(?:anchor|delta)-(\d+)\.\d+(?:-\d+)?-[0-9a-f]{32}")
_UNFINISHED = ".part"
_PIECE_BYTES = 1 << 20
_GONE = (errno.ENOENT, errno.ESTALE)
"""A network file system raises ESTALE for a file that was removed while it was read."""


class DirectoryArchive:
    """The learner's end for one incarnation. It also removes files that earlier incarnations left."""

    def __init__(self, directory: Path, run: str, incarnation: int) -> None:
        if not directory.is_dir() or not os.access(directory, os.W_OK | os.X_OK):
            raise WeightSyncError(
                f"weights.archive names {directory}, which is no directory that this process may write to: create or"
                " mount it, or set weights.archive=none."
            )
        self._directory = directory
        self._folder = directory / run
        self._incarnation = incarnation

    def reserve(self, nbytes: int) -> None:
        """See Archive. Compares with the free space that the file system reports."""
        try:
            free = shutil.disk_usage(self._directory).free
        except OSError as error:
            raise _failed(self._directory, error) from error
        if free < nbytes:
            raise WeightSyncError(
                f"{self._directory} has {free} bytes free, and a whole version needs {nbytes}: make room for three"
                " versions, or set weights.archive to another directory"
            )

    def put(self, name: str, data: memoryview, deadline: Deadline) -> None:
        """See Archive."""
        path = self._folder / name
        unfinished = self._folder / (name + _UNFINISHED)
        try:
            self._folder.mkdir(exist_ok=True)
            if path.exists():
                return
            try:
                with unfinished.open("wb", buffering=0) as file:
                    _write(file, data, deadline)
                    os.fsync(file.fileno())
                unfinished.rename(path)
            finally:
                unfinished.unlink(missing_ok=True)
        except OSError as error:
            raise _failed(path, error) from error

    def keep_only(self, names: Set[str]) -> set[str]:
        """See Archive. Passes over files that no archive has written, and those of a later incarnation."""
        try:
            found = set(os.listdir(self._folder)) if self._folder.is_dir() else set[str]()
            for name in found - names:
                blob = name.removesuffix(_UNFINISHED)
                if (match := _NAME.fullmatch(blob)) and int(match[1]) <= self._incarnation and blob not in names:
                    (self._folder / name).unlink(missing_ok=True)
        except OSError as error:
            raise _failed(self._folder, error) from error
        return found & names


class DirectoryReader:
    """Reads the blobs of a learner, on its own host or another one.

    A file system may hang in any call. So each call runs in a thread that can be abandoned, and reads into memory of
    its own; no call is made while an abandoned one has not returned.
    """

    def __init__(self, directory: Path, run: str, timeout_s: float) -> None:
        self._folder = directory / run
        self._timeout_s = timeout_s
        self._left: set[Future[bytes]] = set()

    def read(self, name: str, data: memoryview, rate_limiter: RateLimiter, deadline: Deadline) -> None:
        """See ArchiveReader."""
        if not _NAME.fullmatch(name):
            raise WeightSyncError(f"{name!r} is no name of anything in an archive")
        thread, done = DaemonPool("archive", 1), 0
        pieces = _pieces(self._folder / name, len(data), rate_limiter.chunk_bytes(_PIECE_BYTES))
        try:
            while piece := self._in_time(thread, lambda: next(pieces, b""), deadline):
                data[done : done + len(piece)] = piece
                done += len(piece)
                rate_limiter.wait(len(piece), deadline)
        finally:
            thread.submit(pieces.close)
            thread.close()
        if done < len(data):
            raise WeightSyncError(f"{self._folder / name} ended after {done} of {len(data)} bytes")

    def _in_time(self, thread: DaemonPool, read: Callable[[], bytes], deadline: Deadline) -> bytes:
        what = f"reading in {self._folder}"
        deadline.check(what)
        if self._left:
            raise UnreachableError(f"{what}: an earlier call hangs there")
        reading = thread.submit(read)
        try:
            return in_time(reading, self._timeout_s, deadline, what)
        finally:
            if not reading.done():
                self._left.add(reading)
                reading.add_done_callback(self._left.discard)


def _pieces(path: Path, nbytes: int, piece_bytes: int) -> Generator[bytes]:
    """Yield the pieces of a file of `nbytes` bytes, to its end."""
    try:
        with path.open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            if size != nbytes:
                raise WeightSyncError(f"{path} has {size} bytes instead of {nbytes}")
            while piece := file.read(min(piece_bytes, nbytes)):
                nbytes -= len(piece)
                yield piece
    except OSError as error:
        if error.errno in _GONE and path.parent.is_dir():
            raise SupersededError(f"{path} is there no longer") from error
        raise _failed(path, error) from error


def _write(file: BinaryIO, data: memoryview, deadline: Deadline) -> None:
    done = 0
    while done < len(data):
        deadline.check(f"writing {done} of {len(data)} bytes")
        done += file.write(data[done : done + _PIECE_BYTES])


def _failed(path: Path, error: OSError) -> WeightSyncError:
    return WeightSyncError(
        f"{path}: {error.strerror or error}; is the file system of weights.archive full, or not mounted here?"
    )
