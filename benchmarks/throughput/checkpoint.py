"""A Hugging Face directory of random weights, written layer by layer: names, files and number format as on the hub."""

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import torch

from headway.learner.config import ModelConfig, RandomModelConfig
from headway.learner.models.model import load_tokenizer

from . import isolated
from .shapes import Shape

ALPHABET = "0123456789abcdefghijklmnopqrstuvwxyz +-*=,.#^"
SCALE = 0.02
"""The standard deviation of every matrix, unless a caller sets another; norms are 1."""

Sizes = dict[str, tuple[int, ...]]


def layer_sizes(shape: Shape, layer: int) -> Sizes:
    """Return names and sizes of a layer's tensors."""
    prefix, hidden, head = f"model.layers.{layer}.", shape.hidden, shape.head_dim
    sizes: Sizes = {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_norm": (head,),
        "self_attn.k_norm": (head,),
        "self_attn.q_proj": (shape.heads * head, hidden),
        "self_attn.k_proj": (shape.key_value_heads * head, hidden),
        "self_attn.v_proj": (shape.key_value_heads * head, hidden),
        "self_attn.o_proj": (hidden, shape.heads * head),
    }
    if shape.experts:
        sizes["mlp.gate"] = (shape.experts, hidden)
        for expert in range(shape.experts):
            sizes |= _feed_forward(f"mlp.experts.{expert}.", hidden, shape.expert_intermediate)
    else:
        sizes |= _feed_forward("mlp.", hidden, shape.intermediate)
    return {f"{prefix}{name}.weight": size for name, size in sizes.items()}


def _feed_forward(prefix: str, hidden: int, intermediate: int) -> Sizes:
    wide, narrow = (intermediate, hidden), (hidden, intermediate)
    return {f"{prefix}gate_proj": wide, f"{prefix}up_proj": wide, f"{prefix}down_proj": narrow}


def outer_sizes(shape: Shape) -> Sizes:
    """Return names and sizes of the tensors that belong to no layer."""
    matrix = (shape.vocabulary, shape.hidden)
    head = {} if shape.is_tied else {"lm_head.weight": matrix}
    return {"model.embed_tokens.weight": matrix, "model.norm.weight": (shape.hidden,), **head}


def parts(shape: Shape) -> Iterator[Sizes]:
    """Yield one file's tensors after the other's."""
    yield outer_sizes(shape)
    for layer in range(shape.layers):
        yield layer_sizes(shape, layer)


def size_bytes(shape: Shape) -> int:
    """Return the bytes of all files, in bfloat16."""
    return 2 * sum(torch.Size(size).numel() for sizes in parts(shape) for size in sizes.values())


def folder(models: Path | None, name: str, shape: Shape) -> Path:
    """Return the model's directory, present or future: under `models`, or else in memory or the temporary folder."""
    known = f"{name}-{shape.layers}-layers"
    if models is not None:
        return models / known
    places = [Path(place) / "headway-models" for place in ("/dev/shm", tempfile.gettempdir())]
    for place in places:
        if (place / known).is_dir():
            return place / known
    needed = int(size_bytes(shape) * 1.05) + (1 << 20)
    for place in places:
        if place.parent.is_dir() and os.access(place.parent, os.W_OK) and shutil.disk_usage(place.parent).free > needed:
            return place / known
    raise OSError(f"{known} takes {needed / 2**30:.1f} GiB, for which neither {places[0]} nor {places[1]} has room.")


def write(shape: Shape, directory: Path, device: str, scale: float = SCALE) -> None:
    """Write `directory` as a whole or not at all; one that is there is used as it is."""
    if directory.is_dir():
        return
    partial = directory.with_name(f"{directory.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    tokenizer = load_tokenizer(ModelConfig(random=RandomModelConfig(architecture="qwen3", alphabet=ALPHABET)))
    tokenizer.save_pretrained(partial)
    ids = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    (partial / "config.json").write_text(json.dumps(shape.config() | ids, indent=2))
    _write_weights(shape, partial, device, scale)
    partial.rename(directory)


def _write_weights(shape: Shape, directory: Path, device: str, scale: float) -> None:
    from safetensors.torch import save_file

    generator = torch.Generator(device).manual_seed(0)
    weight_map: dict[str, str] = {}
    for number, sizes in enumerate(parts(shape), start=1):
        file = f"model-{number:05d}-of-{shape.layers + 1:05d}.safetensors"
        tensors = {name: _random(name, size, generator, scale) for name, size in sizes.items()}
        save_file(tensors, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
        print(f"{directory.name}: file {number} of {shape.layers + 1}", file=sys.stderr, flush=True)
    index = {"metadata": {"total_size": size_bytes(shape)}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def _random(name: str, size: tuple[int, ...], generator: torch.Generator, scale: float) -> torch.Tensor:
    tensor = torch.empty(size, dtype=torch.bfloat16, device=generator.device)
    return (tensor.fill_(1.0) if "norm" in name else tensor.normal_(0.0, scale, generator=generator)).cpu()


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """A directory to write, as its own process gets it."""

    shape: Shape
    directory: str
    device: str
    scale: float


def write_ordered(order: object) -> dict[str, str]:
    """Call `write`, in the process that was started for it."""
    told = msgspec.convert(order, Order)
    write(told.shape, Path(told.directory), told.device, told.scale)
    return {"directory": told.directory}


def write_isolated(shape: Shape, directory: Path, device: str, timeout_s: float, scale: float = SCALE) -> None:
    """Call `write` in a process of its own, so that the process that starts the cases holds no memory of the GPU."""
    if directory.is_dir():
        return
    print(f"writing {size_bytes(shape) / 2**30:.1f} GiB of weights to {directory}", file=sys.stderr, flush=True)
    order = msgspec.to_builtins(Order(shape=shape, directory=str(directory), device=device, scale=scale))
    outcome = isolated.run("benchmarks.throughput.checkpoint:write_ordered", order, 1, timeout_s)
    if "error" in outcome:
        raise SystemExit(f"The weights of {directory} could not be written:\n{outcome['error']}")
