"""Backends hold, run and shard a model; each has a folder, behind the calls of `base.py`.

    fsdp/      FSDP2 over a transformers model, with context parallelism
    megatron/  Megatron Core: tensor, pipeline, context, expert parallelism
    token_logprobs.py   hidden states ─► logprobs, for both
    expert_rows.py      experts over rows sorted by expert, for both
    adapter_files.py    an adapter beside its base model, read as one
    quantized.py        frozen weights in 4 or 8 bits
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
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeAlias, overload

import msgspec

from headway.broker.errors import ConfigError
from headway.broker.installation import is_installed
from headway.broker.user_code.import_paths import load, load_custom
from headway.broker.user_code.kinds import unknown_kind
from headway.learner.config import AdapterConfig, ComputeConfig, LayoutConfig, ModelConfig, OptimizerConfig

from .abilities import BACKENDS, BackendAbilities

if TYPE_CHECKING:
    from .base import Backend, ScoreBackend, ValueBackend

Head = Literal["policy", "value", "score"]
Opened: TypeAlias = "Backend | ValueBackend | ScoreBackend"


@overload
def open_backend(
    kind: str,
    model: ModelConfig,
    optimizer: OptimizerConfig,
    *,
    device: str = "cpu",
    seed: int = 0,
    layout: LayoutConfig = LayoutConfig(),
    compute: ComputeConfig = ComputeConfig(),
    head: Literal["policy"] = "policy",
) -> "Backend": ...


@overload
def open_backend(
    kind: str,
    model: ModelConfig,
    optimizer: OptimizerConfig,
    *,
    device: str = "cpu",
    seed: int = 0,
    layout: LayoutConfig = LayoutConfig(),
    compute: ComputeConfig = ComputeConfig(),
    head: Literal["value"],
) -> "ValueBackend": ...


@overload
def open_backend(
    kind: str,
    model: ModelConfig,
    optimizer: OptimizerConfig,
    *,
    device: str = "cpu",
    seed: int = 0,
    layout: LayoutConfig = LayoutConfig(),
    compute: ComputeConfig = ComputeConfig(),
    head: Literal["score"],
) -> "ScoreBackend": ...


def open_backend(
    kind: str,
    model: ModelConfig,
    optimizer: OptimizerConfig,
    *,
    device: str = "cpu",
    seed: int = 0,
    layout: LayoutConfig = LayoutConfig(),
    compute: ComputeConfig = ComputeConfig(),
    head: Head = "policy",
) -> Opened:
    """Return the backend `kind` with its model and a fresh optimizer. Under torchrun every rank calls it.

    `head`: the model's own, or one of a single output, for a critic or a reward model with the same body. Raises
    ConfigError for a reward model in the place of a policy, and for a base of adapters that the backend cannot hold.
    Models of scores are always trained whole.
    """
    if head == "policy":
        from .score_head import check_is_policy

        check_is_policy(model)
        if complaint := unfit_base(kind, model.adapter, compute):
            raise ConfigError(complaint)
    else:
        model = msgspec.structs.replace(model, adapter=None)

    def opened(opener: Callable[..., Any]) -> Opened:
        backend: Opened = opener(model, optimizer, device=device, seed=seed, layout=layout, compute=compute)
        return backend

    if kind in BACKENDS:
        return opened(_class(kind, head))
    if ":" not in kind:
        raise unknown_kind(kind, BACKENDS, "learner.backend")
    from . import base

    seam = {"policy": base.Backend, "value": base.ValueBackend, "score": base.ScoreBackend}[head]
    own: Opened = load_custom(kind, seam, "learner.backend", lambda found: opened(_told(kind, found, head)))
    return own


def abilities_of(kind: str) -> BackendAbilities:
    """Return the abilities of a value of `learner.backend`; a class of the user's own states them once it is opened."""
    return BACKENDS[kind].abilities if kind in BACKENDS else BackendAbilities()


def unfit_base(kind: str, adapter: AdapterConfig | None, compute: ComputeConfig) -> str:
    """Return why the backend cannot hold the base of an adapter as it should be, and the remedy; nothing if it can."""
    if adapter is None or adapter.quantize_base == "none":
        return ""
    asked = f"model.adapter.quantize_base is {adapter.quantize_base}, and"
    if not abilities_of(kind).quantizes_base:
        return (
            f"{asked} learner.backend={kind} holds the base in model.dtype alone. Set it to none, or use"
            " learner.backend=fsdp."
        )
    if compute.compile:
        return f"{asked} learner.compute.compile=true knows no quantized weights. Leave one of both out."
    return ""


def check_installed(kind: str) -> None:
    """Raise ConfigError, with the remedy, where the package of the backend `kind` is missing."""
    known = BACKENDS.get(kind)
    if known is not None and known.package is not None and not is_installed(known.package[0]):
        raise ConfigError(f"learner.backend={kind} needs {known.package[1]}, which is not installed. {known.remedy}")


def _class(kind: str, head: Head) -> Callable[..., Any]:
    """The class of a backend that comes with Headway."""
    check_installed(kind)
    known = BACKENDS[kind]
    path = {"policy": known.policy, "value": known.critic, "score": known.scores}[head]
    found: Callable[..., Any] = load(path, "learner.backend")
    return found


def _told(kind: str, own: Callable[..., Any], head: Head) -> Callable[..., Any]:
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
