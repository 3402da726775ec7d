"""Weights in the memory of the server: in pieces, counted, and within limits."""

import asyncio

import pytest
import torch
from msgspec.structs import replace

from headway.broker import Broker
from headway.broker.client.weights import PIECE_BYTES
from headway.weightsync.archives import open_archive, open_reader
from headway.weightsync.config import WeightsConfig
from headway.weightsync.limits import RateLimiter
from headway.weightsync.transports.base import SupersededError
from tests.broker.scenario import hidden
from tests.weightsync.archives.follower import (
    FOREVER,
    NAME,
    WHOLE_BYTES,
    Follower,
    archived,
    in_broker,
    publish,
)
from tests.weightsync.conftest import TIMEOUT_S, Learner, announced


@in_broker
async def test_the_servers_memory_is_accounted_for(
    learner: Learner, config: WeightsConfig, broker: Broker, url: str, run_name: str
) -> None:
    await publish(learner, 6)
    keys = broker._connection.keys
    pieces = await broker._connection.scan(keys("archive:*"))
    held = [await broker._connection.execute("STRLEN", key) for key in pieces]
    counted = int(await broker._connection.execute("HGET", await hidden(broker, "meta"), "archive_bytes"))
    assert sum(held) == counted > WHOLE_BYTES
    assert max(held) <= PIECE_BYTES
    assert all([await broker._connection.execute("TTL", key) > 0 for key in pieces])
    successor = await asyncio.to_thread(Learner, url, run_name, replace(config, archive="none"), resume=True)
    await asyncio.to_thread(successor.close)
    assert await broker._connection.scan(keys("archive*")) == []
    assert await broker._connection.execute("HGET", await hidden(broker, "meta"), "archive_bytes") is None


@in_broker
async def test_weights_too_large_for_the_broker_are_refused_with_words(
    learner: Learner, broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    await broker._connection.execute("HSET", await hidden(broker, "meta"), "max_bytes", 4 * WHOLE_BYTES - 1)
    await publish(learner, 3)
    assert f"the weights are {WHOLE_BYTES} bytes, and the broker takes whole versions of at most" in caplog.text
    assert (await archived(broker)).anchor is None  # the deltas are there
    await broker._connection.execute("HSET", await hidden(broker, "meta"), "payload_bytes", 4 * WHOLE_BYTES)
    await publish(learner)
    assert "no room for" in caplog.text
    assert (await announced(broker)).archived is None


@in_broker
async def test_a_server_that_lost_its_archive_is_given_it_again(
    learner: Learner, config: WeightsConfig, broker: Broker
) -> None:
    await publish(learner, 3)
    await broker._connection.execute("UNLINK", *await broker._connection.scan(broker._connection.keys("archive*")))
    follower = Follower(broker, config.archive, only_archive=False)
    with pytest.raises(SupersededError):
        await follower.pull()
    await follower.pull()
    await publish(learner, 2)
    await Follower(broker, config.archive).pull()


@in_broker
async def test_large_blobs_come_in_pieces(learner: Learner, broker: Broker) -> None:
    archive = open_archive("broker", learner.blocking, learner.owner)
    assert archive is not None
    data = torch.randint(0, 256, (2 * PIECE_BYTES + 17,), dtype=torch.uint8).numpy().data
    await asyncio.to_thread(archive.put, NAME, data, FOREVER)
    assert await asyncio.to_thread(archive.keep_only, {NAME}) == {NAME}
    reader = open_reader("broker", broker, TIMEOUT_S)
    assert reader is not None
    found = memoryview(bytearray(len(data)))
    await asyncio.to_thread(reader.read, NAME, found, RateLimiter(None), FOREVER)
    assert found == data
