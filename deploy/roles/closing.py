"""A worker closes its parts, and the error that ends it is the one that is told."""

import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Protocol, TypeVar

log = logging.getLogger(__name__)


class WorkerPart(Protocol):
    """A worker's engine, or what it opens beside that."""

    async def close(self) -> None: ...


P = TypeVar("P", bound=WorkerPart | None)


@asynccontextmanager
async def closing_parts(engine: WorkerPart) -> AsyncIterator[list[WorkerPart]]:
    """Yield the worker's parts, to which the block adds what it opens, and close those that are left in it then.

    The engine is closed first, since a colocated learner waits for its memory. An error of closing is logged: a part is
    left where another error is under way, which is the one to tell.
    """
    opened = [engine]
    try:
        yield opened
    finally:
        async with AsyncExitStack() as closing:
            for part in reversed(opened):
                closing.push_async_callback(close_part, part)


async def close_part(part: WorkerPart) -> None:
    """Close the part. An error of closing is logged, since it would hide the error that is under way."""
    try:
        await part.close()
    except Exception as error:  # noqa: BLE001 - a user's own engine may raise anything
        log.warning("%s cannot be closed: %s: %s", type(part).__name__, type(error).__name__, error)


def closed_by(opened: list[WorkerPart], part: P) -> P:
    """Add this part of a worker, if there is one, to those that are closed, and return it."""
    if part is not None:
        opened.append(part)
    return part
