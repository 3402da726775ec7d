"""The further pools of a recipe: each is the recipe with an engine and devices of its own."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec.structs import replace

from headway.broker.errors import ConfigError
from headway.rollout_workers.config import EngineConfig

from .operators import passed_on
from .recipe import Recipe
from .words import check_shape, explain

MAIN = "workers"
"""The pool of workers.count workers."""


@dataclass(frozen=True)
class RecipePool:
    """One of workers.pools."""

    name: str
    count: int
    recipe: Recipe
    """The run's recipe with the pool's engine and devices in place of the main pool's."""
    overrides: tuple[str, ...]
    """The engine's keys that differ, as the pool's workers are given them."""

    def arguments(self) -> list[str]:
        """Return the arguments of a worker of this pool on this machine, which trusts what the recipe says."""
        return [*self.overrides, *passed_on(self.recipe)]


def pools_of(recipe: Recipe, source: str = "recipe") -> Iterator[RecipePool]:
    """Yield workers.pools in order. Raises ConfigError for a pool whose engine's keys or values cannot be."""
    for index, pool in enumerate(recipe.workers.pools):
        raw = _changed(recipe.engine, pool.engine)
        where = f"{source}: workers.pools[{index}].engine"
        check_shape(raw, EngineConfig, where)
        try:
            engine = msgspec.convert(raw, EngineConfig, strict=True)
        except msgspec.ValidationError as error:
            raise ConfigError(explain(error, raw, EngineConfig, where)) from error
        workers = replace(recipe.workers, count=pool.count, devices=pool.devices, pools=())
        overrides = tuple(f"engine.{key}={json.dumps(raw[key])}" for key in pool.engine)
        yield RecipePool(pool.name, pool.count, replace(recipe, engine=engine, workers=workers), overrides)


def _changed(engine: EngineConfig, keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return the engine with these keys, as a worker makes it of its overrides: see `with_overrides`."""
    raw = msgspec.to_builtins(engine)
    options = raw["options"] if keys.get("kind", engine.kind) == engine.kind else {}
    given = keys.get("options", {})
    return {**raw, **keys, "options": {**options, **given} if isinstance(given, dict) else given}
