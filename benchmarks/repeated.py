"""Looks at something that goes on, again and again, beside the code that waits for it."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def repeated(look: Callable[[], None], every_s: float) -> Iterator[None]:
    """Call `look` every so many seconds, in a thread, until the end of the block. The last call has returned when the
    block is left. What `look` raises ends the looking, not the block."""
    is_over = threading.Event()

    def follow() -> None:
        while not is_over.wait(every_s):
            look()

    thread = threading.Thread(target=follow, name="repeated")
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
