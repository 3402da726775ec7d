"""Low-rank adapters (Hu et al. 2021, arXiv:2106.09685): the weights of a model that have one, and its form in files.

An adapted weight computes W x + s B (A x) with s = alpha / rank; W never changes. In a model, A and B are parameters of
the module that holds W. Files have the form of the library PEFT, which can load them, and loads into ours.

Shapes: R rank, I input features, O output features, E experts.
"""

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from headway.broker.errors import ConfigError
from headway.learner.config import AdapterConfig, ComputeConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PREFIX = "base_model.model."
"""The beginning of every name in PEFT's files."""
IN_LAYER = re.compile(r"(^|\.)layers\.\d+\.")
FACTORS = ("lora_A", "lora_B")
IN_ATTENTION = re.compile(r"\.self_attn\.(?P<layer>.+)")
ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
"""The linear layers of attention whose adapters engines know. Attention over latent vectors (MLA) has others, which
engines fuse in their own ways."""
ROUTERS = ("gate", "router")
"""Last names of the layers that choose experts."""
_EXPERTS = ("gate_up_proj", "down_proj")


@dataclass(frozen=True, kw_only=True)
class Target:
    """One weight that an adapter can change: that of a linear layer, or one tensor of all experts of a layer."""

    module: str
    """The module's name in the model."""
    weight: str
    """`weight`, or the name of the experts' tensor."""
    inputs: int
    outputs: int
    experts: int = 0
    """0 for a linear layer."""

    @property
    def name(self) -> str:
        """The adapted weight's name in the model, by which a recipe may target it."""
        return self.module if not self.experts else f"{self.module}.{self.weight}"

    @property
    def parameter(self) -> str:
        """The adapted parameter's name in the model."""
        return f"{self.module}.{self.weight}"

    @property
    def shape(self) -> tuple[int, ...]:
        """[O, I] or [E, O, I], that of the weight."""
        return (self.experts, self.outputs, self.inputs) if self.experts else (self.outputs, self.inputs)

    @property
    def factors(self) -> tuple[str, str]:
        """Names of A and B in the model."""
        first, second = (factor_name(self.weight, factor) for factor in FACTORS)
        return f"{self.module}.{first}", f"{self.module}.{second}"

    def shapes(self, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Those of A and B: [R, I] and [O, R], or [E, R, I] and [E, O, R]."""
        first, second = (rank, self.inputs), (self.outputs, rank)
        return ((self.experts, *first), (self.experts, *second)) if self.experts else (first, second)


def factor_name(weight: str, factor: str) -> str:
    """Returns the name that A or B has in the module that holds the weight."""
    return factor if weight == "weight" else f"{weight}_{factor}"


def is_factor(name: str) -> bool:
    """Returns whether a parameter of this name belongs to an adapter."""
    return name.endswith(FACTORS)


def targets_of(model: nn.Module, adapter: AdapterConfig) -> list[Target]:
    """Returns the weights that the adapter changes, in the model's order. Raises ConfigError for a target that the
    model does not have, naming those that it has."""
    known = adaptable(model)
    wanted = adapter.targets
    for target in wanted:
        if not any(_is_named(one, target) for one in known):
            raise ConfigError(
                f"model.adapter.targets: this model has no {target!r} that an adapter can change. It has"
                f" {', '.join(_short_names(known)) or 'nothing'}."
            )
    chosen = [one for one in known if not wanted or any(_is_named(one, target) for target in wanted)]
    if not chosen:
        raise ConfigError("model.adapter: this model has no linear layer that an adapter could change.")
    if adapter.dropout and any(one.experts for one in chosen):
        raise ConfigError(
            f"model.adapter.dropout is {adapter.dropout:g}, and the adapter changes experts, which PEFT's form has"
            " without dropout. Set it to 0, or leave the experts out of model.adapter.targets."
        )
    return chosen


def changes_attention_alone(model: nn.Module, adapter: AdapterConfig) -> bool:
    """Returns whether the adapter changes nothing but attention, and all linear layers of the model's attention are
    those of `ATTENTION`. Attention of another name counts as something else. Raises what `targets_of` raises."""
    changed = [target.module for target in targets_of(model, adapter)]
    layers = {found["layer"] for one in adaptable(model) if (found := IN_ATTENTION.search(one.module))}
    return layers == ATTENTION and all(IN_ATTENTION.search(module) for module in changed)


def adaptable(model: nn.Module) -> list[Target]:
    """Returns what adapters can change: all linear layers within decoder layers, and all tensors of experts."""
    found: list[Target] = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and IN_LAYER.search(name) and _last(name) not in ROUTERS:
            rows, columns = module.weight.shape
            found.append(Target(module=name, weight="weight", inputs=columns, outputs=rows))
        elif hasattr(module, "has_gate") and all(hasattr(module, weight) for weight in _EXPERTS):
            for weight in _EXPERTS:
                count, rows, columns = getattr(module, weight).shape
                found.append(Target(module=name, weight=weight, inputs=columns, outputs=rows, experts=count))
    return found


def _is_named(target: Target, name: str) -> bool:
    return f".{target.name}".endswith(f".{name}")


def _short_names(targets: Iterable[Target]) -> list[str]:
    return list(dict.fromkeys(target.name.rpartition(".")[2] for target in targets))


def initial_factor(target: Target, rank: int, seed: int) -> torch.Tensor:
    """The first A, uniform in +-1 / sqrt(I) as PEFT's is; it depends on the seed and the weight's name alone, so every
    number of ranks begins alike. B is 0 at first."""
    digest = hashlib.blake2b(f"{seed} {target.parameter}".encode(), digest_size=7).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "big"))
    shape, _ = target.shapes(rank)
    return torch.empty(shape).uniform_(-(target.inputs**-0.5), target.inputs**-0.5, generator=generator)


def change(first: torch.Tensor, second: torch.Tensor, scale: float) -> torch.Tensor:
    """[O, I] or [E, O, I] fp32: s B A."""
    return scale * (second.float() @ first.float())


def merged(weight: torch.Tensor, factors: tuple[torch.Tensor, torch.Tensor], scale: float) -> torch.Tensor:
    """The changed weight, in the weight's number format: W + s B A, added up in fp32."""
    return (weight.float() + change(*factors, scale)).to(weight.dtype)


@contextmanager
def zeroed(seconds: Sequence[torch.Tensor]) -> Iterator[None]:
    """A context in which every B is 0, so that a model computes what it did without its adapter; then each is what it
    was, to the bit. The tensors share memory with the parameters."""
    kept = [second.clone() for second in seconds]
    try:
        for second in seconds:
            second.zero_()
        yield
    finally:
        for second, values in zip(seconds, kept, strict=True):
            second.copy_(values)


def check_recomputation(adapter: AdapterConfig | None, compute: ComputeConfig) -> None:
    """Raises ConfigError where activations would be computed again with other inputs left out."""
    if adapter is not None and adapter.dropout and compute.recompute != "none":
        raise ConfigError(
            f"model.adapter.dropout is {adapter.dropout:g}, and learner.compute.recompute={compute.recompute} computes"
            " activations again, which would leave out others. Set one of both to 0 or none."
        )


def peft_config(targets: Sequence[Target], model: nn.Module, adapter: AdapterConfig, base: str) -> dict[str, Any]:
    """Returns the content of adapter_config.json."""
    experts = [target.name for target in targets if target.experts]
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base or None,
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "lora_dropout": adapter.dropout,
        "target_modules": _module_names([one.module for one in targets if not one.experts], model),
        "target_parameters": experts or None,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
    }


