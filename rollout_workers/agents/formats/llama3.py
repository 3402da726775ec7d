"""Llama 3: turns between header tokens, calls of tools as JSON, their answers from the role ipython."""

import json
from collections.abc import Sequence

from headway.rollout_workers.agents.conversation import Message, Tool

from .messages import with_described_tools, with_written_calls
from .reading import Reading, is_json, read_broken_call, read_call

_PYTHON_TAG = "<|python_tag|>"
_CALL = '{{"name": {name}, "parameters": {arguments}}}'
_HOW = (
    "You may call these functions, each a JSON schema on a line of its own:\n{tools}\n"
    'Call a function by an answer that is JSON alone, {{"name": NAME, "parameters": OBJECT}}, on a line for each call.'
)


class Llama3:
    """An answer that consists of JSON, perhaps behind <|python_tag|>, is calls."""

    name = "llama3"
    template = (
        "{{ bos_token }}{% for message in messages %}<|start_header_id|>{{ message.role }}<|end_header_id|>\n\n"
        "{{ message.content }}<|eot_id|>{% endfor %}"
        "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
    )
    closing: tuple[str, ...] = ("<|eom_id|>",)

    def read(self, text: str, is_ended: bool) -> Reading:
        """Return the calls of which an answer consists. An answer with anything else is content."""
        is_tagged = text.strip().startswith(_PYTHON_TAG)
        rest = text.strip().removeprefix(_PYTHON_TAG).strip()
        calls: list[tuple[str, str]] = []
        while rest.startswith("{"):
            end = _end_of_object(rest)
            call = _call(rest[:end])
            if call is None:
                break
            calls.append(call)
            rest = rest[end:].lstrip("; \n")
        if calls and not rest:
            return Reading("", calls)
        is_open = not is_json(rest) if rest.startswith("{") else is_tagged
        if is_open and is_ended and (is_tagged or '"parameters"' in rest):
            broken = read_broken_call(rest, "parameters")
            return Reading("", [*calls, broken], is_open) if broken else Reading(text, is_open=is_open)
        return Reading(text, is_open=is_open)

    def as_text(self, messages: list[Message], tools: Sequence[Tool]) -> list[Message]:
        """Return messages in which the system describes the tools, and the role ipython has what they answered."""
        return [
            {
                "role": "ipython" if message["role"] == "tool" else message["role"],
                "content": with_written_calls(message, _CALL),
            }
            for message in with_described_tools(messages, tools, _HOW)
        ]


def _end_of_object(text: str) -> int:
    """Return where the JSON value ends with which a text begins; the text's end if it is broken."""
    try:
        return json.JSONDecoder().raw_decode(text)[1]
    except (ValueError, RecursionError):
        return len(text)


def _call(text: str) -> tuple[str, str] | None:
    """Return a call that states what it gives the tool. JSON that does not is an answer."""
    for key in ("parameters", "arguments"):
        call = read_call(text, key)
        if call and call[1]:
            return call
    return None
