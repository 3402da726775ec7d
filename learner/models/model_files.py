"""The files of a model besides its weights. They go to workers, checkpoints and exports as they are.

    model.path ─► kept_files ─┬─► workers: what configures the model and what makes tokens of text (`model_files`)
                              └─► checkpoints and exports, beside the weights that were trained (`write_files`)

Only values that the recipe or the training decides are replaced: the class and the number format in config.json,
the end tokens in generation_config.json, and `model.chat_template` in the place of the model's own template.

The files of a reward model are those that `transformers.AutoModelForSequenceClassification` loads.
"""

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from headway.broker.errors import ConfigError
from headway.broker.schema.weights import ModelFiles
from headway.learner.config import ModelConfig

from .directory_checks import WEIGHTS, kept_paths, read_bounded
from .end_tokens import GENERATION_CONFIG, end_tokens
from .pretrained import load_config, load_tokenizer, reading

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase


Files = dict[str, bytes]
"""The contents by the names below the model's directory."""
CONFIG, TOKENIZER_CONFIG, TEMPLATE = "config.json", "tokenizer_config.json", "chat_template.jinja"
TEMPLATES = "additional_chat_templates"
SENT = frozenset({".bpe", ".jinja", ".json", ".md", ".model", ".tiktoken", ".txt", ".vocab"})
"""The suffixes of files that workers get and write (`rollout_workers/model_download.py`): nothing executes them."""


def kept_files(model: ModelConfig, *, dtype: str = "", is_trained: bool = True) -> Files:
    """Returns the files of a checkpoint or export besides its weights, whose number format is `dtype`; by default
    `model.dtype`. `is_trained`: the weights beside them are not those of the files, which may be quantized."""
    config, tokenizer = load_config(model), load_tokenizer(model)
    files = _made(config, tokenizer) if model.random is not None else _read(model.path)
    _set_config(files, config, dtype or model.dtype, is_trained=is_trained)
    if model.chat_template:
        _set_template(files, tokenizer.chat_template)
    _set_end_tokens(files, end_tokens(tokenizer).any)
    return files


def model_files(model: ModelConfig) -> ModelFiles:
    """Returns the files from which workers on other file systems configure the model and decode its tokens."""
    files = kept_files(model, is_trained=False)
    sent = {name: content for name, content in files.items() if _is_sent(name)}
    return ModelFiles(files=sent, end_tokens=end_tokens(load_tokenizer(model)).any)


def write_files(files: Mapping[str, bytes], directory: Path) -> None:
    for name, content in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def _is_sent(name: str) -> bool:
    path = Path(name)
    return path.suffix in SENT and (path.name == name or str(path.parent) == TEMPLATES)


def _read(path: str) -> Files:
    directory = Path(path)
    if not directory.is_dir():
        from huggingface_hub import snapshot_download

        with reading(path):
            directory = Path(snapshot_download(path, ignore_patterns=[f"*{suffix}" for suffix in sorted(WEIGHTS)]))
    return {name: read_bounded(file) for name, file in kept_paths(directory).items()}


def _made(config: "PretrainedConfig", tokenizer: "PreTrainedTokenizerBase") -> Files:
    """Returns the files of a model that has none: `model.random`."""
    from transformers import GenerationConfig

    with tempfile.TemporaryDirectory() as directory:
        config.save_pretrained(directory)
        GenerationConfig.from_model_config(config).save_pretrained(directory)
        tokenizer.save_pretrained(directory)
        return {name: path.read_bytes() for name, path in kept_paths(Path(directory)).items()}


def _set_config(files: Files, config: "PretrainedConfig", dtype: str, *, is_trained: bool) -> None:
    content = json.loads(files[CONFIG])
    changed = {"architectures": config.architectures}
    formats = [name for name in ("dtype", "torch_dtype") if name in content] or ["dtype"]
    changed |= dict.fromkeys(formats, dtype)
    kept = {name: value for name, value in content.items() if not (is_trained and name == "quantization_config")}
    _replace(files, CONFIG, content, kept | changed)


def change(files: Files, name: str, values: Mapping[str, Any]) -> None:
    """Set values of an object in one of the files."""
    content = json.loads(files[name])
    _replace(files, name, content, content | values)


