"""Whatever holds, runs and shards the model: one folder each, behind the five calls of `base.py`.

    open_backend("fsdp", ...) ── logprobs, step ──► loss and gradients, summed over micro-batches and ranks
                              ├─ named_tensors ───► weightsync, by Hugging Face name
                              └─ save, load ──────► checkpoints

The invariant: how sequences were packed, split into micro-batches or spread over ranks changes no result.
"""

import importlib

from broker.errors import ConfigError
from learner.config import ModelConfig, OptimizerConfig

from .base import Backend


def open_backend(
    kind: str, model: ModelConfig, optimizer: OptimizerConfig, *, device: str = "cpu", seed: int = 0
) -> Backend:
    """The backend `kind` with its model and a fresh optimizer. Under torchrun every rank calls it."""
    match kind:
        case "fsdp":
            from .fsdp.backend import FsdpBackend

            return FsdpBackend(model, optimizer, device=device, seed=seed)
        case _ if ":" in kind:
            return _open_own(kind, model, optimizer, device, seed)
        case _:
            raise ConfigError(f"learner.backend: there is no `{kind}`; use fsdp, or your own as package.module:Class.")


def _open_own(kind: str, model: ModelConfig, optimizer: OptimizerConfig, device: str, seed: int) -> Backend:
    """A user's class, constructed with the arguments that `FsdpBackend` takes."""
    module_name, _, class_name = kind.partition(":")
    try:
        backend_class = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"learner.backend: cannot load `{kind}`: {error}") from error
    backend: Backend = backend_class(model, optimizer, device=device, seed=seed)
    return backend
