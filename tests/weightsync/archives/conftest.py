"""A learner with a reason to archive, in a directory and in the broker."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from headway.broker import Broker
from headway.weightsync.config import WeightsConfig
from tests.weightsync.conftest import CONFIG, Learner
from tests.weightsync.worker_process import HEARTBEAT_TTL_S, worker_info


@pytest.fixture(params=["file", "broker"])
def config(request: pytest.FixtureRequest, tmp_path: Path) -> WeightsConfig:
    (tmp_path / "shared weights").mkdir()
    archive = f"file://{tmp_path}/shared%20weights" if request.param == "file" else request.param
    return replace(CONFIG, archive=archive, delta_chain=4)


@pytest.fixture
def folder(tmp_path: Path, run_name: str) -> Path:
    """Return the directory of the archive of a learner with `in_directory`."""
    return tmp_path / "shared weights" / run_name


@pytest.fixture
async def learner(url: str, run_name: str, broker: Broker, config: WeightsConfig) -> AsyncIterator[Learner]:
    """Yield a learner that has a worker which follows by pull, and so a reason to archive."""
    started = await asyncio.to_thread(Learner, url, run_name, config)
    await broker.status.heartbeat(worker_info("far", None, 0, joins_groups=False), HEARTBEAT_TTL_S)
    yield started
    await asyncio.to_thread(started.close)
