"""Whether a warm-up's directory is complete, and of which recipe: sft.json says so and is written last."""

from pathlib import Path
from typing import Any

import msgspec

from deploy.recipe.recipe import Recipe

from .whole_files import replace_file

OUTCOME = "sft.json"


def is_complete(directory: Path) -> bool:
    """True once `mark_complete` has been called."""
    return (directory / OUTCOME).exists()


def is_of(directory: Path, recipe: Recipe) -> bool:
    """True if the directory is complete and `recipe` would make the same model again."""
    if not is_complete(directory):
        return False
    try:
        return bool(msgspec.json.decode((directory / OUTCOME).read_bytes()).get("made_from") == _origin(recipe))
    except (msgspec.DecodeError, AttributeError):
        return False


def mark_complete(directory: Path, recipe: Recipe, outcome: Any) -> None:
    """Write the outcome, whole or not at all, after the model is on disk. Raises HeadwayError."""
    content = {**msgspec.to_builtins(outcome), "made_from": _origin(recipe)}
    replace_file(directory / OUTCOME, msgspec.json.format(msgspec.json.encode(content)) + b"\n")


def _origin(recipe: Recipe) -> Any:
    """What decides the model that a warm-up leaves; as JSON, so that it compares with what was read."""
    parts = {"model": recipe.model, "sft": recipe.sft, "prompts": recipe.prompts, "seed": recipe.run.seed}
    return msgspec.json.decode(msgspec.json.encode(parts))
