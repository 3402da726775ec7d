"""Token ids that a model's files name, compared with the rows of its embedding before anything is started.

A token without an embedding would end the run with an index error, in the learner or in an engine.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.broker.errors import ConfigError

from .directory import read_json
from .sizes import text_config

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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
