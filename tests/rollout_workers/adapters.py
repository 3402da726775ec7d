"""Random adapters of the tests' models, with the models that they make of them, merged in the open."""

from collections.abc import Sequence

import torch
from msgspec.structs import replace
from transformers import PreTrainedModel

from headway.broker.schema import WeightVersion

from .loop import Delivery, delivery, manifest
from .models import Architecture, make_model, named_tensors

SCALE = 2.0
RANK = 4
NamedTensors = list[tuple[str, torch.Tensor]]


def make_adapter(model: PreTrainedModel, seed: int, size: float = 0.2) -> NamedTensors:
    """Return A and B of all linear layers and experts of the decoder, by the names in which versions carry them."""
    generator = torch.Generator().manual_seed(seed)
    found: NamedTensors = []
    for name, weight in model.named_parameters():
        if not name.removesuffix(".weight").endswith("_proj"):
            continue
        module, _, last = name.rpartition(".")
        prefix = f"{module}." if last == "weight" else f"{name}_"
        *outer, rows, columns = weight.shape
        shapes = {"lora_A": (*outer, RANK, columns), "lora_B": (*outer, rows, RANK)}
        found += [
            (f"{prefix}{factor}", size * torch.randn(shape, generator=generator)) for factor, shape in shapes.items()
        ]
    return found


def of_attention(adapter: NamedTensors) -> NamedTensors:
    """Return the part of an adapter that changes attention."""
    return [(name, tensor) for name, tensor in adapter if ".self_attn." in name]


@torch.no_grad()
def merged(architecture: Architecture, adapter: Sequence[tuple[str, torch.Tensor]], seed: int = 0) -> PreTrainedModel:
    """Return the model of that seed with W + scale * B A in the place of W."""
    model, factors = make_model(architecture, seed), dict(adapter)
    for name, weight in model.named_parameters():
        prefix = name.removesuffix("weight") if name.endswith(".weight") else f"{name}_"
        if f"{prefix}lora_A" in factors:
            weight += SCALE * torch.einsum("...or,...ri->...oi", factors[f"{prefix}lora_B"], factors[f"{prefix}lora_A"])
    return model


def adapter_delivery(version: WeightVersion, adapter: NamedTensors, architecture: Architecture = "dense") -> Delivery:
    """Return a version that carries the adapter alone, and whose probe is of the merged model, and of the base."""
    probe = delivery(version, merged(architecture, adapter)).manifest.probe
    of_base = delivery(version, make_model(architecture, 0)).manifest.probe
    return Delivery(manifest(version, replace(probe, base_logprobs=of_base.logprobs), adapter), adapter)


def base_tensors(architecture: Architecture) -> NamedTensors:
    return named_tensors(make_model(architecture, 0))
