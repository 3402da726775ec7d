"""Where a model's first weights come from, one tensor at a time, by the names that Hugging Face files use."""

import json
from pathlib import Path
from typing import Any

import torch

from broker.errors import ConfigError
from learner.config import ModelConfig
from learner.model import load_model

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


class TensorSource:
    """Tensors by name, read when they are asked for: no process ever holds the whole model."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._files = _files_by_name(directory)
        self._open: dict[str, Any] = {}

    @property
    def names(self) -> set[str]:
        """Of all tensors."""
        return set(self._files)

    def __call__(self, name: str) -> torch.Tensor:
        """On the CPU, in the file's number format. Raises ConfigError where the files lack it."""
        if name not in self._files:
            raise ConfigError(f"{self._directory} has no tensor {name}, which its config.json promises.")
        file = self._files[name]
        if file not in self._open:
            self._open[file] = _opened(self._directory / file)
        tensor: torch.Tensor = self._open[file].get_tensor(name)
        return tensor


def _opened(path: Path) -> Any:
    """Nothing but its table of contents is read. Raises ConfigError."""
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{path} cannot be read: {error}.") from error


def _files_by_name(directory: Path) -> dict[str, str]:
    if (directory / INDEX).exists():
        weight_map: dict[str, str] = json.loads((directory / INDEX).read_text())["weight_map"]
        return weight_map
    names: dict[str, str] = {}
    for path in sorted(directory.glob("*.safetensors")):
        names |= dict.fromkeys(_opened(path).keys(), path.name)
    if not names:
        raise ConfigError(f"{directory} has no safetensors files.")
    return names


class RandomSource:
    """The tensors of a random model, which is small enough to be made whole."""

    def __init__(self, model: ModelConfig, seed: int) -> None:
        from transformers.core_model_loading import revert_weight_conversion

        made = load_model(model, seed)
        self._tensors: dict[str, torch.Tensor] = revert_weight_conversion(made, made.state_dict())

    def __call__(self, name: str) -> torch.Tensor:
        return self._tensors[name]


def open_source(model: ModelConfig, seed: int) -> TensorSource | RandomSource:
    """Of the recipe's model."""
    if model.random is not None:
        return RandomSource(model, seed)
    return TensorSource(_local_directory(model.path))


def _local_directory(path: str) -> Path:
    """Where a hub id's files were downloaded to."""
    if Path(path).is_dir():
        return Path(path)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(path, allow_patterns=["*.safetensors", "*.json"]))
