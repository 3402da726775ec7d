"""The seams between versions of weights and whatever carries their bytes.

Both carry flat uint8 CPU buckets; neither knows what a tensor or an engine is. Calls end by their deadline,
with WeightSyncError where the bytes did not get through.
"""

from typing import Protocol

import torch

from broker.schema import DeltaSpec, WeightManifest
from weightsync.deadline import Deadline


class BroadcastGroupTransport(Protocol):
    """One epoch's group: the learner is rank 0. After the first failure the group is of no more use."""

    def broadcast(self, bucket: torch.Tensor, deadline: Deadline) -> None:
        """Rank 0 sends, all others receive into `bucket`. Same sizes, same order on every rank."""
        ...

    def close(self) -> None:
        """Leave the group; the others' pending calls fail at once. Idempotent."""
        ...


class PullTransport(Protocol):
    """Fetches a version that is already complete, from any number of workers at their own pace."""

    def pull(self, manifest: WeightManifest, deadline: Deadline) -> tuple[torch.Tensor, ...]:
        """All buckets, verified. Raises SupersededError where a newer version has taken this one's place."""
        ...

    def pull_delta(self, manifest: WeightManifest, delta: DeltaSpec, deadline: Deadline) -> memoryview:
        """One of the manifest's deltas, its digest verified. Raises SupersededError where it is no longer served."""
        ...
