"""Tells what a model's directory lacks, from its files alone, before torch or transformers is imported."""

import json
import os
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from headway.broker.errors import ConfigError

PARTS = "A model's directory has config.json, its weights (*.safetensors) and its tokenizer's files."
WEIGHTS = frozenset(
    {
        *(".bin", ".ckpt", ".distcp", ".gguf", ".ggml", ".h5", ".msgpack", ".npy", ".npz", ".onnx", ".onnx_data"),
        *(".ot", ".pb", ".pickle", ".pkl", ".pt", ".pth", ".safetensors", ".tflite"),
    }
)
"""The suffixes of files that hold weights, or a training's state, in any form."""
_OWN = frozenset(["learner.json", "files.json", "digests.json", "optimizer.json", "sft.json", "stage.json"])
_OF_WEIGHTS = frozenset(["adapter_config.json", "hf_quant_config.json", "quantize_config.json"])
"""Files that say how the model's former weights are stored."""
MOST_KEPT_BYTES = 128 << 20
"""The most bytes of all files of a model besides its weights. They travel in one message."""

TOKENIZER_FILES = ("*token*", "vocab*", "*.model", "tekken*")
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
MOST_NUMBERS = 1 << 36
"""The most numbers of one tensor in a file. It is read whole."""
_LARGEST = 1 << 40
"""More positions than a model has, and more than they are stretched by."""


def check_path(path: str, key: str = "model.path") -> None:
    """Raises ConfigError, with the recipe's `key`, for a path that is neither a directory nor a hub id."""
    if Path(path).is_file():
        raise ConfigError(f"{key}: {path} is a file. Give the directory of a model, or a hub id.")
    if (path.startswith(("/", ".", "~")) or path.count("/") > 1) and not Path(path).is_dir():
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
    kept_paths(Path(path))
    _check_weights(Path(path))


def _check_weights(directory: Path) -> None:
    """Raises ConfigError for weights that are no safetensors files, or that cannot be whole. Reads the files' tables of
    contents alone. The weights of an adapter's checkpoint are those of its base, which opening it tells."""
    from safetensors import SafetensorError, safe_open

    paths, is_quantized = shards(directory), "quantization_config" in (read_config(str(directory)) or {})
    if not paths and not (directory / "adapter").is_dir():
        other = ", ".join(sorted(path.name for path in directory.iterdir() if path.suffix in WEIGHTS)[:3])
        if not other:
            raise ConfigError(f"model.path: {directory} has no safetensors files, so there are no weights. {PARTS}")
        raise ConfigError(
            f"model.path: {directory} has no safetensors files, and other forms of weights ({other}) are not read:"
            " unpickling can run code. If you trust who made them, save the model once with transformers:"
            " AutoModelForCausalLM.from_pretrained(DIRECTORY).save_pretrained(NEW)."
        )
    for path in paths:
        try:
            with safe_open(path, framework="np") as file:
                for name in file.keys():  # noqa: SIM118 - it is no mapping
                    _check_tensor(path, name, file.get_slice(name), is_quantized=is_quantized)
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"model.path: {path} is damaged or incomplete: {error}. Copy it again.") from error


def _check_tensor(path: Path, name: str, tensor: Any, *, is_quantized: bool) -> None:
    if prod(tensor.get_shape()) > MOST_NUMBERS:
        raise ConfigError(f"model.path: {path}: {name} has more than {MOST_NUMBERS:,} numbers.")
    if name.endswith("weight") and tensor.get_dtype()[0] in "IU" and not is_quantized:
        raise ConfigError(
            f"model.path: {path}: {name} has whole numbers ({tensor.get_dtype()}), and config.json has no"
            " quantization_config that says what they stand for. Give the model's weights as bfloat16, float16 or"
            " float32."
        )


def shards(directory: Path) -> tuple[Path, ...]:
    """Returns the safetensors files of a directory's model. Raises ConfigError for one that its index names and that is
    not there, and for an index that cannot be read."""
    index = directory / INDEX
    if not index.exists():
        return tuple(directory.glob(SINGLE))
    try:
        names = {str(name) for name in json.loads(read_bounded(index))["weight_map"].values()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ConfigError(f"model.path: {index} is no index of weights: {error!r}. Copy it again.") from error
    if outside := [name for name in sorted(names) if Path(name).name != name]:
        raise ConfigError(f"model.path: {index} names {outside[0]!r}, which is no file beside it.")
    if missing := [name for name in sorted(names) if not (directory / name).is_file()]:
        raise ConfigError(
            f"model.path: {index} names {len(names)} files, and {len(missing)} of them are missing:"
            f" {', '.join(missing[:3])}. Copy or download them again."
        )
    return tuple(directory / name for name in sorted(names))


def kept_paths(directory: Path) -> dict[str, Path]:
    """Returns the files that go along with the model, by their names below its directory: all but weights, hidden
    files, folders that have weights of their own (those of other models), and the state of a training.

    Raises ConfigError for more than `MOST_KEPT_BYTES`.
    """
    found: dict[str, Path] = {}
    for folder, folders, names in os.walk(directory, followlinks=False):
        is_own = Path(folder) != directory and any(Path(name).suffix in WEIGHTS for name in names)
        folders[:] = [] if is_own else sorted(name for name in folders if not name.startswith("."))
        for name in sorted(() if is_own else names):
            path = Path(folder, name)
            if not _stays(name) and path.is_file():
                found[str(path.relative_to(directory))] = path
    sizes = {name: path.stat().st_size for name, path in found.items()}
    if sum(sizes.values()) > MOST_KEPT_BYTES:
        largest = max(sizes, key=lambda name: sizes[name])
        raise ConfigError(
            f"model.path: {directory} has {sum(sizes.values()) >> 20} MiB besides its weights, {sizes[largest] >> 20}"
            f" MiB of them in {largest}; at most {MOST_KEPT_BYTES >> 20} MiB go along with a model. Move what is none"
            " of the model's out of its directory."
        )
    return found


def _stays(name: str) -> bool:
    is_of_weights = Path(name).suffix in WEIGHTS or name.endswith(".index.json") or name in _OF_WEIGHTS
    return is_of_weights or name in _OWN or name.startswith(".")


def read_bounded(path: Path) -> bytes:
    """Returns the content of a file that goes along with a model. Raises ConfigError for one of more than
    `MOST_KEPT_BYTES`."""
    if (size := path.stat().st_size) > MOST_KEPT_BYTES:
        raise ConfigError(f"model.path: {path} has {size >> 20} MiB; at most {MOST_KEPT_BYTES >> 20} MiB are read.")
    return path.read_bytes()


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
    """Returns config.json; see `read_json`."""
    return read_json(path, "config.json")


def read_json(path: str, name: str) -> Mapping[str, Any] | None:
    """Returns a JSON file of a directory, or of a hub id that was downloaded before; None where there is none here, or
    it cannot be read."""
    if not path:
        return None
    file: str | Path = Path(path, name)
    if not Path(path).is_dir():
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError

        try:
            found = try_to_load_from_cache(path, name)
        except HFValidationError:
            return None
        if not isinstance(found, str):
            return None
        file = found
    try:
        content = json.loads(read_bounded(Path(file)))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


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
