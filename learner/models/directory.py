"""Tells what a model's directory lacks, from its files alone, before torch or transformers is imported."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from broker.errors import ConfigError

PARTS = "A model's directory has config.json, its weights (*.safetensors) and its tokenizer's files."
TOKENIZER_FILES = ("*token*", "vocab*", "*.model", "tekken*")
_LARGEST = 1 << 40
"""More positions than a model has, and more than they are stretched by."""


def check_path(path: str, key: str = "model.path") -> None:
    """Raises ConfigError, with the recipe's `key`, for a path that is neither a directory nor a hub id."""
    if Path(path).is_file():
        raise ConfigError(f"{key}: {path} is a file. Give the directory of a model, or a hub id.")
    if path.startswith(("/", ".", "~")) and not Path(path).is_dir():
        hint = " `~` stands for itself here." if path.startswith("~") else ""
        raise ConfigError(f"{key}: there is no directory {path}.{hint} Give a Hugging Face directory or a hub id.")


def check_files(path: str) -> None:
    """Raises ConfigError for a path as `check_path` does, and for a directory without a model or a tokenizer."""
    check_path(path)
    if not Path(path).is_dir():
        return
    if not (Path(path) / "config.json").is_file():
        raise ConfigError(f"model.path: {path} has no config.json, so it is no model. {PARTS}")
    if not any(any(Path(path).glob(pattern)) for pattern in TOKENIZER_FILES):
        raise ConfigError(no_tokenizer(path))


def no_tokenizer(path: str) -> str:
    """Returns the error for a directory without a tokenizer."""
    return (
        f"model.path: {path} has no tokenizer: its files (tokenizer.json, tokenizer_config.json) are missing. Copy"
        " those of the model that it was made from."
    )


def lacks_chat_template(path: str) -> bool:
    """Returns whether the directory's tokenizer surely has no chat template. Of a hub id only loading it tells."""
    directory = Path(path)
    try:
        settings = json.loads((directory / "tokenizer_config.json").read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(settings, dict) and not settings.get("chat_template") and not any(directory.glob("*chat_templ*"))


def read_config(path: str) -> Mapping[str, Any] | None:
    """Returns config.json of a directory, or of a hub id that was downloaded before; None where there is none here, or
    it cannot be read."""
    directory: str | None = path
    if not Path(path).is_dir():
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError

        try:
            found = try_to_load_from_cache(path, "config.json")
        except HFValidationError:
            return None
        directory = str(Path(found).parent) if isinstance(found, str) else None
    try:
        config = json.loads((Path(directory) / "config.json").read_bytes()) if directory else None
    except (OSError, ValueError):
        return None
    return config if isinstance(config, dict) else None


def positions_of(config: Mapping[str, Any]) -> int | None:
    """Returns the tokens of the longest text for which the model with this configuration was made, those that its
    rotary positions are stretched to included; None where it does not say, or is malformed."""
    text = config.get("text_config") or config
    if not isinstance(text, Mapping):
        return None
    most = text.get("max_position_embeddings") or text.get("n_positions")
    scaling = text.get("rope_scaling") or text.get("rope_parameters") or {}
    if isinstance(scaling, Mapping):
        scaling = scaling.get("full_attention", scaling)  # of a model whose layers differ in it
    if not isinstance(most, int) or not isinstance(scaling, Mapping):
        return None
    original, factor = scaling.get("original_max_position_embeddings") or most, scaling.get("factor") or 1
    if not isinstance(original, int) or not isinstance(factor, int | float):
        return None
    if not (0 < original < _LARGEST and 0 < factor < _LARGEST):
        return None
    return max(most, int(original * factor))
