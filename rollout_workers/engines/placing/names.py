"""Published tensors under the names by which vLLM and SGLang load them."""

import torch

from headway.rollout_workers.engines.base import NamedTensors

from .loading import find_places, one_by_one, tied_names

HEAD = "lm_head.weight"


def wanted_tensors(shapes: torch.nn.Module, tensors: NamedTensors) -> NamedTensors:
    """Return the tensors as vLLM and SGLang want them: experts one by one, and a head of its own even if it is tied.

    Raises WeightSyncError unless they are the whole model.
    """
    find_places(shapes, tensors)
    return renamed(tied_head(shapes), tensors)


def renamed(tied_to_head: str | None, tensors: NamedTensors) -> NamedTensors:
    """Do as `wanted_tensors` for some of the tensors, without a check: the engine's processes know what they want."""
    named = dict(one_by_one(tensors))
    if tied_to_head in named:
        named[HEAD] = named[tied_to_head]
    return list(named.items())


def tied_head(shapes: torch.nn.Module) -> str | None:
    """Return the name of the tensor that the head is tied to; None if the head is not tied."""
    if HEAD not in tied_names(shapes):
        return None
    embedding = shapes.get_input_embeddings().weight  # type: ignore[operator]
    return next(name for name, parameter in shapes.named_parameters() if parameter is embedding)
