"""Fixtures of several tests of the broker: a second client, a look at all keys of a run, and a hostile worker."""

from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack

import pytest

from headway.broker import Broker, open_broker
from headway.broker.schema.weights import ModelFiles
from headway.broker.server.access import Role
from headway.broker.server.embedded import EmbeddedServer

from .audit import Auditor
from .hostile import Cast, Hostile
from .scenario import begin, rules
from .test_access import admit, url_of


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


@pytest.fixture
async def cast(server: EmbeddedServer, run_name: str) -> AsyncIterator[Cast]:
    async with AsyncExitStack() as stack:
        made = admit(server, run_name)
        learner = await open_broker(url_of(server, made[Role.LEARNER]), run_name)
        worker = await open_broker(url_of(server, made[Role.WORKER]), run_name)
        stack.push_async_callback(learner.close)
        stack.push_async_callback(worker.close)
        run = await begin(learner, rules(8, lease_ttl_s=0.5, segment_s=0.1, scorers="quality teacher"), fed=12)
        await learner.versions.put_model(run.owner, ModelFiles(files={"config.json": b"{}"}))
        hostile = Hostile(url_of(server, made[Role.WORKER]), run_name)
        stack.callback(hostile.client.close)
        yield Cast(learner, worker, hostile, run)
