"""Fixtures of several tests of the broker: a second client, and a look at all keys of a run."""

from collections.abc import AsyncIterator, Iterator

import pytest

from broker import Broker, open_broker

from .audit import Auditor


@pytest.fixture
async def other(url: str, run_name: str) -> AsyncIterator[Broker]:
    """Yield the broker of another process."""
    opened = await open_broker(url, run_name)
    yield opened
    await opened.close()


@pytest.fixture
def auditor(url: str, run_name: str) -> Iterator[Auditor]:
    auditor = Auditor(url, run_name)
    yield auditor
    auditor.close()
