"""The pools of a recipe's processes: those of workers, each with an engine and devices of its own, and the scorers of
reward models and of the teacher.

`launcher.options.roles` says what the processes of each role and pool ask Ray for.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from headway.broker.client.scoring import MAX_ANSWER_BYTES
from headway.broker.errors import ConfigError
from headway.broker.keys import is_name
from headway.broker.user_code.kinds import unknown_option
from headway.rollout_workers.config import EngineConfig
from headway.rollout_workers.engines import visible_devices
from headway.rollout_workers.rewards import reward_names
from headway.rollout_workers.scorers.runtimes import abilities_of, gpus_of

from .convert import converted
from .recipe import Recipe
from .stage_graph import REFERENCE
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
        engine = converted(raw, EngineConfig, where)
        workers = replace(recipe.workers, count=pool.count, devices=pool.devices, pools=())
        overrides = tuple(f"engine.{key}={json.dumps(raw[key])}" for key in pool.engine)
        yield RecipePool(pool.name, pool.count, replace(recipe, engine=engine, workers=workers), overrides)


def impossible_pools(recipe: Recipe) -> Iterator[str]:
    """Yield what is wrong with names, sizes and devices of the workers' pools."""
    pools = recipe.workers.pools
    names = [MAIN, *(pool.name for pool in pools)]
    if not recipe.workers.count and not pools:
        yield "workers.count is 0, and there is no pool in workers.pools: nothing would generate. Set workers.count=1."
    for index, name in enumerate(names[1:]):
        if not is_name(name):
            yield (
                f"workers.pools[{index}].name is {name!r}; expected 1 to 100 letters, digits, '.', '_' or '-', the"
                " first of them a letter or digit."
            )
        if name in names[: index + 1]:
            yield f"workers.pools[{index}].name is {name!r}, and so is another pool's. Name each pool once."
    if pools and recipe.run.is_colocated:
        yield (
            "run.placement=colocated has one engine on each of the learner's devices, and workers.pools asks for more."
            " Leave the pools out, or set run.placement=separated."
        )
    try:
        visible_devices(recipe.workers.devices, recipe.engine)
        for pool in pools_of(recipe):
            visible_devices(pool.recipe.workers.devices, pool.recipe.engine)
    except ConfigError as error:
        yield str(error)


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
        _ray_role(own, f"{WHERE}.{name}")
        asked |= own
    return _ray_role(asked, f"{WHERE}.{pool or role}")


def impossible_ray_roles(recipe: Recipe) -> Iterator[str]:
    """Yield what cannot be in the roles of a recipe whose launcher is Ray. Raises ConfigError for a misspelt key."""
    if recipe.launcher.kind != "ray":
        return
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


def _ray_role(asked: Any, where: str) -> RayRole:
    if not isinstance(asked, dict):
        raise ConfigError(f"{where} is {asked!r}; expected a section with {', '.join(RayRole.__struct_fields__)}.")
    return converted(asked, RayRole, where)


REWARD_MODEL, TEACHER = "reward_model", "teacher"
POOL = "scorer-"
"""The start of a scorer's pool's name."""


@dataclass(frozen=True)
class Scorer:
    """A model whose processes score responses."""

    name: str
    """The name of its reward in metrics, or `teacher`."""
    kind: Literal["reward_model", "teacher"]
    path: str
    key: str
    """The key of the path in the recipe."""
    deadline_s: float
    """For how long one process may have a response."""


def scorers_of(recipe: Recipe) -> list[Scorer]:
    """Return the recipe's scorers, each with a name of its own."""
    found = [
        Scorer(name, "reward_model", reward.path, f"rewards[{index}].path", reward.deadline_s)
        for index, (name, reward) in enumerate(zip(reward_names(recipe.rewards), recipe.rewards, strict=True))
        if reward.kind == REWARD_MODEL
    ]
    teacher = recipe.teacher
    return found + (
        [Scorer(TEACHER, "teacher", teacher.path, "teacher.path", teacher.deadline_s)] if teacher.path else []
    )


def scorer_named(recipe: Recipe, name: str) -> Scorer:
    """Return the scorer of this name, or the only one where the name is empty. Raises ConfigError."""
    found = scorers_of(recipe)
    names = ", ".join(scorer.name for scorer in found) or "none"
    if not name and len(found) == 1:
        return found[0]
    for scorer in found:
        if scorer.name == name:
            return scorer
    if name:
        raise ConfigError(f"The run has no scorer {name!r}; it has {names}.")
    raise ConfigError(f"Which scorer? Give --scorer NAME. The run has {names}.")


def impossible_scorers(recipe: Recipe) -> Iterator[str]:
    """Yield what is wrong with the recipe's reward models and its teacher."""
    for index, reward in enumerate(recipe.rewards):
        if reward.kind == REWARD_MODEL and not reward.path:
            yield f"rewards[{index}].path is missing: it names the directory of the reward model."
        if reward.kind != REWARD_MODEL and reward.path:
            yield f"rewards[{index}].path is for kind=reward_model; {reward.kind} reads no model."
    if recipe.algorithm.distillation.coefficient > 0 and not recipe.teacher.path:
        yield (
            "algorithm.distillation.coefficient above 0 needs a teacher: set teacher.path to the directory of a model"
            " with the policy's vocabulary, a hub id, or stage:NAME."
        )
    top_k, length = recipe.algorithm.distillation.candidates, recipe.sampling.max_new_tokens
    if 4 * length * (1 + 2 * top_k) > MAX_ANSWER_BYTES:
        most = (MAX_ANSWER_BYTES // (4 * length) - 1) // 2
        yield (
            f"algorithm.distillation.top_k={top_k} with sampling.max_new_tokens={length}: a teacher's answer could take"
            f" {4 * length * (1 + 2 * top_k):,} bytes, and the server holds {MAX_ANSWER_BYTES:,} of one; set top_k to"
            f" at most {max(0, most)}, or sample shorter responses."
        )
    names = [scorer.name for scorer in scorers_of(recipe)]
    if len(set(names)) < len(names):
        yield f"two scorers have one name ({', '.join(names)})."
    yield from _impossible_engine(recipe)


def _impossible_engine(recipe: Recipe) -> Iterator[str]:
    scorers, temperature = recipe.scorers, recipe.sampling.temperature
    engine = scorers.engine
    if recipe.teacher.path and temperature != 1 and not abilities_of(engine).any_temperature:
        yield (
            f"scorers.engine.kind={engine.kind} gives a teacher's logprobs at temperature 1 alone, and"
            f" sampling.temperature is {temperature:g}. Set sampling.temperature=1, or"
            " scorers.engine.kind=transformers."
        )
    each = gpus_of(engine)
    few = [str(device) for device in scorers.devices if len(str(device).split(",")) < each]
    if few and scorers.device != "cpu":
        yield (
            f"scorers.devices gives {few[0]!r} to one process, whose engine takes {each} GPUs. Name {each} of them"
            " together, such as '0,1'."
        )


def check_models_for_pods(recipe: Recipe) -> None:
    """Raise ConfigError for a scorer whose model only a learner's pod has."""
    for scorer in scorers_of(recipe) if recipe.scorers.count else ():
        if scorer.path.startswith(REFERENCE):
            raise ConfigError(
                f"{scorer.key} is {scorer.path}, which an earlier stage leaves on the volume of the learner's pod, and"
                " the pods of scorers do not see that. Run the stage before, and give a hub id, or a directory that the"
                " scorers' pods mount; or set scorers.count=0, and start `headway scorers` where the model is."
            )
