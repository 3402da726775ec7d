"""A file system without room, for the test's own process."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_files_over(nbytes: int) -> Iterator[None]:
    """As on one that is full: no file grows beyond so many bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
