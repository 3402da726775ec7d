"""What a recipe takes that not every installation has: asked before the warm-up, not after it."""

from importlib.util import find_spec

from broker.errors import ConfigError
from rollout_workers.config import VLLM_REMEDY

from .operators import check_paths
from .recipe import Recipe

MEGATRON_REMEDY = "pip install 'headway[megatron]' (make install-megatron does it)."


def check_packages(recipe: Recipe, *, has_workers: bool) -> None:
    """Raise ConfigError where the learner, or a worker if this machine has any, would find its package missing, or
    would not import what the recipe names."""
    check_paths(recipe)
    if recipe.learner.backend == "megatron" and not _is_installed("megatron.core"):
        raise ConfigError(f"learner.backend=megatron needs Megatron Core, which is not installed. {MEGATRON_REMEDY}")
    if has_workers and recipe.engine.kind == "vllm" and not _is_installed("vllm"):
        raise ConfigError(f"engine.kind=vllm needs vLLM, which is not installed. {VLLM_REMEDY}")


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # a parent of it
        return False
