"""Tells what a model's directory lacks, from its files alone, before torch or transformers is imported.

The sizes that its configuration names are checked before a library takes memory for them. Token ids are compared with
the rows of the embedding: a token without one would end the run with an index error, in the learner or in an engine.
"""

import json
import os
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.broker.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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


_MOST = {
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 10_000),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_key_value_heads", "head_dim"), 1 << 16),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "intermediate_size", "n_inner", "ffn_dim"), 1 << 20),
    **dict.fromkeys(("vocab_size",), 1 << 24),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 1 << 40),
}
"""The largest value of each size that no model may have as 0, far beyond those of today's models."""
_MOST_OF_EXPERTS = {
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok"), 1 << 16),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 1 << 20),
}
"""Those that dense models may have as 0."""
_MOST_PARAMETERS = 10**13


def check_config_sizes(config: Mapping[str, Any], where: str) -> None:
    """Raises ConfigError, with the key in `where`, for a size that is no model's, and for more parameters in all than a
    model has."""
    text = text_config(config)
    for sizes, least in ((_MOST, 1), (_MOST_OF_EXPERTS, 0)):
        for key, most in sizes.items():
            for value in _values(text.get(key)):
                if type(value) is not int or not least <= value <= most:
                    shown = str(value)[:40]
                    raise ConfigError(f"{where}.{key} is {shown}; expected an integer from {least} to {most:,}.")
    if (parameters := _parameters(text)) > _MOST_PARAMETERS:
        raise ConfigError(
            f"{where} describes a model of about {parameters:.1e} parameters, and at most {_MOST_PARAMETERS:.0e} are"
            " taken for meant. Check hidden_size, num_hidden_layers, intermediate_size and the number of experts."
        )


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the part of a configuration that describes the language model."""
    text = config.get("text_config")
    return text if isinstance(text, Mapping) else config


def _values(value: Any) -> Iterator[Any]:
    """Yield a size, or those of all layers where they differ; nothing where the model's own default holds."""
    if isinstance(value, list):
        yield from value
    elif value is not None:
        yield value


def _parameters(text: Mapping[str, Any]) -> float:
    def size(*keys: str) -> float:
        return max((float(value) for key in keys for value in _values(text.get(key))), default=1.0)

    width = size("hidden_size", "n_embd", "d_model")
    blocks = size("intermediate_size", "n_inner", "ffn_dim", "moe_intermediate_size")
    experts = max(1.0, size("num_experts", "num_local_experts", "n_routed_experts"))
    layer = 4 * width * width + 3 * width * blocks * experts
    return size("num_hidden_layers", "n_layer", "n_layers", "num_layers") * layer + size("vocab_size") * width


def check_named_tokens(path: str) -> None:
    """Raises ConfigError for a token of a directory's tokenizer, or an eos_token_id or pad_token_id of its
    configurations, that has no embedding. A tokenizer whose files do not tell its tokens is left to `check_tokens`."""
    config = read_json(path, "config.json") or {}
    rows = _rows(config)
    if rows is None:
        return
    _check(path, _tokens_of_files(path), rows)
    for name in ("config.json", "generation_config.json"):
        content = read_json(path, name) or {}
        for key in ("eos_token_id", "pad_token_id"):
            stated = content.get(key)
            least = 0 if key == "eos_token_id" else -rows
            for token in stated if isinstance(stated, list) else [] if stated is None else [stated]:
                if type(token) is not int or not least <= token < rows:
                    raise ConfigError(
                        f"model.path: {key} in {Path(path, name)} is {token!r}, and the model has the token ids 0 to"
                        f" {rows - 1} (vocab_size is {rows}). Write the id that the tokenizer has."
                    )


def check_tokens(tokenizer: "PreTrainedTokenizerBase", path: str) -> None:
    """Raises ConfigError for a tokenizer with a token that has no embedding, by config.json of its directory. A token
    that transformers adds to all tokenizers of the class, and that the files do not name, is in no text."""
    rows = _rows(read_json(path, "config.json") or {})
    vocabulary = tokenizer.get_vocab()
    if rows is not None and max(vocabulary.values(), default=0) >= rows:
        _check(path, _tokens_of_files(path) or vocabulary, rows)


def _rows(config: Mapping[str, Any]) -> int | None:
    rows = text_config(config).get("vocab_size")
    return rows if type(rows) is int else None


def _check(path: str, tokens: Mapping[str, int], rows: int) -> None:
    beyond = sorted((number, token) for token, number in tokens.items() if number >= rows)
    if not beyond:
        return
    shown = ", ".join(f"{token!r} is {number}" for number, token in beyond[:3])
    raise ConfigError(
        f"model.path: {path}: the tokenizer has token ids up to {beyond[-1][0]}, and the model's embedding has {rows}"
        f" rows (vocab_size in config.json), so {len(beyond)} tokens have no embedding ({shown}). Give the model an"
        " embedding for each (transformers: model.resize_token_embeddings, then save_pretrained), or take a tokenizer"
        " without them."
    )


def _tokens_of_files(path: str) -> dict[str, int]:
    """Return the tokens that transformers makes of the files; none where only loading the tokenizer tells them."""
    try:
        return dict(_read_tokens(path))
    except (AttributeError, LookupError, TypeError, ValueError):  # of a form that is not known here
        return {}


def _read_tokens(path: str) -> Iterator[tuple[str, int]]:
    """Yield the tokens of the files, and those that are added for special names."""
    whole = read_json(path, "tokenizer.json")
    known: dict[str, int] = {}
    if whole is None:
        known |= _numbers(read_json(path, "vocab.json"))
        known |= _numbers(read_json(path, "added_tokens.json"))
    else:
        vocabulary = (whole.get("model") or {}).get("vocab")
        if isinstance(vocabulary, list):  # of pairs of a token and its score
            known |= {str(entry[0]): number for number, entry in enumerate(vocabulary) if entry}
        known |= _numbers(vocabulary)
        known |= {str(one.get("content")): int(one["id"]) for one in whole.get("added_tokens") or () if "id" in one}
    if not known:
        return
    settings = read_json(path, "tokenizer_config.json") or {}
    for number, token in (settings.get("added_tokens_decoder") or {}).items():
        known.setdefault(_text(token), int(number))
    for token in _special(settings):
        known.setdefault(token, max(known.values()) + 1)
    yield from known.items()


def _numbers(vocabulary: Any) -> dict[str, int]:
    pairs = vocabulary.items() if isinstance(vocabulary, Mapping) else ()
    return {token: number for token, number in pairs if type(number) is int}


def _special(settings: Mapping[str, Any]) -> Iterator[str]:
    for role in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"):
        if token := settings.get(f"{role}_token"):
            yield _text(token)
    more = settings.get("additional_special_tokens") or settings.get("extra_special_tokens") or ()
    for token in more.values() if isinstance(more, Mapping) else more:
        yield _text(token)


def _text(token: Any) -> str:
    return str(token.get("content")) if isinstance(token, Mapping) else str(token)
