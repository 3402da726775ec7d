"""A model's weights in files: whole, or an adapter beside the model that it was trained on.

DIRECTORY/    config.json, the tokenizer's files        what every model has
DIRECTORY/    model*.safetensors                        the weights, whole; or else only
DIRECTORY/adapter/   adapter_config.json  adapter_model.safetensors     PEFT's form, which names the base model
DIRECTORY/adapter/   base.json            only if the adapter was trained beside a base in few bits: its format

The model that was trained is then that base, made dense again, and the adapter.
"""

import functools
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import msgspec
import torch

from headway.broker.errors import ConfigError
from headway.learner.config import AdapterConfig, ModelConfig
from headway.learner.models.lora import adaptable, file_changes, peft_names, targets_of
from headway.learner.models.model_files import write_files
from headway.learner.models.pretrained import load_config, unfilled

from .hugging_face_files import TensorFiles, weight_files, write_tensors
from .quantization import check_quantizer, quantize
from .snapshots import NamedTensors, snapshot_gathered

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FOLDER, CONFIG, WEIGHTS = "adapter", "adapter_config.json", "adapter_model.safetensors"
BASE = "base.json"


class AdapterBaseFormat(msgspec.Struct, frozen=True, kw_only=True):
    """The content of base.json."""

    quantize_base: Literal["nf4", "int8"]


class Weights(Protocol):
    """The tensors of a model by the names that Hugging Face files use, each read when it is asked for."""

    @property
    def paths(self) -> tuple[Path, ...]:
        """The files."""
        ...

    @property
    def names(self) -> set[str]:
        """The names of all tensors."""
        ...

    def __call__(self, name: str) -> torch.Tensor:
        """Return a tensor on the CPU. Raises ConfigError where there is none of the name."""
        ...


def open_weights(path: str) -> Weights | None:
    """Return the weights of a directory or hub id; of an adapter, those of its base with the adapter merged into them.
    None where there are no safetensors files. Raises ConfigError for files that cannot be read."""
    if paths := weight_files(path):
        return TensorFiles(paths)
    return MergedWeights(Path(path)) if has_adapter(Path(path)) else None


def has_adapter(directory: Path) -> bool:
    """Return whether a checkpoint holds an adapter."""
    return (directory / FOLDER / CONFIG).is_file()


def write_adapter(
    tensors: Iterable[tuple[str, torch.Tensor]], config: dict[str, Any], directory: Path, quantize_base: str = "none"
) -> None:
    """Write an adapter, by PEFT's names, into a folder of a model's directory."""
    from safetensors.torch import save_file

    folder = directory / FOLDER
    folder.mkdir(exist_ok=True)
    (folder / CONFIG).write_bytes(msgspec.json.format(msgspec.json.encode(config)) + b"\n")
    if quantize_base != "none":
        (folder / BASE).write_bytes(msgspec.json.encode({"quantize_base": quantize_base}))
    save_file(
        {name: tensor.cpu().contiguous() for name, tensor in tensors}, folder / WEIGHTS, metadata={"format": "pt"}
    )


class PeftAdapters(Protocol):
    """The adapters of a backend's model."""

    @property
    def config(self) -> AdapterConfig:
        """The recipe's settings."""
        ...

    def peft_config(self, base: str) -> dict[str, Any]:
        """Return the content of adapter_config.json; `base` is the model's directory or hub id."""
        ...


class HuggingFaceSnapshot:
    """The model in a checkpoint for `from_pretrained`: whole weights, or an adapter in their place, and the files that
    it has besides."""

    def __init__(
        self, model: ModelConfig, files: Mapping[str, bytes] | None, adapters: PeftAdapters | None = None
    ) -> None:
        """`files` are those besides the weights; None on a rank that writes nothing."""
        self._base = os.path.realpath(model.path) if os.path.isdir(model.path) else model.path
        self._files = files
        self._adapters = adapters

    def writer(self, tensors: NamedTensors, directory: Path, *, is_copied: bool) -> Callable[[], None]:
        """Return a function that writes the tensors, those of the adapter if there is one; see `snapshot_gathered`."""
        write = None if self._files is None else functools.partial(self._write, self._files, directory)
        return snapshot_gathered(tensors, write, is_copied=is_copied)

    def _write(self, files: Mapping[str, bytes], directory: Path, tensors: NamedTensors) -> None:
        if self._adapters is None:
            write_tensors(tensors, directory)
        else:
            config = self._adapters.peft_config(self._base)
            write_adapter(tensors, config, directory, self._adapters.config.quantize_base)
        write_files(files, directory)


