"""A limit on the size of files, which stands for a full disk."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_file_larger_than(size: int) -> Iterator[None]:
    """Have the kernel refuse writes beyond the limit, as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
