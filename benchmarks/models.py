"""Shapes of known models, the operations that training them takes, and random weights as Hugging Face directories.

Their names, files and number format are those of the hub.
"""

import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from .command import tell
from .processes import isolated

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
    def parameters(self) -> int:
        """Return the number of all matrices' numbers."""
        embeddings = 0 if self.is_tied else self.hidden * self.vocabulary
        idle = 3 * self.hidden * self.expert_intermediate * (self.experts - self.experts_per_token)
        return self.active_parameters + embeddings + self.layers * idle

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
"""The standard deviation of every matrix, unless a caller sets another."""


def folder(models: Path | None, name: str, shape: Shape) -> Path:
    """Return the model's directory, present or future: under `models`, or else in memory or the temporary folder."""
    known = f"{name}-{shape.layers}-layers"
    if models is not None:
        return models / known
    places = [Path(place) / "headway-models" for place in ("/dev/shm", tempfile.gettempdir())]
    for place in places:
        if (place / known).is_dir():
            return place / known
    needed = int(2 * shape.parameters * 1.05) + (1 << 20)
    for place in places:
        if place.parent.is_dir() and os.access(place.parent, os.W_OK) and shutil.disk_usage(place.parent).free > needed:
            return place / known
    raise OSError(f"{known} takes {needed / 2**30:.1f} GiB, for which neither {places[0]} nor {places[1]} has room.")


def write(shape: Shape, directory: Path, device: str, scale: float = SCALE) -> None:
    """Write `directory` as a whole or not at all; one that is there is used as it is."""
    if directory.is_dir():
        return
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from headway.learner.config import ModelConfig, RandomModelConfig
    from headway.learner.models.pretrained import load_tokenizer

    partial = directory.with_name(f"{directory.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    tokenizer = load_tokenizer(ModelConfig(random=RandomModelConfig(architecture="qwen3", alphabet=ALPHABET)))
    given = shape.config() | {"initializer_range": scale}
    ids = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = AutoConfig.for_model(given.pop("model_type"), **given | ids)
    torch.manual_seed(0)
    with torch.device(device):
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    partial.rename(directory)


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
        tell(f"writing {2 * shape.parameters / 2**30:.1f} GiB of weights to {directory}")
        order = {"shape": msgspec.to_builtins(shape), "directory": str(directory), "device": device, "scale": scale}
        outcome = isolated(f"{__name__}:write_ordered", order, 1, timeout_s)
        if "error" in outcome:
            raise SystemExit(f"The weights of {directory} could not be written:\n{outcome['error']}")
    return directory
