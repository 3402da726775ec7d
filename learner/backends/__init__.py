"""Backends hold, run and shard a model; each has a folder, behind the calls of `base.py`.

    fsdp/      FSDP2 over a transformers model, with context parallelism
    megatron/  Megatron Core: tensor, pipeline, context, expert parallelism
    token_logprobs.py   hidden states ─► logprobs, for both
    expert_rows.py      experts over rows sorted by expert, for both

    open_backend("fsdp", ...) ── logprobs, step ──► loss and gradients, summed over micro-batches and ranks
                              ├─ named_tensors ───► weightsync, by Hugging Face name
                              └─ save, load ──────► checkpoints

    open_backend("fsdp", ..., head="value") ── values, step, save, load: a critic, which is never published

Ranks that hold one replica of the model together get the same batches. The invariant: how sequences were packed, split
into micro-batches or spread over ranks, and how the model is laid out over them, changes no result but by rounding.
"""

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, NoReturn, overload

from broker.errors import ConfigError
from broker.installation import is_installed
from broker.user_code.kinds import unknown_kind
from broker.user_code.own import make_own
from broker.user_code.roots import load
from learner.config import ComputeConfig, LayoutConfig, ModelConfig, OptimizerConfig

from .abilities import BACKENDS, BackendAbilities

if TYPE_CHECKING:
    from .base import Backend, ValueBackend


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


def open_backend(
    kind: str,
    model: ModelConfig,
    optimizer: OptimizerConfig,
    *,
    device: str = "cpu",
    seed: int = 0,
    layout: LayoutConfig = LayoutConfig(),
    compute: ComputeConfig = ComputeConfig(),
    head: Literal["policy", "value"] = "policy",
) -> "Backend | ValueBackend":
    """Return the backend `kind` with its model and a fresh optimizer. Under torchrun every rank calls it.

    `head`: the model's own, or one of a single output, for a critic that starts from the same body.
    """

    def opened(opener: Callable[..., Any]) -> "Backend | ValueBackend":
        backend: Backend | ValueBackend = opener(
            model, optimizer, device=device, seed=seed, layout=layout, compute=compute
        )
        return backend

    if kind in BACKENDS:
        return opened(_class(kind, head))
    if ":" not in kind:
        raise unknown_kind(kind, BACKENDS, "learner.backend")
    from .base import Backend as PolicySeam
    from .base import ValueBackend as ValueSeam

    seam = PolicySeam if head == "policy" else ValueSeam
    own: Backend | ValueBackend = make_own(
        kind, seam, "learner.backend", lambda found: opened(_told(kind, found, head))
    )
    return own


def abilities_of(kind: str) -> BackendAbilities:
    """Return the abilities of a value of `learner.backend`; a class of the user's own states them once it is opened."""
    return BACKENDS[kind].abilities if kind in BACKENDS else BackendAbilities()


def check_installed(kind: str) -> None:
    """Raise ConfigError, with the remedy, where the package of the backend `kind` is missing."""
    known = BACKENDS.get(kind)
    if known is not None and known.package is not None and not is_installed(known.package[0]):
        raise ConfigError(f"learner.backend={kind} needs {known.package[1]}, which is not installed. {known.remedy}")


def _class(kind: str, head: str) -> Callable[..., Any]:
    """The class of a backend that comes with Headway."""
    check_installed(kind)
    known = BACKENDS[kind]
    path = known.policy if head == "policy" else known.critic
    found: Callable[..., Any] = load(path, "learner.backend") if path else _no_critic(kind)
    return found


def _told(kind: str, own: Callable[..., Any], head: str) -> Callable[..., Any]:
    """A class of the user's own, which is told by `head` that it is to hold a critic."""
    if head == "policy":
        return own
    takes_head = "head" in inspect.signature(own).parameters
    return functools.partial(own, head=head) if takes_head else _no_critic(kind)


def _no_critic(kind: str) -> NoReturn:
    raise ConfigError(
        f"learner.backend: {kind} holds no critic, which algorithm.advantage.kind=gae needs; use learner.backend=fsdp,"
        " an advantage that compares the samples of a group, or let your own class take `head`."
    )
