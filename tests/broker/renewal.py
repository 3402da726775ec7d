"""Leases that a test renews, as a worker does it: with its heartbeat."""

from collections.abc import Sequence

from msgspec.structs import replace

from headway.broker import Broker
from headway.broker.schema import Lease

from .test_codec import WORKER


async def renew(broker: Broker, leases: Sequence[Lease], ttl_s: float = 30.0) -> set[str]:
    """The tokens of lost leases. From then on a worker of the first one's name is alive."""
    heard = await broker.status.heartbeat(replace(WORKER, worker=leases[0].worker), 30, leases, ttl_s)
    broker.leases.forget_lost(leases, heard.lost)
    return set(heard.lost)
