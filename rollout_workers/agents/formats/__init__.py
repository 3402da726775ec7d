"""Formats write conversations as one family of models reads them, and read what the model wrote.

    open_format ──► chatml.py, llama3.py  markups of tool calls ──┐
                                                                  ├─► template.py: the model's own chat template
                    checks.py: bridges compared at opening ───────┘
                    plain.py            marks of the options, for models without a template
                    prime_renderers.py  the package `renderers`, for the models that it knows

    vocabulary.py  texts to tokens and back; messages.py  messages checked; reading.py  JSON as it is written

The invariant: what follows an answer is written as the template writes it, behind the very tokens that were sampled;
and only a format writes special tokens, never the text of a message.

What goes wrong, and what becomes of it:

| what | what becomes of it |
|---|---|
| no format is known for the tokenizer, or its template writes calls in another way | ConfigError at opening |
| the template writes behind an answer what depends on what was before | ConfigError at opening |
| the template rewrites what was before, as Qwen3's leaves out old thoughts | bridges never render it again |
| the template writes no tools, as SmolLM2's | the system describes them, and calls and results are text (`as_text`) |
| the template leaves out a message's content, or refuses the conversation | FormatError |
| two tool calls in a message, where the template writes one (Llama 3) | FormatError in `render`; bridges go on |
| a message is no text, its role is unknown, or the last one is the assistant's | FormatError |
| a message of the user or a tool names an added token, such as `<|im_end|>` | it is text, which is warned of |
| a message of the system or the assistant does | so are special tokens; others, such as `<think>`, are tokens |
| a tool's result has a tag that is no token, such as SmolLM2's `</tool_response>` | it is text, as the format's own |
| an answer that its length cut, outside of calls and thoughts | its turn is closed with the token that ends it |
| an answer that its length cut, within a call or a thought | no bridge: None |
| an answer that ended within a call or a thought | a bridge, as its turn is closed; the part is content or reasoning |
| an answer that ended with another stop token, such as `<|endoftext|>` | the token that ends turns follows it |
| a call with broken JSON | name and arguments as they are written; without a name it is content |
| a call without its end | content |
| a call that states no arguments | "" as its arguments; `{}` where it is rendered |
| calls where the conversation has no tools | content |
| arguments in a message: white space, `false`, 1e3, doubled keys | rendered as they are, never parsed |
| a message has reasoning that the template does not write | it is left out |
| two messages of the user or the system in a row, without marks between them (plain) | FormatError |
| a template with today's date (Llama 3.2) | prompts of two days differ; turns that are recorded do not |
| the user's text has a character that the tokenizer lacks (plain) | FormatError, or the option `unknown_character` |
"""

from pathlib import Path
from typing import Any

from headway.broker.errors import ConfigError
from headway.broker.user_code.import_paths import ImportRoots, load_custom
from headway.broker.user_code.kinds import unknown_kind
from headway.rollout_workers.agents.conversation import ChatFormat, FormatError

from .options import AgentFormatOptions

KINDS = ("auto", "chatml", "llama3", "plain", "renderers")

_WHERE = "agent.format.kind"
_TOKENS = {
    "chatml": ("<|im_start|>", "<|im_end|>"),
    "llama3": ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
}
"""The added tokens by which a family is known; its template writes the first."""


def open_format(
    model: Path,
    end_tokens: tuple[int, ...],
    kind: str = "auto",
    options: AgentFormatOptions = AgentFormatOptions(),  # noqa: B008 - frozen
    roots: ImportRoots | None = None,
) -> ChatFormat:
    """Return the format of the model in a directory, which needs no weights.

    `end_tokens`: those at which the engine ends an answer, at least one. `kind`: one of KINDS, or your own as
    package.module:Class, which is called with the directory and these tokens, and may be imported below `roots`.
    Raises ConfigError for a model that no format is known to fit, and for one that `kind` does not fit.
    """
    if not end_tokens:
        raise ConfigError("The run names no token at which an answer ends.")
    if ":" in kind:
        own: ChatFormat = load_custom(kind, ChatFormat, _WHERE, lambda made: made(model, end_tokens), roots=roots)
        return own
    if kind not in KINDS:
        raise unknown_kind(kind, KINDS, _WHERE)
    from .vocabulary import load_tokenizer

    tokenizer = load_tokenizer(model)
    match _kind_of(tokenizer) if kind == "auto" else kind:
        case "chatml":
            from .chatml import ChatML

            return _by_template(tokenizer, ChatML(), end_tokens, options)
        case "llama3":
            from .llama3 import Llama3

            return _by_template(tokenizer, Llama3(), end_tokens, options)
        case "renderers":
            from .prime_renderers import PrimeRenderers

            return PrimeRenderers(tokenizer, end_tokens, options)
    from .plain import PlainFormat

    return PlainFormat(tokenizer, end_tokens, options)


def _kind_of(tokenizer: Any) -> str:
    """Return the format of a tokenizer, by its added tokens and its template. Raises ConfigError for unknown ones."""
    added = _added(tokenizer)
    written = tokenizer.chat_template
    for kind, tokens in _TOKENS.items():
        if added.issuperset(tokens) and (not written or tokens[0] in str(written)):
            return kind
    if not written:
        return "plain"
    raise ConfigError(
        f"{_WHERE}: none is known for the model's chat template, which writes neither <|im_start|> nor"
        " <|start_header_id|>. Give `renderers` with the name of a renderer, if that package knows the model, or"
        " `plain` with marks of your own."
    )


def _added(tokenizer: Any) -> set[str]:
    return {token.content for token in tokenizer.added_tokens_decoder.values()}


def _by_template(tokenizer: Any, markup: Any, end_tokens: tuple[int, ...], options: AgentFormatOptions) -> ChatFormat:
    from .checks import check_bridges
    from .template import TemplateFormat

    if lacking := [text for text in _TOKENS[markup.name] if text not in _added(tokenizer)]:
        raise ConfigError(
            f"{_WHERE}={markup.name}: the model's tokenizer lacks {lacking[0]}, so it has another format."
        )
    try:
        chat_format = TemplateFormat(tokenizer, markup, end_tokens, options.template_options)
    except FormatError as error:
        raise ConfigError(f"{_WHERE}={markup.name} cannot write a question: {error}") from error
    check_bridges(chat_format)
    return chat_format
