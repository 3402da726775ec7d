"""Decides what a worker may take from the configuration in the broker, and what only its operator may set.

Every client that can write to the broker can write that configuration. So its import paths are resolved below the
modules that the worker's operator named, and it may set only sizes and switches of an engine's options. The operator
gives `headway run` its recipe, so that command passes on to its workers what the recipe names.
"""

import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

from headway.broker.errors import ConfigError
from headway.broker.user_code.import_paths import ImportRoots
from headway.rollout_workers.agents.kinds import check_named, named_by
from headway.rollout_workers.engines import abilities_of
from headway.rollout_workers.scorers.runtimes import abilities_of as runtime_abilities

from .parse import apply_overrides
from .recipe import Recipe


def check_stored(recipe: Recipe, overrides: Sequence[str], allowed: Sequence[str]) -> ImportRoots:
    """Return what may be imported for `recipe`, which came from the broker, with the operator's `overrides` applied.

    Raises ConfigError for paths outside of it and for options that only an operator may set. It imports nothing.
    """
    own = apply_overrides({"engine": {"options": {}}}, overrides, "override")["engine"]
    named = [str(own["kind"])] if "kind" in own else []
    roots = ImportRoots((*allowed, *named))
    for key, name in _names(recipe):
        check_named(name, roots, key)
    _check_options("engine.options", [name for name, _ in _refused(recipe)], own["options"], "the engine", "workers")
    return roots


def check_stored_scorers(recipe: Recipe, overrides: Sequence[str]) -> ImportRoots:
    """Return what a scorer may import for `recipe`, as `check_stored` does for a worker. Raises ConfigError."""
    own = apply_overrides({"scorers": {"engine": {"options": {}}}}, overrides, "override")["scorers"]["engine"]
    roots = ImportRoots((str(own["kind"]),) if "kind" in own else ())
    kind = recipe.scorers.engine.kind
    if ":" in kind:
        roots.check(kind, "scorers.engine.kind")
    refused, given = _refused_of_scorers(recipe), own.get("options", {})
    _check_options("scorers.engine.options", refused, given, "vLLM", "scorers")
    return roots


def _check_options(key: str, refused: Iterable[str], given: Collection[str], reader: str, role: str) -> None:
    """Raise ConfigError for the first refused option that the operator has not given. `role`: of which processes."""
    for name in refused:
        if name not in given:
            raise ConfigError(
                f"{key}.{name} is not taken from the run's configuration: what it names, {reader} may import, read or"
                f" run. If you trust whoever started the run's learner, give it to the {role} themselves:"
                f" headway {role} {key}.{name}=VALUE."
            )


def roots_of_scorers(recipe: Recipe) -> ImportRoots:
    """Return the roots of scorers for a recipe that was given to this process: exactly what it names."""
    kind = recipe.scorers.engine.kind
    return ImportRoots((kind,) if ":" in kind else ())


def passed_on_to_scorers(recipe: Recipe) -> list[str]:
    """Return overrides with which scorers on this machine trust the recipe that this command was given."""
    engine = recipe.scorers.engine
    kind = [f"scorers.engine.kind={engine.kind}"] if ":" in engine.kind else []
    options = [
        f"scorers.engine.options.{name}={json.dumps(engine.options[name])}" for name in _refused_of_scorers(recipe)
    ]
    return kind + options


def check_paths(recipe: Recipe) -> None:
    """Raise ConfigError for a path that workers, scorers or the learner would not import."""
    for key, name in _names(recipe):
        check_named(name, roots_of(recipe), key)
    if ":" in recipe.scorers.engine.kind:
        roots_of_scorers(recipe).check(recipe.scorers.engine.kind, "scorers.engine.kind")
    for index, sink in enumerate(recipe.metrics):  # the learner imports these, and has its recipe from its own operator
        if ":" in sink.kind:
            ImportRoots((sink.kind,)).check(sink.kind, f"metrics[{index}].kind")


def roots_of(recipe: Recipe) -> ImportRoots:
    """Return the roots for a recipe that was given to this process: exactly what it names."""
    return ImportRoots(tuple(name for _, name in _names(recipe)))


def passed_on(recipe: Recipe) -> list[str]:
    """Return arguments with which workers on this machine trust the recipe that this command was given."""
    allowed = [argument for _, name in _names(recipe) for argument in ("--allow-import", name)]
    return allowed + [f"engine.options.{name}={json.dumps(value)}" for name, value in _refused(recipe)]


def _refused(recipe: Recipe) -> Iterator[tuple[str, Any]]:
    """Yield the options that a stored configuration may not set."""
    takes_stored = abilities_of(recipe.engine).takes_stored
    return ((name, value) for name, value in recipe.engine.options.items() if not takes_stored(name, value))


def _refused_of_scorers(recipe: Recipe) -> list[str]:
    engine = recipe.scorers.engine
    takes_stored = runtime_abilities(engine).takes_stored
    return [name for name, value in engine.options.items() if not takes_stored(name, value)]


def _names(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Yield (key, name) of all import paths that a worker imports, and of all programs that it runs."""
    named = [("engine.kind", recipe.engine.kind), ("environment.kind", recipe.environment.kind)]
    named.append(("weights.transport", recipe.weights.transport))
    named += [(f"rewards[{index}].kind", reward.kind) for index, reward in enumerate(recipe.rewards)]
    yield from ((key, path) for key, path in named if ":" in path)
    yield from named_by(recipe.agent.kind, recipe.agent.options)
