"""Fixtures of tests with a worker."""

from collections.abc import AsyncIterator

import pytest

from headway.broker.client.broker import Broker
from headway.broker.server.embedded import EmbeddedServer


@pytest.fixture
async def brokers(server: EmbeddedServer) -> AsyncIterator[tuple[Broker, Broker]]:
    """Yield the learner's broker and the worker's."""
    pair = Broker(server.url, "run", timeout_s=20), Broker(server.url, "run", timeout_s=0.5)
    yield pair
    for broker in pair:
        await broker.close()


@pytest.fixture
async def three_brokers(url: str, run_name: str) -> AsyncIterator[tuple[Broker, Broker, Broker]]:
    """Yield the learner's broker and those of two workers."""
    opened = Broker(url, run_name), Broker(url, run_name), Broker(url, run_name)
    yield opened
    for broker in opened:
        await broker.close()
