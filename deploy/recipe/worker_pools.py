"""The further pools of a recipe: each is the recipe with an engine and devices of its own.

`launcher.options.roles` says what the processes of each role and pool ask Ray for."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from headway.broker.errors import ConfigError
from headway.broker.user_code.kinds import unknown_option
from headway.rollout_workers.config import EngineConfig

from .recipe import Recipe
from .schema_errors import check_shape, explain
from .scorers import POOL, scorers_of
from .trust import passed_on

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


WHERE = "launcher.options.roles"
RAYS_OWN = {"CPU", "GPU", "memory", "object_store_memory"}
LEARNER, WORKER, SCORER = ROLES = ("learner", "worker", "scorer")


class RayRole(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The resources that one process of a role or of a pool asks Ray for."""

    gpus: Annotated[
        Annotated[float, Meta(ge=0, le=1024)] | None,
        Meta(description="GPUs of one process; below 1: it shares its GPU; null: as many as the recipe says"),
    ] = None
    resources: Annotated[
        dict[str, Annotated[float, Meta(gt=0, le=2**53)]],
        Meta(description="amounts of your own resources of nodes that one process takes, each above 0"),
    ] = {}
    runtime_env: Annotated[dict[str, Any], Meta(description="Ray's environment, over that of all processes")] = {}
    placement: Annotated[
        Literal["pack", "spread", "strict_pack"] | None,
        Meta(description="how a placement group lays the pool's processes over nodes; null: there is no group"),
    ] = None


def ray_role(roles: Mapping[str, Any], role: str, pool: str) -> RayRole:
    """Return what a process asks for: the keys of its pool, and of its role where the pool does not set them.

    Raises ConfigError for a key or a value that cannot be.
    """
    asked: dict[str, Any] = {}
    for name in (role, pool):
        own = roles.get(name, {})
        _convert(own, f"{WHERE}.{name}")
        asked |= own
    return _convert(asked, f"{WHERE}.{pool or role}")


def impossible_ray_roles(recipe: Recipe) -> Iterator[str]:
    """Yield what cannot be in the roles of a recipe whose launcher is Ray. Raises ConfigError for a misspelt key."""
    roles = recipe.launcher.options.get("roles", {})
    if not isinstance(roles, dict):
        yield f"{WHERE} is {roles!r}; expected a section with the names of roles and pools."
        return
    pools = (MAIN, *(pool.name for pool in recipe.workers.pools), *(POOL + one.name for one in scorers_of(recipe)))
    for name in roles:
        if name not in (*ROLES, *pools):
            raise unknown_option(name, (*ROLES, *pools), WHERE)
        asked = ray_role(roles, name, "")
        for ours in sorted(RAYS_OWN & asked.resources.keys()):
            yield f"{WHERE}.{name}.resources.{ours} is no resource of your own: the recipe says what a process takes."
        gpus = asked.gpus or 0
        if gpus > 1 and gpus != int(gpus):
            yield f"{WHERE}.{name}.gpus is {gpus:g}. Give a fraction of one GPU, or whole GPUs."
    if ray_role(roles, LEARNER, "").placement:
        yield f"{WHERE}.learner.placement has nothing to place: all ranks of the learner lie on one node. Leave it out."


def _convert(asked: Any, where: str) -> RayRole:
    if not isinstance(asked, dict):
        raise ConfigError(f"{where} is {asked!r}; expected a section with {', '.join(RayRole.__struct_fields__)}.")
    check_shape(asked, RayRole, where)
    try:
        return msgspec.convert(asked, RayRole)
    except msgspec.ValidationError as error:
        raise ConfigError(explain(error, asked, RayRole, where)) from error
