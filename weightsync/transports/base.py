"""The seams of transports: broadcast to a group, and pull.

Both carry flat uint8 buckets, of a CPU or a GPU; neither knows what a tensor or an engine is. Calls end by their
deadline, with WeightSyncError where the bytes did not arrive.
"""

from collections.abc import Callable
from typing import Protocol

import torch

from headway.broker.errors import WeightSyncError
from headway.broker.schema.weights import DeltaSpec, WeightManifest
from headway.weightsync.limits import Deadline


class SupersededError(WeightSyncError):
    """A newer version has replaced the one that was asked for; nothing is wrong."""


class UnreachableError(WeightSyncError):
    """The learner or an archive did not answer, or stopped in the middle of an answer. Asking again may help."""


class BroadcastGroupTransport(Protocol):
    """One epoch's group: the learner is rank 0. After the first failure the group is of no more use."""

    def start(self, bucket: torch.Tensor, deadline: Deadline) -> Callable[[], None]:
        """Begin a transfer: rank 0 sends `bucket`, all other ranks receive into it. Sizes and order are the same on all
        ranks.

        Returns a function that blocks until the transfer has ended. The caller must call it, in the same order, and
        leave `bucket` alone until then.
        """
        ...

    def close(self) -> None:
        """Leave the group. Pending calls of the other ranks fail at once. Idempotent."""
        ...


class PullTransport(Protocol):
    """Fetches a version that is already complete. Any number of workers do so, each at its own pace."""

    def pull_bucket(self, manifest: WeightManifest, index: int, bucket: torch.Tensor, deadline: Deadline) -> None:
        """Fill `bucket`, on any device, and verify it. Raises SupersededError, UnreachableError, or WeightSyncError for
        a damaged one."""
        ...

    def pull_delta(self, manifest: WeightManifest, delta: DeltaSpec, deadline: Deadline) -> memoryview:
        """Return one of the manifest's deltas, its digest verified. Raises the same errors as `pull_bucket`."""
        ...

    def forget(self) -> None:
        """Drop all that was kept from one bucket to the next: the pull has ended."""
        ...
