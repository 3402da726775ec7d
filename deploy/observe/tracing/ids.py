"""The ids of root spans: a hash of the run and of what the trace is about, so that every process knows them."""

from hashlib import blake2b
from typing import NamedTuple

from headway.broker.schema import TrajectoryId, WeightVersion

TRAJECTORY = "trajectory"
"""The name of a trajectory's root span."""
TRACE_BYTES, SPAN_BYTES = 16, 8


class RootIds(NamedTuple):
    """Ids of a trace and of its root span, as integers of 128 and 64 bits."""

    trace: int
    span: int


def ids_of_trajectory(identity: str, tid: TrajectoryId) -> RootIds:
    """Return the ids of the trajectory's root span; `identity` is the run's."""
    return _hashed(f"{identity}/trajectory/{tid}")


def ids_of_step(identity: str, version: WeightVersion) -> RootIds:
    """Return the ids of the root span of the step that trains this version."""
    return _hashed(f"{identity}/step/{version}")


def _hashed(name: str) -> RootIds:
    digest = blake2b(name.encode(), digest_size=TRACE_BYTES + SPAN_BYTES).digest()
    return RootIds(int.from_bytes(digest[:TRACE_BYTES]), int.from_bytes(digest[TRACE_BYTES:]))
