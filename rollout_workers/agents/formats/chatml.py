"""ChatML with tools as Hermes writes them: Qwen2.5, Qwen3, SmolLM2, Hermes."""

from collections.abc import Iterator, Sequence
from itertools import islice

from headway.rollout_workers.agents.conversation import Message, Tool

from .messages import with_described_tools, with_written_calls
from .reading import Reading, read_broken_call, read_call

_BEGIN, _END = "<tool_call>", "</tool_call>"
_MOST_ENDS = 16
"""The number of ends that are tried for a call whose arguments may contain that text."""

_CALL = '<tool_call>\n{{"name": {name}, "arguments": {arguments}}}\n</tool_call>'
_HOW = (
    "You may call these functions, each a JSON schema on a line of its own:\n<tools>\n{tools}\n</tools>\n"
    'Call a function by writing JSON between tags:\n<tool_call>\n{{"name": NAME, "arguments": OBJECT}}\n</tool_call>\n'
    "What it returns comes back between <tool_response> and </tool_response>."
)


class ChatML:
    """Calls are JSON between <tool_call> and </tool_call>; a user's turn has their answers."""

    name = "chatml"
    template = (
        "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    closing: tuple[str, ...] = ()

    def read(self, text: str, is_ended: bool) -> Reading:
        """Return the parts of an answer. A call without its end, or without a name, is content."""
        contents: list[str] = []
        calls: list[tuple[str, str]] = []
        place, begin = 0, text.find(_BEGIN)
        while begin >= 0 and text.find(_END, begin) >= 0:
            call, after = _call(text, begin + len(_BEGIN))
            contents.append(text[place : begin if call else after])
            calls += [call] if call else []
            place, begin = after, text.find(_BEGIN, after)
        contents.append(text[place:])
        content = "\n".join(part for part in map(str.strip, contents) if part) if calls else text
        return Reading(content, calls, is_open=begin >= 0)

    def as_text(self, messages: list[Message], tools: Sequence[Tool]) -> list[Message]:
        """Return messages in which the system describes the tools, and a user's turn has what they answered."""
        written: list[Message] = []
        is_after_tool = False
        for message in with_described_tools(messages, tools, _HOW):
            is_tool = message["role"] == "tool"
            text = _response(message) if is_tool else with_written_calls(message, _CALL)
            if is_tool and is_after_tool:
                written[-1]["content"] += "\n" + text
            else:
                written.append({"role": "user" if is_tool else message["role"], "content": text})
            is_after_tool = is_tool
        return written


def _call(text: str, begin: int) -> tuple[tuple[str, str] | None, int]:
    """Return the call that begins at a place of a text, or None if it names no tool, and where the text goes on. The
    call ends at the first end behind valid JSON, or at the first one at all."""
    for end in islice(_ends(text, begin), _MOST_ENDS):
        if call := read_call(text[begin:end], "arguments"):
            return call, end + len(_END)
    end = text.index(_END, begin)
    return read_broken_call(text[begin:end], "arguments"), end + len(_END)


def _ends(text: str, begin: int) -> Iterator[int]:
    end = text.find(_END, begin)
    while end >= 0:
        yield end
        end = text.find(_END, end + 1)


def _response(message: Message) -> str:
    return f"<tool_response>\n{message['content']}\n</tool_response>"
