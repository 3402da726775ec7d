"""The seams between versions of weights and whatever carries their bytes.

Both carry flat uint8 buckets, of a CPU or a GPU; neither knows what a tensor or an engine is. Calls end by their
deadline, with WeightSyncError where the bytes did not get through.
"""

from collections.abc import Callable
from typing import Protocol

import torch

from broker.errors import WeightSyncError
from broker.schema import DeltaSpec, WeightManifest
from weightsync.deadline import Deadline


class SupersededError(WeightSyncError):
    """What was asked for has been replaced by a newer version; nothing is wrong."""


class UnreachableError(WeightSyncError):
    """Who was asked, the learner or an archive, did not answer, or stopped in the middle; asking again may do."""


class BroadcastGroupTransport(Protocol):
    """One epoch's group: the learner is rank 0. After the first failure the group is of no more use."""

    def start(self, bucket: torch.Tensor, deadline: Deadline) -> Callable[[], None]:
        """Rank 0 sends, all others receive into `bucket`. Same sizes, same order on every rank.

        What it returns blocks until the bucket is through, and is to be called, in the same order: until then `bucket`
        must be left alone.
        """
        ...

    def close(self) -> None:
        """Leave the group; the others' pending calls fail at once. Idempotent."""
        ...


class PullTransport(Protocol):
    """Fetches a version that is already complete, from any number of workers at their own pace."""

    def pull_bucket(self, manifest: WeightManifest, index: int, bucket: torch.Tensor, deadline: Deadline) -> None:
        """Fill `bucket`, on any device, and verify it. Raises SupersededError, UnreachableError, or WeightSyncError for
        a damaged one."""
        ...

    def pull_delta(self, manifest: WeightManifest, delta: DeltaSpec, deadline: Deadline) -> memoryview:
        """One of the manifest's deltas, its digest verified. Raises as `pull_bucket` does."""
        ...

    def forget(self) -> None:
        """The pull has ended: what was kept from one bucket to the next is of no more use."""
        ...
