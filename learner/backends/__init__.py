"""Backends hold, run and shard a model; each has a folder, behind the calls of `base.py`.

    fsdp/      FSDP2 over a transformers model, with context parallelism
    megatron/  Megatron Core: tensor, pipeline, context, expert parallelism
    token_logprobs.py   hidden states ─► logprobs, for both
    moe.py              experts over rows sorted by expert, for both
    adapter.py          an adapter beside its base model, read as one
    quantization.py     frozen weights in 4 or 8 bits
    score_head.py       the first weights of a critic's or reward model's head

    open_backend("fsdp", ...) ── logprobs, step ──► loss and gradients, summed over micro-batches and ranks
                              ├─ named_tensors ───► weightsync, by Hugging Face name
                              └─ save, load ──────► checkpoints

    open_backend("fsdp", ..., head="value") ── values, step, save, load: a critic, which is never published
    open_backend("fsdp", ..., head="score") ── the same of a reward model, saved as transformers' sequence classifier

Ranks that hold one replica of the model together get the same batches. The invariant: how sequences were packed, split
into micro-batches or spread over ranks, and how the model is laid out over them, changes no result but by rounding.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeAlias, TypedDict, Unpack, overload

import msgspec

from headway.broker.errors import ConfigError
from headway.broker.installation import TorchFacts, is_installed, version_of
from headway.broker.user_code.import_paths import load, load_custom
from headway.broker.user_code.kinds import unknown_kind
from headway.learner.config import AdapterConfig, ComputeConfig, LayoutConfig, ModelConfig, OptimizerConfig

if TYPE_CHECKING:
    from .base import Backend, ScoreBackend, ValueBackend


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
class BuiltinBackend:
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


BACKENDS: dict[str, BuiltinBackend] = {
    "fsdp": BuiltinBackend(
        policy="headway.learner.backends.fsdp.backend:FsdpBackend",
        critic="headway.learner.backends.fsdp.backend:FsdpValueBackend",
        scores="headway.learner.backends.fsdp.backend:FsdpScoreBackend",
        plan="headway.learner.planning.fsdp:plan",
        abilities=BackendAbilities(splits=("context",), computes_trees=True, replays_kernels=True),
        remedy="A torch>=2.11 built with torch.distributed is needed.",
        examine=_fsdp,
    ),
    "megatron": BuiltinBackend(
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


Head = Literal["policy", "value", "score"]
AnyBackend: TypeAlias = "Backend | ValueBackend | ScoreBackend"


class BackendOptions(TypedDict, total=False):
    """The keyword arguments of every backend, with their defaults in `_DEFAULTS`."""

    device: str
    seed: int
    layout: LayoutConfig
    compute: ComputeConfig


_DEFAULTS: BackendOptions = {"device": "cpu", "seed": 0, "layout": LayoutConfig(), "compute": ComputeConfig()}


@overload
def open_backend(
    kind: str,
    model: ModelConfig,
    optimizer: OptimizerConfig,
    *,
    head: Literal["policy"] = "policy",
    **options: Unpack[BackendOptions],
) -> "Backend": ...


@overload
def open_backend(
    kind: str,
    model: ModelConfig,
    optimizer: OptimizerConfig,
    *,
    head: Literal["value"],
    **options: Unpack[BackendOptions],
) -> "ValueBackend": ...


@overload
def open_backend(
    kind: str,
    model: ModelConfig,
    optimizer: OptimizerConfig,
    *,
    head: Literal["score"],
    **options: Unpack[BackendOptions],
) -> "ScoreBackend": ...


def open_backend(
    kind: str,
    model: ModelConfig,
    optimizer: OptimizerConfig,
    *,
    head: Head = "policy",
    **options: Unpack[BackendOptions],
) -> AnyBackend:
    """Return the backend `kind` with its model and a fresh optimizer. Under torchrun every rank calls it.

    `head`: the model's own, or one of a single output, for a critic or a reward model with the same body. Raises
    ConfigError for a reward model in the place of a policy, and for a base of adapters that the backend cannot hold.
    Models of scores are always trained whole.
    """
    given: BackendOptions = {**_DEFAULTS, **options}
    if head == "policy":
        from .score_head import check_is_policy

        check_is_policy(model)
        if complaint := adapter_base_problem(kind, model.adapter, given["compute"]):
            raise ConfigError(complaint)
    else:
        model = msgspec.structs.replace(model, adapter=None)

    def opened(opener: Callable[..., Any]) -> AnyBackend:
        backend: AnyBackend = opener(model, optimizer, **given)
        return backend

    if kind in BACKENDS:
        return opened(_builtin_class(kind, head))
    if ":" not in kind:
        raise unknown_kind(kind, BACKENDS, "learner.backend")

    from . import base

    seam = {"policy": base.Backend, "value": base.ValueBackend, "score": base.ScoreBackend}[head]
    own: AnyBackend = load_custom(kind, seam, "learner.backend", lambda found: opened(_with_head(kind, found, head)))
    return own


def abilities_of(kind: str) -> BackendAbilities:
    """Return the abilities of a value of `learner.backend`; a class of the user's own states them once it is opened."""
    return BACKENDS[kind].abilities if kind in BACKENDS else BackendAbilities()


def adapter_base_problem(kind: str, adapter: AdapterConfig | None, compute: ComputeConfig) -> str:
    """Return why the backend cannot hold the base of an adapter as it should be, and the remedy; nothing if it can."""
    if adapter is None or adapter.quantize_base == "none":
        return ""
    stated = f"model.adapter.quantize_base is {adapter.quantize_base}, and"
    if not abilities_of(kind).quantizes_base:
        return (
            f"{stated} learner.backend={kind} holds the base in model.dtype alone. Set it to none, or use"
            " learner.backend=fsdp."
        )
    if compute.compile:
        return f"{stated} learner.compute.compile=true knows no quantized weights. Leave one of both out."
    return ""


def check_installed(kind: str) -> None:
    """Raise ConfigError, with the remedy, where the package of the backend `kind` is missing."""
    known = BACKENDS.get(kind)
    if known is not None and known.package is not None and not is_installed(known.package[0]):
        raise ConfigError(f"learner.backend={kind} needs {known.package[1]}, which is not installed. {known.remedy}")


def _builtin_class(kind: str, head: Head) -> Callable[..., Any]:
    """The class of a backend that comes with Headway."""
    check_installed(kind)
    known = BACKENDS[kind]
    path = {"policy": known.policy, "value": known.critic, "score": known.scores}[head]
    found: Callable[..., Any] = load(path, "learner.backend")
    return found


def _with_head(kind: str, own: Callable[..., Any], head: Head) -> Callable[..., Any]:
    """A class of the user's own, which is told by `head` that it is to hold a critic or a reward model."""
    if head == "policy":
        return own
    takes_head = "head" in inspect.signature(own).parameters
    return functools.partial(own, head=head) if takes_head else _no_critic(kind)


def _no_critic(kind: str) -> NoReturn:
    raise ConfigError(
        f"learner.backend: {kind} holds neither a critic, which algorithm.advantage.kind=gae needs, nor a reward model;"
        " use fsdp or megatron, an advantage that compares the samples of a group, or let your own class take"
        " `head`."
    )
