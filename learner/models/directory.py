"""Tells what a model's directory lacks, from its files alone, before torch or transformers is imported."""

import json
from pathlib import Path

from broker.errors import ConfigError

PARTS = "A model's directory has config.json, its weights (*.safetensors) and its tokenizer's files."
TOKENIZER_FILES = ("*token*", "vocab*", "*.model", "tekken*")


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
