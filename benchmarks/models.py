"""Shapes of known models, the operations that training them takes, and random weights as Hugging Face directories.

Weights are written layer by layer, with names, files and number format as on the hub.
"""

import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from .command import tell
from .processes import isolated

if TYPE_CHECKING:
    import torch

PEAK_FLOPS = {"H200": 989e12, "H100": 989e12}
"""bfloat16 without sparsity, by NVIDIA's datasheets, for a device whose name contains the key."""


class Shape(msgspec.Struct, frozen=True):
    """A Qwen3 model, dense or with experts in every layer."""

    hidden: int
    intermediate: int
    """The width of the dense feed-forward network."""
    layers: int
    heads: int
    key_value_heads: int
    head_dim: int = 128
    vocabulary: int = 151936
    is_tied: bool = False
    experts: int = 0
    experts_per_token: int = 0
    expert_intermediate: int = 0

    def config(self) -> dict[str, Any]:
        """Return config.json, with the keys of the hub's file."""
        kind, architecture = ("qwen3_moe", "Qwen3MoeForCausalLM") if self.experts else ("qwen3", "Qwen3ForCausalLM")
        return {
            "architectures": [architecture],
            "model_type": kind,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "initializer_range": 0.02,
            "intermediate_size": self.intermediate,
            "max_position_embeddings": 262144,
            "num_attention_heads": self.heads,
            "num_hidden_layers": self.layers,
            "num_key_value_heads": self.key_value_heads,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1000000.0,
            "tie_word_embeddings": self.is_tied,
            "torch_dtype": "bfloat16",
            "vocab_size": self.vocabulary,
        } | (self._expert_config() if self.experts else {})

    def _expert_config(self) -> dict[str, Any]:
        return {
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "moe_intermediate_size": self.expert_intermediate,
            "norm_topk_prob": True,
            "num_experts": self.experts,
            "num_experts_per_tok": self.experts_per_token,
        }

    @property
    def active_parameters(self) -> int:
        """Return the number of parameters that a token is multiplied with: all matrices but the input embedding.

        Of the experts only the token's own count.
        """
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.key_value_heads)
        if self.experts:
            expert = 3 * self.hidden * self.expert_intermediate
            feed_forward = self.hidden * self.experts + self.experts_per_token * expert
        else:
            feed_forward = 3 * self.hidden * self.intermediate
        return self.layers * (attention + feed_forward) + self.hidden * self.vocabulary


class Flops(NamedTuple):
    """The operations of one training step, forward and backward, without recomputation."""

    active_parameters: int
    matrices: float
    """6 * active_parameters * tokens"""
    attention: float
    """12 * layers * heads * head_dim * sum(L * L) / 2: causal, so half of every square."""

    @property
    def total(self) -> float:
        return self.matrices + self.attention


def step_flops(shape: Shape, lengths: Sequence[int]) -> Flops:
    """Return the operations of sequences of these lengths; a third of them is the forward pass."""
    return flops_of(shape, sum(lengths), sum(length * length for length in lengths))


def flops_of(shape: Shape, tokens: int, doubled_pairs: int, headless: int = 0) -> Flops:
    """Return the operations of these tokens, given twice the number of pairs of one and another that it attends to: a
    sequence of L tokens has L^2. `headless`: those among them that do not go through the output head."""
    return Flops(
        active_parameters=shape.active_parameters,
        matrices=6.0 * (shape.active_parameters * tokens - shape.hidden * shape.vocabulary * headless),
        attention=12 * shape.layers * shape.heads * shape.head_dim * float(doubled_pairs) / 2,
    )


def peak_flops(device_name: str) -> float | None:
    """Return the peak of one device, or None for an unknown one."""
    return next((peak for name, peak in PEAK_FLOPS.items() if name in device_name), None)


