"""Backends state their abilities before they are opened, so that no caller compares names; without torch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from headway.broker.installation import TorchFacts, version_of
from headway.learner.config import LayoutConfig


@dataclass(frozen=True, kw_only=True)
class BackendAbilities:
    """The abilities of a backend. A class of the user's own is taken to lack nothing until it is opened."""

    splits: tuple[str, ...] = LayoutConfig.__struct_fields__
    """Keys of `learner.layout` that it can split a model by."""
    lacks: Mapping[str, str] = field(default_factory=dict)
    """Switches of `learner.compute` that it cannot turn on, with the reason for each."""
    quantizes_base: bool = True
    """Whether it holds the base of an adapter in few bits (`model.adapter.quantize_base`)."""
    computes_trees: bool = False
    """Whether it computes tokens once that sequences share (`PackedBatch.tree`), so that more of them fit into a row.
    For a class of the user's own, `learner.prefix_sharing=always` says that it does."""
    replays_kernels: bool = False
    """Whether it records the kernels of a small policy and replays them (`learner.compute.cuda_graphs`)."""


@dataclass(frozen=True, kw_only=True)
class KnownBackend:
    """A backend that comes with Headway."""

    policy: str
    """Import path of the class for a policy."""
    critic: str
    """Import path of the class for a critic."""
    scores: str
    """Import path of the class for a reward model."""
    plan: str
    """Import path of the function that estimates each rank's memory, `plan(PlannedModel) -> list[RankMemory]`."""
    abilities: BackendAbilities
    package: tuple[str, str] | None = None
    """(module, name) of what must be installed besides Headway."""
    remedy: str
    """The remedy if the package is missing: how to install it."""
    examine: Callable[[TorchFacts], tuple[bool, str]]
    """Returns for `headway doctor` whether the backend works on this machine, and the finding in words."""


def _fsdp(torch: TorchFacts) -> tuple[bool, str]:
    works = bool({"gloo", "nccl"} & set(torch.collectives))
    return works, f"torch {torch.version}" if torch.version else torch.problem


def _megatron(torch: TorchFacts) -> tuple[bool, str]:
    version = version_of("megatron-core")
    works, _ = _fsdp(torch)
    return works and version is not None, f"megatron-core {version}" if version else "not installed"


BACKENDS: dict[str, KnownBackend] = {
    "fsdp": KnownBackend(
        policy="headway.learner.backends.fsdp.backend:FsdpBackend",
        critic="headway.learner.backends.fsdp.backend:FsdpValueBackend",
        scores="headway.learner.backends.fsdp.backend:FsdpScoreBackend",
        plan="headway.learner.planning.fsdp:plan",
        abilities=BackendAbilities(splits=("context",), computes_trees=True, replays_kernels=True),
        remedy="A torch>=2.11 built with torch.distributed is needed.",
        examine=_fsdp,
    ),
    "megatron": KnownBackend(
        policy="headway.learner.backends.megatron.backend:MegatronBackend",
        critic="headway.learner.backends.megatron.backend:MegatronValueBackend",
        scores="headway.learner.backends.megatron.backend:MegatronScoreBackend",
        plan="headway.learner.planning.megatron:plan",
        abilities=BackendAbilities(
            computes_trees=True,
            quantizes_base=False,
            lacks={
                "compile": "megatron's layers are not compiled.",
                "offload_optimizer": "megatron shards the optimizer's state over replicas and context ranks; raise"
                " learner.processes.",
            },
        ),
        package=("megatron.core", "Megatron Core"),
        remedy="pip install 'headway[megatron]' (make install-megatron does it).",
        examine=_megatron,
    ),
}
