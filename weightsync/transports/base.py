"""The seams of transports: broadcast to a group, and pull; and their abilities, which a transport states before a group
is formed, so that no code decides by its name. Does not import torch.

Both carry flat uint8 buckets, of a CPU or a GPU; neither knows what a tensor or an engine is. Calls end by their
deadline, with WeightSyncError where the bytes did not arrive.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from headway.broker.errors import WeightSyncError
from headway.broker.installation import TorchFacts
from headway.broker.schema.weights import DeltaSpec, WeightManifest
from headway.broker.user_code.import_paths import ImportRoots
from headway.weightsync.config import WeightsConfig
from headway.weightsync.limits import Deadline

if TYPE_CHECKING:
    import torch


class SupersededError(WeightSyncError):
    """A newer version has replaced the one that was asked for; nothing is wrong."""


class UnreachableError(WeightSyncError):
    """The learner or an archive did not answer, or stopped in the middle of an answer. Asking again may help."""


class BroadcastGroupTransport(Protocol):
    """One epoch's group: the learner is rank 0. After the first failure the group is of no more use."""

    def start(self, bucket: "torch.Tensor", deadline: Deadline) -> Callable[[], None]:
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

    def pull_bucket(self, manifest: WeightManifest, index: int, bucket: "torch.Tensor", deadline: Deadline) -> None:
        """Fill `bucket`, on any device, and verify it. Raises SupersededError, UnreachableError, or WeightSyncError for
        a damaged one."""
        ...

    def pull_delta(self, manifest: WeightManifest, delta: DeltaSpec, deadline: Deadline) -> memoryview:
        """Return one of the manifest's deltas, its digest verified. Raises the same errors as `pull_bucket`."""
        ...

    def forget(self) -> None:
        """Drop all that was kept from one bucket to the next: the pull has ended."""
        ...


@dataclass(frozen=True, kw_only=True)
class TransportAbilities:
    """The abilities of a transport. A class of the user's own may have them as its attribute `abilities`."""

    sends_host_memory: bool = True
    """Whether buckets may lie in host memory; otherwise they go through GPU memory."""
    sends_gpu_memory: bool = True
    """Whether buckets may lie in GPU memory; otherwise they go through host memory."""
    maps_memory: bool = False
    """Whether receivers map the learner's memory, and so must see the GPU on which it lies."""
    shares_gpu: bool = True
    """Whether learner and engine may share a GPU."""
    crosses_hosts: bool = True
    """Whether members may be on several machines."""
    notices_deaths: bool = True
    """Whether the calls of the other members fail as soon as a member is gone, instead of at their deadline."""


@dataclass(frozen=True, kw_only=True)
class BuiltinTransport:
    """A transport that comes with Headway."""

    abilities: TransportAbilities
    remedy: str
    """The package to install or the setting to change where it does not work."""
    examine: Callable[[TorchFacts], tuple[bool, str]]
    """Returns whether it works on this machine, and what it moves or what is missing, for `headway doctor`."""


def _has(name: str, found: str, *, needs_gpu: bool = False) -> Callable[[TorchFacts], tuple[bool, str]]:
    def examine(torch: TorchFacts) -> tuple[bool, str]:
        has = name in torch.collectives
        return has and (bool(torch.gpus) or not needs_gpu), found if has else "not in this build of torch"

    return examine


_ON_GPUS = TransportAbilities(sends_host_memory=False, shares_gpu=False, notices_deaths=False)

TRANSPORTS: dict[str, BuiltinTransport] = {
    "gloo": BuiltinTransport(
        abilities=TransportAbilities(sends_gpu_memory=False),
        remedy="This torch was built without gloo; weights are still pulled over HTTP.",
        examine=_has("gloo", "CPU memory, any network"),
    ),
    "nccl": BuiltinTransport(
        abilities=_ON_GPUS,
        remedy="Needs GPUs and a CUDA build of torch.",
        examine=_has("nccl", "GPU memory", needs_gpu=True),
    ),
    "ipc": BuiltinTransport(
        abilities=TransportAbilities(maps_memory=True, crosses_hosts=False),
        remedy="Needs a torch that imports.",
        examine=lambda torch: (bool(torch.version), "host or GPU memory, within one machine"),
    ),
    "ucc": BuiltinTransport(
        abilities=_ON_GPUS,
        remedy="Needs a torch built from source with USE_UCC=1.",
        examine=_has("ucc", "in this build of torch"),
    ),
}


def abilities_of(transport: str, roots: ImportRoots | None = None) -> TransportAbilities:
    """Return the abilities of `weights.transport`. A class of the user's own is imported for that, if `roots` are
    given; without them it counts as able to do everything. Raises ConfigError where it cannot be imported."""
    if transport in TRANSPORTS:
        return TRANSPORTS[transport].abilities
    if roots is None or ":" not in transport:
        return TransportAbilities()
    stated: TransportAbilities = getattr(roots.load(transport, "weights.transport"), "abilities", TransportAbilities())
    return stated


def broadcast_device(config: WeightsConfig, abilities: TransportAbilities) -> Literal["cpu", "cuda"]:
    """Return the device of sent and received buckets: GPUs where the transport needs that, or where `weights.staging`
    keeps a version there."""
    is_on_gpu = config.staging == "device" or (config.staging == "none" and not abilities.sends_host_memory)
    return "cuda" if is_on_gpu else "cpu"
