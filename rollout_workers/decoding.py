"""Tokens to text and back: the part of a tokenizer that a worker uses, and the tokens that end a response."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from headway.broker.errors import ConfigError, HeadwayError
from headway.broker.wire.checks import MAX_TOKEN_ID

ROLES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
"""Special tokens of a tokenizer that are no part of a text: its borders, padding, and what stands for others."""


def _no_tokenizer(text: str, after: int | None) -> Sequence[int]:
    raise HeadwayError(f"No tokenizer was given that could encode {text[:80]!r}.")


class Decoding(NamedTuple):
    """Translates a model's tokens to text, and an environment's text to tokens."""

    decode: Callable[[Sequence[int]], str]
    stop_token_ids: tuple[int, ...]
    encode: Callable[[str, int | None], Sequence[int]] = _no_tokenizer
    """Return an environment's text as tokens: those that it has in the whole text, behind the token `after` if one is
    given, with none that a tokenizer puts around a text. Where the text begins with `after`, that is left out. Raises
    HeadwayError for text that the tokenizer cannot encode."""
    vocabulary: int = MAX_TOKEN_ID + 1
    """The number of the model's token ids; more where that is not known."""


def load_decoding(model: Path, end_tokens: Sequence[int], keeps: Sequence[str] | None = None) -> Decoding:
    """Read the tokenizer from a model directory, which needs no weights. `end_tokens`: at least one; the learner tells
    them (`learner/models/end_tokens.py`). `keeps`: the special tokens that stay in texts; None: all that mark neither a
    text's borders nor what is missing. Raises ConfigError."""
    from transformers import AutoTokenizer

    if not end_tokens:
        raise HeadwayError("The run names no token at which a response ends: its learner is of another version.")
    tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
    dropped = _dropped(tokenizer, end_tokens, keeps)

    def decode(token_ids: Sequence[int]) -> str:
        return str(tokenizer.decode([one for one in token_ids if one not in dropped], skip_special_tokens=False))

    def encode(text: str, after: int | None) -> Sequence[int]:
        if after is None:
            return tokens(text)
        before = str(tokenizer.convert_ids_to_tokens(after))
        whole = tokens(before + text.removeprefix(before))
        return whole[1:] if whole[:1] == [after] else tokens(text)

    def tokens(text: str) -> list[int]:
        try:
            return list(tokenizer(text, add_special_tokens=False).input_ids)
        except Exception as error:  # a character-level tokenizer raises a bare exception for a character that it lacks
            raise HeadwayError(f"The model's tokenizer cannot encode {text[:80]!r}: {error}.") from error

    return Decoding(decode, tuple(end_tokens), encode, _vocabulary(model))


def _vocabulary(model: Path) -> int:
    """Return the number of token ids that the model of the directory has embeddings for."""
    path = model / "config.json"
    config = json.loads(path.read_bytes()) if path.exists() else {}
    size = (config.get("text_config") or {}).get("vocab_size", config.get("vocab_size"))
    return size if isinstance(size, int) else MAX_TOKEN_ID + 1


def _dropped(tokenizer: Any, stops: Sequence[int], keeps: Sequence[str] | None) -> set[int]:
    """Return the special tokens that texts go without. Raises ConfigError where a token to keep is none."""
    check_kept(tokenizer, keeps)
    special = _special(tokenizer)
    if keeps is None:
        return set(special) & {*stops, *(getattr(tokenizer, f"{role}_token_id") for role in ROLES)}
    return {one for one, name in special.items() if name not in keeps}


def check_kept(tokenizer: Any, keeps: Sequence[str] | None) -> None:
    """Raise ConfigError where a special token that is to stay in texts is none of the tokenizer's."""
    special = set(_special(tokenizer).values())
    if unknown := [name for name in keeps or () if name not in special]:
        known = ", ".join(sorted(special)[:20])
        raise ConfigError(
            f"sampling.keep_special_tokens: the model's tokenizer has no special token {unknown[0]!r}; it has {known}."
        )


def _special(tokenizer: Any) -> dict[int, str]:
    """Return the tokenizer's special tokens by their ids."""
    special = {one: str(token) for one, token in tokenizer.added_tokens_decoder.items() if token.special}
    return special | dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))


def response_text(decoding: Decoding, response_tokens: Sequence[int]) -> str:
    """Return the text that reward functions read: the response without the token that ended it."""
    ended = bool(response_tokens) and response_tokens[-1] in decoding.stop_token_ids
    return decoding.decode(response_tokens[:-1] if ended else response_tokens)
