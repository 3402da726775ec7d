"""The resources that Ray sets aside for each command, and the placement group of its pool."""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ray.util import placement_group, placement_group_table
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from headway.broker.errors import ConfigError
from headway.deploy.recipe.pools import MAIN, pools_of
from headway.deploy.recipe.ray_roles import LEARNER, SCORER, WHERE, WORKER, RayRole, ray_role
from headway.deploy.recipe.scorers import POOL, scorers_of

from .base import Command, Resources
from .commands import engine_gpus, learner_resources, scorer_gpus

if TYPE_CHECKING:
    from headway.deploy.recipe.recipe import Recipe

log = logging.getLogger(__name__)

GROUP_S = 30.0
"""Seconds to wait until Ray has placed a group beside which a process is to lie."""
LEAST_CPU = 0.001
"""CPUs that a group sets aside for a process that takes nothing else: Ray makes no empty groups."""


@dataclass(frozen=True)
class _Wanted:
    """The processes of a role or pool, as the recipe has them."""

    role: str
    pool: str
    gpus: int
    """GPUs that one process needs."""
    count: int


class RayPlaces:
    """Returns the options of Ray for each command of a run."""

    def __init__(self, roles: Mapping[str, Any], *, reserves_cpus: bool) -> None:
        self._roles, self._reserves_cpus = roles, reserves_cpus
        self._counts: dict[str, int] = {}
        self._groups: dict[str, PlacementGroup] = {}

    def plan(self, recipe: "Recipe") -> None:
        """Note how many processes each pool starts with: its placement group has a place for each of them.

        Raises ConfigError for a role that asks for fewer GPUs than one of its processes needs.
        """
        for wanted in _wanted(recipe):
            role = ray_role(self._roles, wanted.role, wanted.pool)
            if role.gpus is not None and (role.gpus < wanted.gpus if wanted.gpus > 1 else role.gpus == 0 < wanted.gpus):
                raise ConfigError(
                    f"{WHERE} gives {role.gpus:g} GPUs to each process of {wanted.pool or wanted.role}, which needs"
                    f" {wanted.gpus}. Only a process of one GPU can share it, by a fraction above 0."
                )
            self._counts[wanted.pool] = max(1, wanted.count)

    def options(self, command: Command) -> dict[str, Any]:
        """Return the options for the actor of this command."""
        role = ray_role(self._roles, command.role, command.pool)
        claims = _claims(command.resources, role, reserves_cpus=self._reserves_cpus)
        options = {**claims, "scheduling_strategy": self._strategy(command, role, claims)}
        return options | ({"runtime_env": role.runtime_env} if role.runtime_env else {})

    def _strategy(self, command: Command, role: RayRole, claims: Mapping[str, Any]) -> Any:
        """Return where the command belongs: into its pool's group, or beside it if the pool has grown beyond that."""
        beside = "SPREAD" if role.placement == "spread" else "DEFAULT"
        count = self._counts.get(command.pool)
        if role.placement is None or count is None:
            return beside
        if command.pool not in self._groups:
            bundles = [_bundle(claims) for _ in range(count)]
            self._groups[command.pool] = placement_group(bundles, strategy=role.placement.upper())
        group = self._groups[command.pool]
        if command.number < count:
            return PlacementGroupSchedulingStrategy(group)
        if role.placement != "strict_pack":
            return beside
        if not group.wait(GROUP_S):  # its own places are all taken by then, so a process more would wait there for ever
            log.warning(
                "%s has no place on one node yet, and its process %d goes to any.", command.pool, command.number
            )
            return beside
        node = placement_group_table(group)["bundles_to_node_id"][0]
        return NodeAffinitySchedulingStrategy(node, soft=False)


def _wanted(recipe: "Recipe") -> Iterator[_Wanted]:
    yield _Wanted(LEARNER, "", learner_resources(recipe).gpus or 0, 1)
    yield _Wanted(WORKER, MAIN, engine_gpus(recipe.engine), recipe.workers.count)
    for pool in pools_of(recipe):
        yield _Wanted(WORKER, pool.name, engine_gpus(pool.recipe.engine), pool.count)
    for scorer in scorers_of(recipe):
        yield _Wanted(SCORER, POOL + scorer.name, scorer_gpus(recipe.scorers), recipe.scorers.count)


def _claims(resources: Resources, role: RayRole, *, reserves_cpus: bool) -> dict[str, Any]:
    """Return what Ray sets aside for a command. On one's own machine its processes share the CPUs, as without Ray."""
    cpus = resources.processes * (resources.threads or 1) if reserves_cpus else 0
    gpus = resources.gpus or 0 if role.gpus is None else role.gpus
    return {"num_cpus": cpus, "num_gpus": gpus} | ({"resources": role.resources} if role.resources else {})


def _bundle(claims: Mapping[str, Any]) -> dict[str, float]:
    """Return the same as a place in a group."""
    amounts = {"CPU": claims["num_cpus"], "GPU": claims["num_gpus"], **claims.get("resources", {})}
    return {name: amount for name, amount in amounts.items() if amount} or {"CPU": LEAST_CPU}
