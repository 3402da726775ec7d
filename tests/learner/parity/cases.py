"""The cases of the comparison: each is a backend, a model, a layout and a way to keep activations."""

import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import msgspec

from headway.broker.errors import ConfigError
from headway.learner.backends.megatron.mapping import Architecture, architecture_of
from headway.learner.config import LayoutConfig, OptimizerConfig
from headway.learner.models.parallel_layout import check_layout
from headway.learner.models.pretrained import load_config

from .layouts import described, layouts, replicas
from .models import MODELS, SHAPES, random_model

OPTIMIZER = OptimizerConfig(weight_decay=0.1, max_grad_norm=0.1, epsilon=1e-6)
"""An optimizer with clipping. AdamW turns the rounding of a tiny gradient into a whole step; this epsilon tames it."""

LEARNING_RATE = 1e-3
TEMPERATURE = 0.9
STEPS = 2

Recompute = Literal["none", "selective", "full"]
RECOMPUTE: tuple[Recompute, ...] = ("none", "full")


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """The settings that all cases of a comparison share."""

    device: str = "cpu"
    dtype: Literal["float32", "bfloat16"] = "float32"
    shape: str = "toy"
    """A key of `models.SHAPES`."""


class Case(msgspec.Struct, frozen=True, kw_only=True):
    backend: str
    model: str
    """A key of `models.MODELS`."""
    processes: int
    layout: LayoutConfig = LayoutConfig()
    recompute: Recompute = "none"

    @property
    def name(self) -> str:
        layout = described(self.layout, self.processes)
        return f"{self.backend}-{self.model}-{self.processes}-{layout}-recompute_{self.recompute}"

    @property
    def replicas(self) -> int:
        return replicas(self.layout, self.processes)


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One case to be run into `directory`."""

    case: Case
    setting: Setting
    model: Path
    """The model's Hugging Face directory."""
    directory: Path
    resume: Path | None = None
    """The checkpoint after the first step, of any layout. None starts from Hugging Face files."""

    @property
    def steps(self) -> range:
        return range(0 if self.resume is None else 1, STEPS)

    def checkpoint(self, steps: int) -> Path:
        """Return the directory of the checkpoint after so many steps."""
        return self.directory / f"checkpoint_{steps}"


def write_jobs(jobs: Iterable[Job], path: Path) -> None:
    path.write_bytes(msgspec.json.encode(list(jobs), enc_hook=str))


def read_jobs(path: Path) -> list[Job]:
    return msgspec.json.decode(path.read_bytes(), type=list[Job], dec_hook=lambda _, text: Path(text))


def all_layouts(backend: str, model: str, processes: int, shape: str) -> list[LayoutConfig]:
    """Return the layouts that can hold the model."""
    sizes = SHAPES[shape].sizes | MODELS[model](SHAPES[shape])
    experts = sizes.get("num_experts", 0)
    found = layouts(backend, processes, layers=sizes["num_hidden_layers"], experts=experts)
    if backend != "megatron":
        return found
    architecture = architecture_of(load_config(random_model(model, SHAPES[shape])))
    return [layout for layout in found if _fits(layout, architecture, processes)]


def _fits(layout: LayoutConfig, architecture: Architecture, processes: int) -> bool:
    try:
        check_layout(layout, processes, architecture, number_bytes=4)
    except ConfigError:
        return False
    return True


def every_case(backends: Iterable[str], models: Iterable[str], processes: Iterable[int], shape: str) -> list[Case]:
    """Return all layouts, each with layers recomputed and without."""
    return [
        Case(backend=backend, model=model, processes=count, layout=layout, recompute=recompute)
        for backend, model, count in itertools.product(backends, models, processes)
        for layout, recompute in itertools.product(all_layouts(backend, model, count, shape), RECOMPUTE)
    ]
