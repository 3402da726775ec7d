"""A worker and a scorer whose server begins to refuse their user: they go on for a while, and then end for good."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from broker.client.broker import Broker
from broker.connection import refusals
from broker.errors import LASTING_EXIT, BrokerError, NotAllowedError, RefusedByServerError
from broker.server.access import Role, User
from broker.server.embedded import EmbeddedServer
from tests.broker.test_access import admit, refuse, url_of

from .loop import LONG, Deliveries, Learner, make_engine, make_worker, running, until
from .test_serving import Lengths, serve

ALL = 4
"""Groups of a run."""
REFUSALS = [("-@all", NotAllowedError), ("password", RefusedByServerError)]


@pytest.fixture
async def opened(server: EmbeddedServer, run_name: str) -> AsyncIterator[dict[Role, tuple[Broker, User]]]:
    """Yield a broker of each role, with its user."""
    users = admit(server, None)
    found = {role: (Broker(url_of(server, user), run_name, timeout_s=2), user) for role, user in users.items()}
    yield found
    for broker, _ in found.values():
        await broker.close()


@pytest.mark.parametrize(("how", "error"), REFUSALS)
async def test_a_worker_that_is_refused_on_and_on_ends_for_good(
    how: str,
    error: type[BrokerError],
    opened: dict[Role, tuple[Broker, User]],
    server: EmbeddedServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(refusals, "REFUSED_S", 2.0)
    learner, deliveries = await Learner.start(opened[Role.LEARNER][0], groups=ALL), Deliveries()
    broker, user = opened[Role.WORKER]
    worker = make_worker(broker, make_engine(tmp_path), deliveries, max_new_tokens=LONG, farewell_s=0.5)
    await learner.publish(0, deliveries)
    task = asyncio.create_task(worker.run())
    await until(lambda: worker.info().generated_tokens > 0)
    refuse(server, user, how)
    async with asyncio.timeout(60):
        with pytest.raises(error) as caught:
            await task
    assert caught.value.exit_code == LASTING_EXIT


async def test_a_worker_goes_on_that_gets_its_rights_back(
    opened: dict[Role, tuple[Broker, User]], server: EmbeddedServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    learner, deliveries = await Learner.start(opened[Role.LEARNER][0], groups=ALL), Deliveries()
    broker, user = opened[Role.WORKER]
    worker = make_worker(broker, make_engine(tmp_path), deliveries, max_new_tokens=LONG)
    await learner.publish(0, deliveries)
    async with running(worker) as task:
        await until(lambda: worker.info().generated_tokens > 0)
        refuse(server, user, "-@all")
        await until(lambda: "may not do this" in caplog.text)
        admit(server, None)
        assert len(await learner.take(0)) == learner.groups_per_step
        assert not task.done()


@pytest.mark.parametrize(("how", "error"), REFUSALS)
async def test_a_scorer_that_is_refused_on_and_on_ends_for_good(
    how: str,
    error: type[BrokerError],
    opened: dict[Role, tuple[Broker, User]],
    server: EmbeddedServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(refusals, "REFUSED_S", 2.0)
    await Learner.start(opened[Role.LEARNER][0], groups=1)
    broker, user = opened[Role.SCORER]
    task = asyncio.create_task(serve(broker, Lengths()).run())
    await asyncio.sleep(0)
    refuse(server, user, how)
    async with asyncio.timeout(60):
        with pytest.raises(error) as caught:
            await task
    assert caught.value.exit_code == LASTING_EXIT
