"""Checks, before the first stage, that the packages of a recipe which not every installation has are there."""

from headway.broker.user_code.import_paths import ImportRoots
from headway.learner.backends import check_installed as check_backend_installed
from headway.rollout_workers.engines import abilities_of, check_installed, check_requirements
from headway.rollout_workers.scorers.runtimes import check_installed as check_runtime_installed

from .adapters import check_own_engine
from .operators import check_paths, roots_of
from .pools import pools_of
from .recipe import Recipe
from .scorers import scorers_of
from .sinks import check_sink_packages


def check_packages(recipe: Recipe, *, has_workers: bool) -> None:
    """Raise ConfigError if the learner, or a worker on this machine if there are any, lacks a package, would not import
    what the recipe names, or has an engine that cannot do what the recipe asks of it."""
    check_paths(recipe)
    for index, stage in enumerate(recipe.stages):
        if ":" in stage.kind:
            ImportRoots((stage.kind,)).check(stage.kind, f"stages[{index}].kind")
    check_backend_installed(recipe.learner.backend)
    if recipe.model.adapter is not None and recipe.model.adapter.quantize_base != "none":
        from headway.learner.backends.quantization import check_quantizer

        check_quantizer(recipe.model.adapter.quantize_base)
    check_sink_packages(recipe.metrics)
    if has_workers:
        if recipe.scorers.count and scorers_of(recipe):
            check_runtime_installed(recipe.scorers.engine.kind)
        for one in (recipe, *(pool.recipe for pool in pools_of(recipe))):
            check_installed(one.engine.kind)
            check_requirements(
                one.engine.kind,
                abilities_of(one.engine, roots_of(one)),
                tells_experts=one.algorithm.router_replay,
                sleeps=one.run.is_colocated,
            )
            check_own_engine(one, roots_of(one))