def adapted_model(model: ModelConfig) -> ModelConfig:
    """Return the base model of the checkpoint `model.path`, with the adapter that it holds. Raises ConfigError where
    the base is gone."""
    config = _read_config(Path(model.path))
    adapter = AdapterConfig(
        rank=config["r"],
        alpha=config["lora_alpha"],
        dropout=config.get("lora_dropout") or 0.0,
        quantize_base=trained_base(Path(model.path)),
        targets=(*(config.get("target_modules") or ()), *(config.get("target_parameters") or ())),
    )
    return msgspec.structs.replace(model, path=_base_of(Path(model.path), config), adapter=adapter)


def trained_base(directory: Path) -> Literal["none", "nf4", "int8"]:
    """Return the number format of the base beside which a checkpoint's adapter was trained. Raises ConfigError for a
    file that cannot be read."""
    path = directory / FOLDER / BASE
    try:
        return msgspec.json.decode(path.read_bytes(), type=AdapterBaseFormat).quantize_base
    except FileNotFoundError:
        return "none"
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"model.path: {path} cannot be read: {error}.") from error


def _read_config(directory: Path) -> dict[str, Any]:
    path = directory / FOLDER / CONFIG
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"model.path: {path} cannot be read: {error}.") from error


def _base_of(directory: Path, config: dict[str, Any]) -> str:
    base = str(config.get("base_model_name_or_path") or "")
    if not base or (base.startswith("/") and not Path(base).is_dir()):
        raise ConfigError(
            f"model.path: {directory} holds an adapter, and the model that it was trained on is not at {base!r} any"
            f" more. Write its present place to base_model_name_or_path in {directory / FOLDER / CONFIG}."
        )
    return base


class MergedWeights:
    """The tensors of an adapter's base, changed by the adapter, each in the base's number format."""

    def __init__(self, directory: Path) -> None:
        """Read the adapter whole, which is small. Raises ConfigError for files that cannot be read or do not fit."""
        adapted = adapted_model(ModelConfig(path=str(directory)))
        assert adapted.adapter is not None
        base = open_weights(adapted.path)
        if base is None:
            raise ConfigError(f"model.path: the base of {directory}, {adapted.path}, has no safetensors files.")
        self._base = base
        own = TensorFiles((directory / FOLDER / WEIGHTS,))
        self.paths = (*base.paths, directory / FOLDER / WEIGHTS)
        model = unfilled(load_config(ModelConfig(path=str(directory))))
        targets = targets_of(model, adapted.adapter)
        expected = {name for names in peft_names(targets).values() for name in names}
        if own.names != expected:
            raise ConfigError(
                f"model.path: {directory / FOLDER} holds other tensors than its {CONFIG} names:"
                f" {sorted(own.names ^ expected)[:4]}."
            )
        factors = {name: own(name) for name in own.names}
        self._changes = file_changes(model, targets, factors, adapted.adapter.scale)
        self._kind = adapted.adapter.quantize_base
        check_quantizer(self._kind, directory / FOLDER / BASE)
        self._quantized = set() if self._kind == "none" else _names_in_files(model)

    @property
    def names(self) -> set[str]:
        """The names of all tensors."""
        return self._base.names

    def __call__(self, name: str) -> torch.Tensor:
        """Return a tensor on the CPU in the base's number format. Raises ConfigError where the base lacks it."""
        tensor, change = self._base(name), self._changes.get(name)
        dtype = tensor.dtype
        if name in self._quantized:
            tensor = quantize(tensor, self._kind).dense(torch.float32)
        return (tensor if change is None else tensor.float() + change).to(dtype)


def _names_in_files(model: "PreTrainedModel") -> set[str]:
    """Return the files' names of all weights that a base in few bits has quantized."""
    from transformers.core_model_loading import revert_weight_conversion

    names: set[str] = set()
    for target in adaptable(model):
        names |= set(revert_weight_conversion(model, {target.parameter: torch.empty(target.shape, device="meta")}))
    return names