SHAPES = {
    "smollm2-135m": Shape(*(576, 1536, 30, 9, 3), head_dim=64, vocabulary=49152, is_tied=True),
    "qwen3-0.6b": Shape(1024, 3072, 28, 16, 8, is_tied=True),
    "qwen3-1.7b": Shape(2048, 6144, 28, 16, 8, is_tied=True),
    "qwen3-4b": Shape(2560, 9728, 36, 32, 8, is_tied=True),
    "qwen3-8b": Shape(4096, 12288, 36, 32, 8),
    "qwen3-30b-a3b": Shape(2048, 6144, 48, 32, 4, experts=128, experts_per_token=8, expert_intermediate=768),
    "moe-2.4b": Shape(2048, 6144, 8, 16, 4, is_tied=True, experts=64, experts_per_token=8, expert_intermediate=640),
    "toy": Shape(64, 128, 2, 4, 2, head_dim=16, vocabulary=512, is_tied=True),
    "toy-moe": Shape(
        *(64, 128, 2, 4, 2), head_dim=16, vocabulary=512, experts=8, experts_per_token=2, expert_intermediate=32
    ),
}


def shape_of(name: str, layers: int = 0) -> Shape:
    """Return the named shape; `layers` above 0 replaces its number of layers."""
    shape = SHAPES[name]
    return msgspec.structs.replace(shape, layers=layers) if layers else shape


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
    return 2 * sum(math.prod(size) for sizes in parts(shape) for size in sizes.values())


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
    from headway.learner.config import ModelConfig, RandomModelConfig
    from headway.learner.models.pretrained import load_tokenizer

    tokenizer = load_tokenizer(ModelConfig(random=RandomModelConfig(architecture="qwen3", alphabet=ALPHABET)))
    tokenizer.save_pretrained(partial)
    ids = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    (partial / "config.json").write_text(json.dumps(shape.config() | ids, indent=2))
    _write_weights(shape, partial, device, scale)
    partial.rename(directory)


def _write_weights(shape: Shape, directory: Path, device: str, scale: float) -> None:
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator(device).manual_seed(0)
    weight_map: dict[str, str] = {}
    for number, sizes in enumerate(parts(shape), start=1):
        file = f"model-{number:05d}-of-{shape.layers + 1:05d}.safetensors"
        tensors = {name: _random(name, size, generator, scale) for name, size in sizes.items()}
        save_file(tensors, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
        tell(f"{directory.name}: file {number} of {shape.layers + 1}")
    index = {"metadata": {"total_size": size_bytes(shape)}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def _random(name: str, size: tuple[int, ...], generator: "torch.Generator", scale: float) -> "torch.Tensor":
    import torch

    tensor = torch.empty(size, dtype=torch.bfloat16, device=generator.device)
    return (tensor.fill_(1.0) if "norm" in name else tensor.normal_(0.0, scale, generator=generator)).cpu()


def write_ordered(order: dict[str, Any]) -> None:
    """Call `write`, in the process that was started for it."""
    write(msgspec.convert(order["shape"], Shape), Path(order["directory"]), order["device"], order["scale"])


def written(
    name: str,
    layers: int = 0,
    *,
    models: Path | None = None,
    device: str = "cuda",
    timeout_s: float = 300.0,
    scale: float = SCALE,
) -> Path:
    """Return the directory of a shape's weights, which a process of its own writes if it is not there.

    So the process that starts the cases holds no memory of the GPU. Raises SystemExit where that fails.
    """
    shape = shape_of(name, layers)
    directory = folder(models, name if scale == SCALE else f"wide-{name}", shape)
    if not directory.is_dir():
        tell(f"writing {size_bytes(shape) / 2**30:.1f} GiB of weights to {directory}")
        order = {"shape": msgspec.to_builtins(shape), "directory": str(directory), "device": device, "scale": scale}
        outcome = isolated(f"{__name__}:write_ordered", order, 1, timeout_s)
        if "error" in outcome:
            raise SystemExit(f"The weights of {directory} could not be written:\n{outcome['error']}")
    return directory
