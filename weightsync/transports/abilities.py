"""The abilities that a transport states before a group is formed, so that no code decides by a transport's name. Does
not import torch."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from headway.broker.installation import TorchFacts
from headway.broker.user_code.import_paths import ImportRoots
from headway.weightsync.config import WeightsConfig


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
class KnownTransport:
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

TRANSPORTS: dict[str, KnownTransport] = {
    "gloo": KnownTransport(
        abilities=TransportAbilities(sends_gpu_memory=False),
        remedy="This torch was built without gloo; weights are still pulled over HTTP.",
        examine=_has("gloo", "CPU memory, any network"),
    ),
    "nccl": KnownTransport(
        abilities=_ON_GPUS,
        remedy="Needs GPUs and a CUDA build of torch.",
        examine=_has("nccl", "GPU memory", needs_gpu=True),
    ),
    "ipc": KnownTransport(
        abilities=TransportAbilities(maps_memory=True, crosses_hosts=False),
        remedy="Needs a torch that imports.",
        examine=lambda torch: (bool(torch.version), "host or GPU memory, within one machine"),
    ),
    "ucc": KnownTransport(
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