def _set_template(files: Files, template: Any) -> None:
    """Put a template in the place of all that the model has."""
    for name in [name for name in files if name.startswith((f"{TEMPLATES}/", "chat_template."))]:
        del files[name]
    files[TEMPLATE] = str(template).encode()
    if TOKENIZER_CONFIG in files:
        content = json.loads(files[TOKENIZER_CONFIG])
        kept = {name: value for name, value in content.items() if name != "chat_template"}
        _replace(files, TOKENIZER_CONFIG, content, kept)


def _set_end_tokens(files: Files, tokens: tuple[int, ...]) -> None:
    """Name all end tokens where servers look for them; a file that names them already stays as it is."""
    content = json.loads(files[GENERATION_CONFIG]) if GENERATION_CONFIG in files else {}
    stated = content.get("eos_token_id", json.loads(files[CONFIG]).get("eos_token_id"))
    if {*tokens} - {*(stated if isinstance(stated, list) else [stated])}:
        ids = list(tokens) if len(tokens) > 1 else tokens[0]
        _replace(files, GENERATION_CONFIG, content, content | {"eos_token_id": ids})


def _replace(files: Files, name: str, before: dict[str, Any], now: dict[str, Any]) -> None:
    """Replace an object where it changes; else the file keeps its bytes."""
    if now != before:
        files[name] = json.dumps(now, indent=2, ensure_ascii=False).encode() + b"\n"


def check_classifier(model: ModelConfig) -> None:
    """Raise ConfigError for a model that transformers does not know as a classifier with a head of `score.weight`."""
    from transformers import AutoModelForSequenceClassification

    config = _config(model, load_tokenizer(model))
    with torch.device("meta"):
        made = AutoModelForSequenceClassification.from_config(config)
    body, names = f"{made.base_model_prefix}.", set(made.state_dict())
    others = {name for name in names if not name.startswith(body)}
    if others != {"score.weight"} or made.base_model is made:
        raise ConfigError(
            f"model: transformers' {type(made).__name__} has the head {sorted(others)}; reward models have score.weight"
            " alone."
        )


def classifier_files(model: ModelConfig, *, dtype: str = "") -> Files:
    """Return the files that go along with the weights, with the padding token that scores need. `dtype`: the number
    format of the weights; by default `model.dtype`."""
    tokenizer = load_tokenizer(model)
    config = _config(model, tokenizer)
    files = kept_files(model, dtype=dtype)
    label = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    named = {"architectures": config.architectures, "pad_token_id": config.pad_token_id}
    change(files, CONFIG, label | named)
    for name in (TOKENIZER_CONFIG, "special_tokens_map.json"):
        if name in files:
            change(files, name, {"pad_token": tokenizer.pad_token})
    return files


def _config(model: ModelConfig, tokenizer: "PreTrainedTokenizerBase") -> "PretrainedConfig":
    """Return the model's configuration as a classifier's; `tokenizer` gets another padding token where it has to."""
    from transformers import AutoModelForSequenceClassification

    config = load_config(model)
    if type(config) not in AutoModelForSequenceClassification._model_mapping:
        raise ConfigError(
            f"model: transformers has no sequence classifier of the type {config.model_type}, so a reward model of it"
            " could not be loaded. Start from a model of another type, such as qwen3 or llama."
        )
    config.architectures = [AutoModelForSequenceClassification._model_mapping[type(config)].__name__]
    config.num_labels = 1
    tokenizer.pad_token = _padding(tokenizer)
    config.pad_token_id = tokenizer.pad_token_id
    return config


def _padding(tokenizer: "PreTrainedTokenizerBase") -> str:
    """Return a special token that ends no response: the tokenizer's own, or another one where that is an end token."""
    ends = end_tokens(tokenizer)
    ending = tokenizer.convert_ids_to_tokens([ends.text, ends.turn])
    added = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    known = (tokenizer.pad_token, *tokenizer.all_special_tokens, *added)
    others = [token for token in known if token not in ending]
    if not others:
        raise ConfigError(
            f"model: the tokenizer's only special tokens end responses ({', '.join(sorted({*ending}))}). Scores of"
            " several texts at once need another one to pad with: set pad_token in the tokenizer's files."
        )
    return str(others[0])
