"""Every function of the mathematics and every preset, as their own docstrings and signatures describe them."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

from headway.algorithms.advantages import ADVANTAGES
from headway.algorithms.aggregation import AGGREGATIONS, pair_mean
from headway.algorithms.corrections import CORRECTIONS, PAIR_CORRECTIONS, WEIGHTS
from headway.algorithms.distillation import DISTILLATION
from headway.algorithms.objectives import OBJECTIVES
from headway.algorithms.preferences import PREFERENCES
from headway.algorithms.presets import PRESETS, Preset
from headway.algorithms.proximal import PROXIMAL
from headway.algorithms.ratios import KL_ESTIMATORS
from headway.algorithms.returns import gae
from headway.broker.errors import HeadwayError
from headway.broker.user_code.kinds import did_you_mean

from .composition import GAE, PAIR_MEAN, options_of

PARTS: Mapping[str, Mapping[str, Callable[..., Any]]] = {
    "advantage": {**ADVANTAGES, GAE: gae},
    "objective": OBJECTIVES,
    "correction": {**CORRECTIONS, **PAIR_CORRECTIONS},
    "proximal": PROXIMAL,
    "aggregation": {**AGGREGATIONS, PAIR_MEAN: pair_mean},
    "kl": KL_ESTIMATORS,
    "preference": PREFERENCES,
    "distillation": DISTILLATION,
}


class Function(msgspec.Struct, frozen=True, kw_only=True):
    """One function of the mathematics, as its definition describes it."""

    name: str
    part: str
    """The part of a composition to which the function belongs."""
    equation: str
    notes: str
    source: str
    defaults: dict[str, Any]
    is_weight: bool
    """True for a correction that multiplies by the policy's ratio to the behavior policy; at most one may."""


class Composition(msgspec.Struct, frozen=True, kw_only=True):
    """One preset, with the parts that it is composed of."""

    name: str
    algorithm: dict[str, Any]
    note: str
    source: str


def functions() -> Iterator[Function]:
    """Returns all functions, part by part."""
    for part, known in PARTS.items():
        for name, function in known.items():
            yield _function(name, part, function)


def compositions() -> Iterator[Composition]:
    """Returns all presets."""
    for name, preset in PRESETS.items():
        yield _composition(name, preset)


def find(name: str) -> list[Function | Composition]:
    """Returns the preset, the function, or both that have this name. Raises HeadwayError."""
    everything: list[Function | Composition] = [*compositions(), *functions()]
    found = [one for one in everything if one.name == name]
    if not found:
        names = {one.name for one in everything}
        raise HeadwayError(
            f"There is no algorithm {name!r}{did_you_mean(name, names) or '.'} `headway algorithms` lists all."
        )
    return found


def _function(name: str, part: str, function: Callable[..., Any]) -> Function:
    paragraphs = [" ".join(text.split()) for text in (inspect.getdoc(function) or "").split("\n\n")]
    sources = [text.removeprefix("Source: ") for text in paragraphs[1:] if text.startswith("Source: ")]
    notes = [text for text in paragraphs[1:] if not text.startswith("Source: ")]
    defaults = {option: parameter.default for option, parameter in options_of(function).items()}
    return Function(
        name=name,
        part=part,
        equation=paragraphs[0],
        notes="\n".join(notes),
        source=" ".join(sources),
        defaults={option: None if value is inspect.Parameter.empty else value for option, value in defaults.items()},
        is_weight=name in WEIGHTS | PAIR_CORRECTIONS.keys(),
    )


def _composition(name: str, preset: Preset) -> Composition:
    return Composition(name=name, algorithm=preset.algorithm, note=preset.note, source=preset.source)
