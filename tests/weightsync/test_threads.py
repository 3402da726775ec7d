"""Blocking calls in threads leave nothing behind."""

import asyncio
import gc
import threading
import weakref
from contextlib import suppress

from headway.broker.errors import WeightSyncError
from headway.weightsync.transports.threads import BoundedThreads


class Memory:
    """Memory that a call has taken."""


async def test_what_a_failed_call_held_is_free_at_once() -> None:
    held: list[weakref.ref[Memory]] = []

    def fail() -> None:
        memory = Memory()
        held.append(weakref.ref(memory))
        raise WeightSyncError("the line is gone")

    gc.disable()  # the collector may not run for long
    try:
        threads = BoundedThreads()
        with suppress(WeightSyncError):  # pytest.raises keeps the traceback
            await threads.run("test", fail, threading.Event(), overdue_s=20)
        await threads.stop(20)
        await asyncio.sleep(0)  # until then the event loop is in the call that woke this task, and holds the error
        assert held[0]() is None
    finally:
        gc.enable()
