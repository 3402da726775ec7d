"""All layouts, and a few among them in which every pair of dimensions meets."""

import itertools
from collections.abc import Callable, Iterable, Iterator
from operator import itemgetter

from headway.learner.config import LayoutConfig

Sizes = dict[str, int]
Feature = str | tuple[str, str]
"""A dimension, or two."""

FeaturesOf = Callable[[LayoutConfig, int], Iterator[Feature]]


def layouts(backend: str, processes: int, *, layers: int, experts: int) -> list[LayoutConfig]:
    """Return all layouts of a model for so many processes; `experts` is 0 for a dense model.

    Tensor, pipeline and context leave over the replicas. Experts are spread anew over the ranks of each pipeline stage.
    """
    sizes = _divisors(processes)
    options = {
        "context": sizes,
        "tensor": sizes if backend == "megatron" else [1],
        "pipeline": sizes if backend == "megatron" else [1],
        "virtual_pipeline": _divisors(layers) if backend == "megatron" else [1],
        "expert": sizes if backend == "megatron" and experts else [1],
        "expert_tensor": sizes if backend == "megatron" and experts else [1],
    }
    every = (dict(zip(options, chosen, strict=True)) for chosen in itertools.product(*options.values()))
    return [LayoutConfig(**one) for one in every if _fits(one, processes, layers, experts)]


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def _fits(one: Sizes, processes: int, layers: int, experts: int) -> bool:
    pipeline, chunks = one["pipeline"], one["pipeline"] * one["virtual_pipeline"]
    return (
        processes % (one["tensor"] * pipeline * one["context"]) == 0
        and (processes // pipeline) % (one["expert"] * one["expert_tensor"]) == 0
        and (pipeline > 1 or one["virtual_pipeline"] == 1)
        and layers % chunks == 0
        and experts % one["expert"] == 0
    )


def replicas(layout: LayoutConfig, processes: int) -> int:
    return processes // (layout.tensor * layout.pipeline * layout.context)


def pairs(layout: LayoutConfig, processes: int) -> Iterator[Feature]:
    """Return every two dimensions that are both split."""
    return itertools.combinations(_split(layout, processes), 2)


def dimensions(layout: LayoutConfig, processes: int) -> Iterator[Feature]:
    """Return every dimension that is split."""
    return iter(_split(layout, processes))


def covering(candidates: Iterable[LayoutConfig], processes: int, features_of: FeaturesOf = pairs) -> list[LayoutConfig]:
    """Return a few layouts, in which each feature of any layout occurs."""
    features = [(layout, set(features_of(layout, processes))) for layout in candidates]
    wanted = set().union(*map(itemgetter(1), features))
    chosen = []
    while wanted:
        layout, new = max(features, key=lambda item: (len(item[1] & wanted), len(item[1])))
        chosen.append(layout)
        wanted -= new
    return chosen


def _split(layout: LayoutConfig, processes: int) -> Sizes:
    """Return the sizes above 1 of replicas and dimensions."""
    sizes = {name: getattr(layout, name) for name in layout.__struct_fields__}
    sizes["replicas"] = replicas(layout, processes)
    return {name: size for name, size in sizes.items() if size > 1}


def described(layout: LayoutConfig, processes: int) -> str:
    """Name the layout, such as `tensor2-expert4-replicas2`; `whole` means one process."""
    return "-".join(f"{name}{size}" for name, size in _split(layout, processes).items()) or "whole"
