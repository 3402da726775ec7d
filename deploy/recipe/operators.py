"""Decides what a worker takes from its operator instead of from the configuration in the broker.

Every client that can write to the broker can write that configuration. So its import paths are resolved below the
modules that the worker's operator named, and it may set only sizes and switches of an engine's options. The operator
gives `headway run` its recipe, so that command passes on to its workers what the recipe names.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from broker.errors import ConfigError
from broker.user_code.roots import ImportRoots
from rollout_workers.engines import abilities_of

from .files import apply_overrides
from .recipe import Recipe


def check_stored(recipe: Recipe, overrides: Sequence[str], allowed: Sequence[str]) -> ImportRoots:
    """Return what may be imported for `recipe`, which came from the broker, with the operator's `overrides` applied.

    Raises ConfigError for paths outside of it and for options that only an operator may set. It imports nothing.
    """
    own = apply_overrides({"engine": {"options": {}}}, overrides, "override")["engine"]
    named = [str(own["kind"])] if "kind" in own else []
    roots = ImportRoots((*allowed, *named))
    for key, path in _paths(recipe):
        roots.check(path, key)
    for name, _ in _refused(recipe):
        if name not in own["options"]:
            raise ConfigError(
                f"engine.options.{name} is not taken from the run's configuration: what it names, the engine may"
                " import, read or run. If you trust whoever started the run's learner, give it to the workers"
                f" themselves: headway workers engine.options.{name}=VALUE."
            )
    return roots


def check_paths(recipe: Recipe) -> None:
    """Raise ConfigError for a path that neither workers nor the learner would import."""
    for key, path in _paths(recipe):
        roots_of(recipe).check(path, key)
    for index, sink in enumerate(recipe.metrics):  # the learner imports these, and has its recipe from its own operator
        if ":" in sink.kind:
            ImportRoots((sink.kind,)).check(sink.kind, f"metrics[{index}].kind")


def roots_of(recipe: Recipe) -> ImportRoots:
    """Return the roots for a recipe that was given to this process: exactly what it names."""
    return ImportRoots(tuple(path for _, path in _paths(recipe)))


def passed_on(recipe: Recipe) -> list[str]:
    """Return arguments with which workers on this machine trust the recipe that this command was given."""
    allowed = [argument for _, path in _paths(recipe) for argument in ("--allow-import", path)]
    return allowed + [f"engine.options.{name}={json.dumps(value)}" for name, value in _refused(recipe)]


def _refused(recipe: Recipe) -> Iterator[tuple[str, Any]]:
    """Yield the options that a stored configuration may not set."""
    takes_stored = abilities_of(recipe.engine).takes_stored
    return ((name, value) for name, value in recipe.engine.options.items() if not takes_stored(name, value))


def _paths(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Yield (key, import path) of all that a worker imports."""
    named = [("engine.kind", recipe.engine.kind), ("environment.kind", recipe.environment.kind)]
    named.append(("weights.transport", recipe.weights.transport))
    named += [(f"rewards[{index}].kind", reward.kind) for index, reward in enumerate(recipe.rewards)]
    return ((key, path) for key, path in named if ":" in path)
