"""The formats of the package `renderers` (https://github.com/PrimeIntellect-ai/renderers), one for each of its models.

It writes the names of special tokens in a message as these tokens, so messages that have some are refused here. It
reads the arguments of calls and writes them anew, so they are JSON as Python writes it; broken ones are as they were.
"""

import json
from collections.abc import Sequence
from typing import Any

from headway.broker.errors import ConfigError
from headway.broker.installation import check_extra
from headway.rollout_workers.agents.conversation import FormatError, Message, ParsedAnswer, Tool

from .messages import check_asks, checked
from .options import AgentFormatOptions
from .reading import is_text, numbered, read_broken_call
from .vocabulary import Vocabulary

_ASKED = {"role": "user", "content": "question"}
_CUT = "\ue000"
_UNCLOSED = "unclosed_block"


class PrimeRenderers:
    """Renders by a renderer of the package, and refuses what that would not write as it is."""

    name = "renderers"

    def __init__(self, tokenizer: Any, end_tokens: Sequence[int], options: AgentFormatOptions) -> None:
        """Raises ConfigError where the package is missing, or does not know the renderer."""
        self._vocabulary = Vocabulary(tokenizer)
        self._renderer = _opened(tokenizer, options)
        opened, before = (self._renderer.render_ids([_ASKED], add_generation_prompt=each) for each in (True, False))
        self._opening = opened[len(before) :]
        if opened[: len(before)] != before or not self._opening:
            raise ConfigError("The renderer does not say where an answer begins, so none can be followed.")
        self.stop_token_ids = tuple(dict.fromkeys((*end_tokens, *self._renderer.get_stop_token_ids())))

    def render(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        """Return the tokens of a whole conversation. Raises FormatError."""
        found = self._checked(messages, tools)
        try:
            return list(self._renderer.render_ids(found, tools=list(tools) or None, add_generation_prompt=True))
        except Exception as error:  # a renderer may refuse a conversation in any way
            raise FormatError(f"The renderer refuses a conversation: {type(error).__name__}: {error}") from error

    def bridge(
        self, previous: Sequence[int], new_messages: Sequence[Message], tools: Sequence[Tool]
    ) -> list[int] | None:
        """Return what follows an answer, where the renderer says that it knows."""
        begin = self._begin_of_answer(previous)
        if begin is None:
            return None
        prompt, answer = list(previous[:begin]), list(previous[begin:])
        if not self._is_ended(answer) and self._is_open(answer, tools):
            return None
        try:
            found = self._checked(new_messages, tools)
            bridged = self._renderer.bridge_to_next_turn(prompt, answer, found, tools=list(tools) or None)
        except Exception:  # noqa: BLE001 - a renderer may refuse a conversation in any way; `render` says why
            return None
        tokens = list(bridged.token_ids) if bridged is not None else []
        whole = [*prompt, *answer]
        return tokens[len(whole) :] if len(tokens) > len(whole) and tokens[: len(whole)] == whole else None

    def parse(self, token_ids: Sequence[int], tools: Sequence[Tool]) -> ParsedAnswer:
        """Return the parts of an answer. What the renderer fails to read is content."""
        try:
            read = self._read(token_ids, tools)
            calls = [call for call in map(_call, read.tool_calls if tools else ()) if call is not None]
            reasoning = read.reasoning_content or ""
        except Exception:  # noqa: BLE001 - any tokens are an answer
            return self._as_text(token_ids)
        if len(calls) < len(read.tool_calls):  # the content of these lacks what was no call
            return self._as_text(token_ids)
        return ParsedAnswer(content=read.content or "", tool_calls=numbered(calls), reasoning=reasoning)

    def _as_text(self, token_ids: Sequence[int]) -> ParsedAnswer:
        return ParsedAnswer(content=self._vocabulary.decode(token_ids[: len(token_ids) - self._is_ended(token_ids)]))

    def _is_ended(self, answer: Sequence[int]) -> bool:
        return bool(answer) and answer[-1] in self.stop_token_ids

    def _is_open(self, answer: list[int], tools: Sequence[Tool]) -> bool:
        """Return whether an answer ends in the middle of a thought or a call, as far as the renderer can tell."""
        try:
            read = self._read(answer, tools)
        except Exception:  # noqa: BLE001 - any tokens are an answer
            return True
        return read.reasoning_complete is False or any(call.status == _UNCLOSED for call in read.tool_calls if tools)

    def _read(self, token_ids: Sequence[int], tools: Sequence[Tool]) -> Any:
        # The beginning of an answer tells the renderer whether the prompt has begun a thought.
        return self._renderer.parse_response(list(token_ids), tools=list(tools) or None, prompt_ids=list(self._opening))

    def _begin_of_answer(self, previous: Sequence[int]) -> int | None:
        length = len(self._opening)
        for place in range(len(previous) - length, -1, -1):
            if list(previous[place : place + length]) == self._opening:
                return place + length
        return None

    def _checked(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
        found = checked(messages, tools)
        check_asks(found)
        for message in found:
            is_trusted = message["role"] in ("system", "assistant")
            if self._vocabulary.guarded(message["content"], _CUT, is_trusted=is_trusted) != message["content"]:
                raise FormatError(
                    f"A message of the role {message['role']} has the name of a special token, which the package"
                    f" renderers would write as that token: {message['content'][:200]!r}."
                )
        return found


def _opened(tokenizer: Any, options: AgentFormatOptions) -> Any:
    for module in ("renderers", "httpx"):
        check_extra("agents", module, "agent.format.kind=renderers")
    from renderers import config_from_name, create_renderer
    from renderers.base import MODEL_RENDERER_MAP

    name = MODEL_RENDERER_MAP.get(options.renderer, options.renderer)
    if name not in set(MODEL_RENDERER_MAP.values()):
        known = ", ".join(sorted(set(MODEL_RENDERER_MAP.values())))
        raise ConfigError(f"agent.format.options.renderer: there is no {name!r}. Known: {known}.")
    try:
        # Bridges go on behind thoughts, which are not rendered again. It changes nothing of whole conversations.
        config = type(config_from_name(name))(thinking_retention="all")
        return create_renderer(tokenizer, config, chat_template_kwargs=options.template_options or None)
    except Exception as error:  # a renderer asks the tokenizer for tokens that another one lacks
        raise ConfigError(f"The renderer {name!r} does not fit the model's tokenizer: {error}") from error


def _call(call: Any) -> tuple[str, str] | None:
    """Return the name and the arguments of a call; None if it has no name that a message can carry, or no end."""
    if call.status == _UNCLOSED:
        return None
    if not call.name:
        return read_broken_call(call.raw, "arguments")
    given = call.arguments
    arguments = given if isinstance(given, str) else json.dumps(given or {}, ensure_ascii=False)
    if not is_text(arguments):
        arguments = json.dumps(given)
    return (call.name, arguments) if is_text(call.name) else None
