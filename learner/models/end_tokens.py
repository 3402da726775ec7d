"""The tokens at which a response ends, told from a tokenizer and from the files beside it.

    generation_config.json, or else config.json ─┐
    the tokenizer's eos_token ───────────────────┼─► EndTokens ─► training, engines, evaluations, exports
    the end of an answer in the chat template ───┘

A chat model ends a turn with another token than the one that ends a document, and both must stop an engine. This is the
only place that says which tokens these are; workers are told (`broker.schema.weights.ModelFiles`).
"""

import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from headway.broker.errors import ConfigError

from .chat_template import RenderWatch
from .directory_checks import read_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

GENERATION_CONFIG = "generation_config.json"
_ASKED, _ANSWER = "question", "xanswerx"


class EndTokens(NamedTuple):
    """The tokens at which a response ends."""

    any: tuple[int, ...]
    """All of them, in order."""
    text: int
    """The one behind a text that is no conversation: the tokenizer's eos_token."""
    turn: int
    """The one that ends an answer in the chat template; `text` where the template writes none, or there is none."""


def end_tokens(tokenizer: "PreTrainedTokenizerBase") -> EndTokens:
    """Returns the end tokens of the model whose tokenizer this is. Raises ConfigError for a model without any."""
    template = tokenizer.chat_template
    return _end_tokens(tokenizer, repr(template))


@functools.lru_cache(maxsize=16)
def _end_tokens(tokenizer: "PreTrainedTokenizerBase", template: str) -> EndTokens:
    """`template`: the tokenizer's chat template, which may be replaced."""
    path, eos, turn = str(tokenizer.name_or_path or ""), tokenizer.eos_token_id, _end_of_turn(tokenizer)
    configured = configured_ends(path)
    found = sorted({*configured, *(token for token in (eos, turn) if token is not None)})
    if not found:
        raise ConfigError(
            f"model.path: neither the tokenizer of {path or 'this model'} nor {GENERATION_CONFIG} nor config.json names"
            " an eos_token, so no response could ever end. Set eos_token in tokenizer_config.json."
        )
    text = eos if eos is not None else configured[0] if configured else found[0]
    return EndTokens(tuple(found), int(text), int(text if turn is None else turn))


def configured_ends(path: str) -> list[int]:
    """Returns the end tokens of generation_config.json in a directory or a downloaded hub id, or of config.json."""
    for name in (GENERATION_CONFIG, "config.json"):
        content = read_json(path, name) or {}
        stated = content.get("eos_token_id", (content.get("text_config") or {}).get("eos_token_id"))
        if stated is not None:
            tokens = stated if isinstance(stated, list) else [stated]
            if not all(type(token) is int for token in tokens):
                raise ConfigError(f"model.path: eos_token_id in {path}/{name} is {stated!r}; expected token ids.")
            return tokens
    return []


def _end_of_turn(tokenizer: "PreTrainedTokenizerBase") -> int | None:
    """Returns the first token that the template writes behind an answer, if that is one that stands for itself."""
    known = dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
    known |= {token.content: number for number, token in tokenizer.added_tokens_decoder.items()}
    for text in _answered(tokenizer):
        _, found, behind = text.rpartition(_ANSWER)
        if found:
            first = [token for token in known if token.strip() and behind.lstrip().startswith(token.strip())]
            return int(known[max(first, key=len)]) if first else None
    return None


def _answered(tokenizer: "PreTrainedTokenizerBase") -> Iterator[str]:
    """Yields a conversation of one question and its answer as the template writes it, in forms that it may want."""
    if not tokenizer.chat_template:
        return
    watch = RenderWatch()
    parts: list[Any] = [_ASKED, [{"type": "text", "text": _ASKED}]]
    for asked in parts:
        answer = _ANSWER if asked is _ASKED else [{"type": "text", "text": _ANSWER}]
        messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
        render = functools.partial(tokenizer.apply_chat_template, messages, tokenize=False)
        try:
            yield str(watch.run(render, f"The chat template of {tokenizer.name_or_path or 'the model'}"))
        except ConfigError:
            raise
        except Exception:  # noqa: BLE001 - a template may refuse it in any way; conversations tell what it refuses
            continue
