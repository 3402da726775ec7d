"""Members hear of offers; whoever is gone or does not listen costs the learner nothing."""

import asyncio
import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from weightsync.doorbell import Doorbell, hear

LOCAL = "127.0.0.1"


async def test_all_who_listen_hear_each_ring_until_the_bell_is_gone() -> None:
    bell, heard = Doorbell(LOCAL), [asyncio.Event(), asyncio.Event()]
    gone = socket.create_connection((LOCAL, bell.port))
    gone.close()
    listening = [asyncio.create_task(hear(LOCAL, bell.port, event.set)) for event in heard]
    async with asyncio.timeout(30):
        for _ in range(3):
            while not all(event.is_set() for event in heard):  # they may still be connecting
                bell.ring()
                await asyncio.sleep(0.01)
            for event in heard:
                event.clear()
        bell.close()
        await asyncio.gather(*listening)
        await hear(LOCAL, bell.port, heard[0].set)  # nobody is there: no error


def test_who_does_not_read_is_dropped_and_holds_nobody_up() -> None:
    bell = Doorbell(LOCAL)
    with socket.create_connection((LOCAL, bell.port)):
        bell.ring()
        assert len(bell._members) == 1
        while bell._members:
            bell.ring()
    bell.close()


def test_a_learner_without_files_rings_those_who_are_there() -> None:
    bell, limits = Doorbell(LOCAL), resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.create_connection((LOCAL, bell.port)), socket.create_connection((LOCAL, bell.port)):
        with suppress_new_files(limits):
            bell.ring()
        assert bell._members == []
        bell.ring()
        assert len(bell._members) == 2
    bell.close()


@contextmanager
def suppress_new_files(limits: tuple[int, int]) -> Iterator[None]:
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
