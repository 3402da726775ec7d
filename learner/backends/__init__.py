"""Whatever holds, runs and shards a model: one folder each, behind the calls of `base.py`.

    fsdp/      FSDP2 over a transformers model, with context parallelism     token_logprobs.py   what both make of
    megatron/  Megatron Core: tensor, pipeline, context, expert parallelism  expert_rows.py      hidden states, experts

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
from typing import Any, Literal, overload

from broker.errors import ConfigError
from broker.user_code.roots import load
from learner.config import ComputeConfig, LayoutConfig, ModelConfig, OptimizerConfig

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
) -> Backend: ...


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
) -> ValueBackend: ...


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
) -> Backend | ValueBackend:
    """The backend `kind` with its model and a fresh optimizer. Under torchrun every rank calls it.

    `head`: the model's own, or one of a single output, for a critic that starts from the same body.
    """
    match kind:
        case "fsdp":
            from .fsdp.backend import FsdpBackend, FsdpValueBackend

            fsdp_class: type[FsdpBackend | FsdpValueBackend] = FsdpBackend if head == "policy" else FsdpValueBackend
            return fsdp_class(model, optimizer, device=device, seed=seed, layout=layout, compute=compute)
        case "megatron":
            from .megatron.backend import MegatronBackend

            if head == "value":
                raise ConfigError(
                    "learner.backend: megatron holds no critic, which algorithm.advantage.kind=gae needs; use "
                    "learner.backend=fsdp, or an advantage that compares the samples of a group."
                )
            return MegatronBackend(model, optimizer, device=device, seed=seed, layout=layout, compute=compute)
        case _ if ":" in kind:
            own_class = _own_class(kind, head)
            own: Backend | ValueBackend = own_class(
                model, optimizer, device=device, seed=seed, layout=layout, compute=compute
            )
            return own
        case _:
            raise ConfigError(
                f"learner.backend: there is no `{kind}`; use fsdp, megatron, or your own as package.module:Class."
            )


def _own_class(kind: str, head: str) -> Callable[..., Any]:
    """A user's class, which takes the arguments that `FsdpBackend` takes, and for a critic `head`."""
    backend_class: Callable[..., Any] = load(kind, "learner.backend")
    if head == "policy":
        return backend_class
    if "head" not in inspect.signature(backend_class).parameters:
        raise ConfigError(f"learner.backend: `{kind}` takes no `head`, so it cannot hold a critic, which gae needs.")
    return functools.partial(backend_class, head=head)
