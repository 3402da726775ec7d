"""Published tensors under the names that vLLM loads them by."""

import torch

from rollout_workers.engines.base import NamedTensors
from rollout_workers.engines.placing.loading import find_places, one_by_one, tied_names

HEAD = "lm_head.weight"


def wanted_tensors(shapes: torch.nn.Module, tensors: NamedTensors) -> NamedTensors:
    """As vLLM wants them: experts one by one, and a head of its own even where it is tied.

    Raises WeightSyncError unless they are the whole model.
    """
    find_places(shapes, tensors)
    return renamed(tied_head(shapes), tensors)


def renamed(tied_to_head: str | None, tensors: NamedTensors) -> NamedTensors:
    """See `wanted_tensors`; of any of the model's tensors, as vLLM's processes know what they want."""
    named = dict(one_by_one(tensors))
    if tied_to_head in named:
        named[HEAD] = named[tied_to_head]
    return list(named.items())


def tied_head(shapes: torch.nn.Module) -> str | None:
    """The tensor that is the head as well; None where it has one of its own."""
    if HEAD not in tied_names(shapes):
        return None
    embedding = shapes.get_input_embeddings().weight  # type: ignore[operator]
    return next(name for name, parameter in shapes.named_parameters() if parameter is embedding)