def _module_names(chosen: Sequence[str], model: nn.Module) -> list[str]:
    """Returns last parts of names, where these choose the same modules; else whole names."""
    short = dict.fromkeys(name.rpartition(".")[2] for name in chosen)
    meant = [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and _last(name) in short]
    return sorted(short) if sorted(meant) == sorted(chosen) else list(chosen)


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def peft_names(targets: Sequence[Target]) -> dict[str, tuple[str, str]]:
    """Returns, for every adapted parameter, the names of A and B in PEFT's files. PEFT wraps experts once for each of
    their tensors, so the first one lies within the wrapping of the second."""
    names = {}
    for number, target in enumerate(targets):
        is_inner = any(other.module == target.module for other in targets[number + 1 :])
        inner = ".base_layer" if is_inner else ""
        names[target.parameter] = (
            f"{PREFIX}{target.module}{inner}.lora_A.weight",
            f"{PREFIX}{target.module}{inner}.lora_B.weight",
        )
    return names


def to_peft(target: Target, first: torch.Tensor, second: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A and B as PEFT writes them. Of experts: [E * R, I], and [O, R * E] in which experts are the inner dimension."""
    if not target.experts:
        return first, second
    return first.flatten(0, 1), second.permute(1, 2, 0).reshape(target.outputs, -1)


def from_peft(target: Target, first: torch.Tensor, second: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A and B as a model holds them; the inverse of `to_peft`."""
    if not target.experts:
        return first, second
    mine = first.view(target.experts, -1, target.inputs)
    return mine, second.view(target.outputs, -1, target.experts).permute(2, 0, 1)


def file_changes(
    model: "PreTrainedModel",
    targets: Sequence[Target],
    factors: Mapping[str, torch.Tensor],
    scale: float,
) -> dict[str, torch.Tensor]:
    """Returns what an adapter adds to the tensors of a model's files, by their names in these. `factors` has PEFT's
    names and forms."""
    from transformers.core_model_loading import revert_weight_conversion

    changes: dict[str, torch.Tensor] = {}
    names = peft_names(targets)
    for target in targets:
        first, second = from_peft(target, *(factors[name] for name in names[target.parameter]))
        changes |= revert_weight_conversion(model, {target.parameter: change(first, second, scale)})
    return changes
